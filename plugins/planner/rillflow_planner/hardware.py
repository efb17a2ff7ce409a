"""Hardware: devices, the links between them, and the share of their peak performance that models reach.

devices.toml (shipped) ─┐
cluster.toml ───────────┴─> Hardware: machines by type
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from rillflow.errors import PlanError
from rillflow.placement import tables
from rillflow.placement.plan import PlannedPool
from rillflow.placement.tables import TEXT, named, read, values
from rillflow_planner import units
from rillflow_planner.units import Part, Rate, Seconds, Share


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Efficiency shares between 0 and 1, and seconds of overheads without a formula."""

    train_flops: Share = 0.4
    """Share of peak FLOP/s in forward and backward passes."""
    score_flops: Share = 0.5
    """Share of peak FLOP/s in forward passes over whole rows, including prefill."""
    decode_bandwidth: Share = 0.6
    """Share of memory bandwidth when decoding reads weights and KV cache."""
    decode_flops: Share = 0.5
    """Share of peak FLOP/s when decoding many rows."""
    expert_flops: Share = 0.5
    """Speed of the smaller matrix products of routed experts, as a share of other products."""
    inside_links: Share = 0.7
    """Share of the bandwidth inside a machine."""
    between_links: Share = 0.7
    """Share of the bandwidth between machines."""
    host_links: Share = 0.5
    """Share of the bandwidth to host memory, which holds offloaded model state."""
    memory: Share = 0.9
    """Share of the memory that models may use; the rest is for libraries."""
    touches: Annotated[float, tables.number(0.0, 1000.0, "it is a number of passes, 0 to 1000")] = 0.0
    """Additional memory passes over each activation in a forward pass; 0 with fused kernels."""
    head_token_s: Seconds = 0.0
    """Additional seconds of attention per head and token of a row, forward, for small blocks."""
    hidden: Part = 1.0
    """Share of decoding reads and shard gathers that overlaps with computation."""
    pass_s: Seconds = 0.0
    """Additional seconds of a pass over a micro-batch outside layers, such as row layout and loss sums."""
    launch_s: Seconds = 1e-4
    """Additional seconds of a layer's pass over a micro-batch, for kernel launches."""
    expert_launch_s: Seconds = 5e-4
    """Further seconds of an expert layer, for counting and sorting tokens before dispatch."""
    decode_launch_s: Seconds = 2e-5
    """Additional seconds of a layer per decoded token position; lower because of CUDA graphs."""
    decode_token_s: Seconds = 0.0
    """Additional seconds per decoded token position outside layers: the engine's scheduling."""
    decode_row_s: Seconds = 5e-6
    """Seconds per row and decoded token outside the model (scheduling and sampling); tp does not reduce them.
    """
    row_s: Seconds = 0.0
    """Additional seconds per generated row, for admission and delivery."""
    collective_s: Seconds = 1e-5
    """Latency of a collective within a machine."""
    between_collective_s: Seconds = 3e-5
    """Latency of a collective across machines."""
    call_s: Seconds = 0.0
    """Additional seconds to call a stage on several devices and receive the results."""
    step_s: Seconds = 0.0
    """Seconds of a step outside stages."""
    step_row_s: Seconds = 0.0
    """Further seconds of a step outside stages per row, for recording the row."""
    refit: Rate = 0.0
    """Bytes per second when a published stack moves whole tensors to colocated generation; with 0, and in
    Rillflow, only missing shards move, at the speed of the links.
    """
    refit_separate: Rate = 0.0
    """The same to a separate sampler."""


@dataclass(frozen=True, kw_only=True)
class EngineFactors:
    """Behaviour of a software stack."""

    zero1: bool = False
    """Whether optimiser state is sharded over dp (ZeRO-1), with whole weights and gradients."""
    cuts_sequence: bool = False
    """Whether tensor parallelism cuts the tokens of norms and residuals too (sequence parallelism)."""
    offloads: bool = False
    """Whether an idle model's state moves to the host, unless there is a separate sampler."""
    interrupts: bool = True
    """Whether new weights interrupt a separate sampler's rows, which then continue; otherwise rows end first.
    """
    drains: bool = False
    """Without interrupts: whether replicas wait until all of them have ended their rows."""
    counts: bool = False
    """Whether admission counts rows: (k + 1) steps' rows may be begun and not trained when weights arrive,
    and a batch takes the rows that end first, of any age. Otherwise no row is older than the bound.
    """
    scatters: bool = False
    """Whether ranks of a job that is larger than a rack may lie in any racks, so only a node's are joined."""
    holds_prompts: bool = False
    """Whether a prompt counts as in flight until its longest answer has ended."""
    cache: Share = 1.0
    """Share of a device's memory for weights and KV cache when generation is colocated with training."""
    cache_separate: Share = 1.0
    """Share of a device's memory for weights and KV cache of a separate sampler."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Prediction errors on published steps that were not used in the fit."""

    median: float
    """Median of the absolute relative errors."""
    worst: float
    """Largest absolute relative error."""
    low: float
    """Measured over predicted seconds: 10% quantile."""
    high: float
    """Measured over predicted seconds: 90% quantile."""
    held: float
    """Share of steps within the range of steps of other models, releases and machines."""
    bias: float = 1.0
    """Factor that removes the bias of a search for the smallest prediction; 1 for given layouts."""
    stage_low: float = 0.0
    """Measured over predicted seconds of a stage: 10% quantile; 0 if not measured."""
    stage_high: float = 0.0
    """Measured over predicted seconds of a stage: 90% quantile."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Error of predicted speed-ups against published pairs."""

    median: float
    """Median of the absolute difference, in points of the step."""
    worst: float
    """Largest absolute difference."""
    right: int
    """Pairs whose sign was predicted."""
    pairs: int
    """Number of pairs."""

    @property
    def text(self) -> str:
        """The errors in words."""
        points = f"off by {100 * self.median:.0f} points (median; at most {100 * self.worst:.0f})"
        return f"{points}, with the right sign in {self.right} of {self.pairs}"


@dataclass(frozen=True, kw_only=True)
class UnfittedErrors:
    """Published steps of another kind than those of a fit, as multiples of their predictions."""

    of: str
    """Whose steps they are, and on which devices or in which precision."""
    steps: int
    """Number of steps."""
    low: float
    """Smallest measured over predicted seconds."""
    high: float
    """Largest measured over predicted seconds."""

    @property
    def text(self) -> str:
        """The errors in words."""
        took = f"took {self.low:g} to {self.high:g} times the predicted seconds"
        return f"{self.steps} published steps {self.of} {took}"


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was measured of a stack."""

    layouts: str
    """Runtime whose grids the stack can use."""
    steps: Mapping[str, Sequence[str]]
    """The policy's stages of a step, by algorithm."""
    devices: Sequence[str]
    """Types of devices with errors of steps that were left out of the fit."""
    placed: Accuracy | None = None
    """Errors for given layouts."""
    searched: Accuracy | None = None
    """Errors for the best layout of a search."""
    doubled: Gain | None = None
    """Errors of the change from twice the devices."""
    ahead: Gain | None = None
    """Errors of the change from running a step ahead."""
    unfitted: UnfittedErrors | None = None
    """Errors of other stacks and devices."""
    float8: UnfittedErrors | None = None
    """Errors of steps in FP8."""


MOST_SIZES = 128
"""Largest number of sizes of a pool in whole machines."""
_OVERHEADS = {"step_s", "step_row_s"}
UNFITTED = "default"
"""Factor set of a cluster file that names none."""
_FLEETS = tables.checked(
    lambda tables: tables if isinstance(tables, list) and tables else None,
    "a cluster has one or more [[machine_type]] tables",
    '[[machine_type]], device = "H100", devices = 8, per_machine = 8',
)
_FLEET = {
    "name": TEXT,
    **dict.fromkeys(("devices", "machines", "per_machine"), tables.whole(1)),
    **dict.fromkeys(("between", "between_machine"), units.RATE),
    "price": units.PRICE,
}


def _dtypes(data: object, where: str) -> dict[str, float]:
    return values(data, dict.fromkeys(("float8", "bfloat16", "float32"), units.FLOPS), where)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One type of accelerator, or a rank's share of a CPU."""

    name: str
    """Name, such as ``H100``."""
    memory_bytes: Annotated[float, units.MEMORY, "memory"]
    """Memory in bytes."""
    flops: Annotated[Mapping[str, float], _dtypes]
    """Dense FLOP/s by dtype: ``bfloat16``, ``float32``."""
    memory_bandwidth: Rate
    """Memory bandwidth in bytes per second."""
    inside_bandwidth: Annotated[float, units.RATE, "inside"]
    """Bandwidth to other devices of the machine, in bytes per second in one direction."""
    host_bandwidth: Annotated[float, units.RATE, "host"]
    """Bandwidth to host memory, in bytes per second."""
    source: str = ""
    """Source of these numbers."""
    machine: tables.Count = 8
    """Devices of a usual machine."""
    rack: Annotated[int, tables.whole(0)] = 0
    """Devices of a rack that are joined as in a machine; 0 if racks are not."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines of one type: a table ``[[machine_type]]`` of a cluster file."""

    name: str
    """Name in the cluster file."""
    device: Device
    """Type of all its devices."""
    devices: int
    """Number of devices in all machines."""
    per_machine: int
    """Number of devices per machine."""
    between_bandwidth: float
    """Bandwidth from one device to another machine, in bytes per second in one direction."""
    price_per_hour: float = 0.0
    """Price of one device per hour; 0 if not given."""
    currency: str = "$"
    """Unit of the price."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Possible numbers of devices of a pool: divisors of a machine, or whole machines.

        Of many machines they are powers of two, multiples of one that leave ``MOST_SIZES``, and even parts.
        """
        small = [size for size in range(1, self.per_machine) if self.per_machine % size == 0]
        step = 1
        while self.machines > MOST_SIZES * step:
            small.append(step * self.per_machine)
            step *= 2
        whole = range(step * self.per_machine, self.devices + 1, step * self.per_machine)
        parts = [self.devices // part for part in (1, 2, 4, 8) if self.machines % part == 0]
        return tuple(size for size in sorted({*small, *whole, *parts}) if size <= self.devices)

    @property
    def machines(self) -> int:
        """Number of machines."""
        return max(1, self.devices // self.per_machine)

    def pool(self, name: str, devices: int) -> PlannedPool:
        """Return devices of these machines as a pool of a plan."""
        return PlannedPool(name=name, machine_type=self.name, devices=devices, device=self.device.name)

    def machines_needed(self, sizes: Sequence[int]) -> int:
        """Return the machines needed for pools of these sizes, placing parts of a machine largest first.

        Example:
            fleet_of_8.machines_needed((4, 2, 16)) == 3
        """
        room, free = min(self.per_machine, self.devices), list[int]()
        for part in sorted((size % room for size in sizes if size % room), reverse=True):
            place = next((place for place, left in enumerate(free) if left >= part), None)
            if place is None:
                free.append(room - part)
            else:
                free[place] -= part
        return sum(size // room for size in sizes) + len(free)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster."""

    name: str
    """Name of the cluster."""
    fleets: tuple[Fleet, ...]
    """Machines by type; every pool lies on one type."""
    factors: Factors
    """Efficiency factors of the models on these devices."""
    engine: EngineFactors = field(default_factory=EngineFactors)
    """Behaviour of the software stack."""
    calibrated: str = ""
    """Data that the factors were fitted to; empty if the file does not say."""
    stack: str = ""
    """Name of the shipped factor set in use; empty if the file changes factors or names no set."""
    published: Published | None = None
    """What was measured of the stack with these factors; None if nothing was."""

    @property
    def devices(self) -> int:
        """Number of devices of all machine types."""
        return sum(fleet.devices for fleet in self.fleets)

    def fleet(self, name: str) -> Fleet:
        """Return the machine type with this name."""
        return next(fleet for fleet in self.fleets if fleet.name == name)


def shipped_devices() -> dict[str, Device]:
    """Return the shipped devices by name."""
    return _devices(_shipped("devices"), "devices.toml")


def shipped_stacks() -> dict[str, Hardware]:
    """Return the shipped factor sets by the name used in ``like``, as clusters without machines."""
    return {
        name: Hardware(
            name=name,
            fleets=(),
            factors=read(Factors, data.get("factors", {}), name),
            engine=read(EngineFactors, data.get("engine", {}), name),
            calibrated=data["fitted"],
            published=_published(data.get("published")),
        )
        for name, data in _with_origins(_shipped("stacks")).items()
    }


def _with_origins(stacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factor sets; one with an origin (``of``) has its tables, and changes of its engine."""
    origins = {name: stacks[one["of"]] if "of" in one else {} for name, one in stacks.items()}
    engines = {name: origins[name].get("engine", {}) | one.get("engine", {}) for name, one in stacks.items()}
    return {name: {**origins[name], **one, "engine": engines[name]} for name, one in stacks.items()}


def read_hardware(data: Mapping[str, Any], name: str) -> Hardware:
    """Read a cluster from the content of its TOML file.

    Keys: ``[[machine_type]]`` tables with ``device``, ``devices`` or ``machines``, ``per_machine``,
    ``between`` (one device's share of the network) or ``between_machine`` (a machine's), and ``price``;
    ``[device.NAME]`` tables for devices that are not shipped; ``[factors]`` for efficiency shares, and
    ``calibrated``, a text that names the data behind them.

    Raises:
        PlanError: unknown names, missing or contradictory numbers, missing units, or implausible values.
    """
    stacks = shipped_stacks()
    readers = {"like": tables.one_of(stacks), "machine_type": _FLEETS, "name": TEXT, "calibrated": TEXT}
    readers |= dict.fromkeys(("device", "engine", "factors"), tables.TABLE)
    said = values({"machine_type": [], "like": UNFITTED, **data}, readers, name)
    stack, factors, engine = stacks[said["like"]], said.get("factors", {}), said.get("engine", {})
    changed = bool(engine) or bool(set(factors) - _OVERHEADS)
    devices = shipped_devices() | _devices(said.get("device", {}), f"{name}, device")
    listed = enumerate(said["machine_type"], 1)
    fleets = tuple(_fleet(one, devices, f"{name}, machine type {place}") for place, one in listed)
    labels = [fleet.name for fleet in fleets]
    doubled = next((label for label in labels if labels.count(label) > 1), None)
    if doubled is not None:
        raise PlanError(f"{name} has two machine types called {doubled!r}", fix="give each a different name")
    published = stack.published
    if changed and published is not None:
        published = replace(published, placed=None, searched=None, doubled=None, ahead=None)
    return Hardware(
        name=said.get("name", name),
        fleets=fleets,
        factors=read(Factors, factors, f"{name}, factors", stack.factors),
        engine=read(EngineFactors, engine, f"{name}, engine", stack.engine),
        calibrated=said.get("calibrated", "" if changed else stack.calibrated),
        stack="" if changed or said["like"] == UNFITTED else said["like"],
        published=published,
    )


def _published(data: Mapping[str, Any] | None) -> Published | None:
    if data is None:
        return None
    kinds: dict[str, Any] = {"placed": Accuracy, "searched": Accuracy, "doubled": Gain, "ahead": Gain}
    kinds |= {"unfitted": UnfittedErrors, "float8": UnfittedErrors}
    return Published(**{key: kinds[key](**one) if key in kinds else one for key, one in data.items()})


def _shipped(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text("utf-8"))


def _devices(data: Mapping[str, Any], where: str) -> dict[str, Device]:
    devices: dict[str, Device] = named(Device, data, where)
    for name, device in devices.items():
        require_slower(device.inside_bandwidth, device.memory_bandwidth, f"{where}.{name}, inside")
    return devices


def _fleet(data: Mapping[str, Any], devices: Mapping[str, Device], where: str) -> Fleet:
    told = f"known devices are {', '.join(devices)}; a table [device.NAME] describes others"
    readers = {
        "device": tables.checked(lambda label: devices.get(str(label)), told, known=devices),
        **_FLEET,
    }
    said = values(data, readers, where, needed={"device"})
    device: Device = said["device"]
    count, per_machine = _counted(said, where)
    links = {"between", "between_machine"} & set(said)
    if len(links) == 2 or (count > per_machine and not links):
        raise PlanError(
            f"{where} has {count // per_machine} machines, and {' and '.join(sorted(links)) or 'no link'}",
            why="the link between machines needs one bandwidth: per device, or per machine",
            fix='set between = "50 GB/s" per device, or between_machine = "400 GB/s" per machine',
        )
    alone = said.get("between", device.inside_bandwidth)
    between = said["between_machine"] / per_machine if "between_machine" in said else alone
    require_slower(between, device.memory_bandwidth, f"{where}, the link between machines")
    return Fleet(
        name=said.get("name", device.name.lower()),
        device=device,
        devices=count,
        per_machine=per_machine,
        between_bandwidth=between,
        price_per_hour=said.get("price", 0.0),
        currency="€" if "€" in str(data.get("price")) else "$",
    )


def _counted(said: Mapping[str, int], where: str) -> tuple[int, int]:
    """Return the devices of a machine type and of each machine; one of the three counts may be missing."""
    machines, per_machine = said.get("machines"), said.get("per_machine")
    count = said.get("devices", (machines or 0) * (per_machine or 0))
    each = per_machine or count // (machines or 1)
    if not each or count % each or machines not in (None, count // each):
        told = f"{count} devices" + (f", {machines} machines" if machines else "") + f", {each} per machine"
        raise PlanError(
            f"{where} has {told}",
            why="all machines have the same number of devices, and together all devices of the type",
            fix="set matching counts, such as devices = 16, per_machine = 8; or define two machine types",
        )
    return count, each


def require_slower(link: float, memory: float, where: str) -> None:
    if link > memory:
        raise PlanError(
            f"{where} is {link / 1e9:g} GB/s",
            why=f"received data is written to the device's memory, which moves only {memory / 1e9:g} GB/s",
            fix="check the number and its unit",
        )
