"""Hardware: the devices there are, the links between them, and how well models use both.

devices.toml (shipped) ─┐
cluster.toml ───────────┴─> Hardware: fleets of one device each
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rillflow.errors import PlanError
from rillflow.planner import quantities
from rillflow.planner.quantities import TEXT, Part, Rate, Seconds, Share, named, read, values


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Shares between 0 and 1, and seconds of what no formula gives."""

    train_flops: Share = 0.4
    """Of the peak, in forward and backward passes."""
    score_flops: Share = 0.5
    """Of the peak, in forward passes over whole rows; prefill as well."""
    decode_bandwidth: Share = 0.6
    """Of the memory's bandwidth, reading weights and cache token by token."""
    decode_flops: Share = 0.5
    """Of the peak, decoding with many rows."""
    expert_flops: Share = 0.5
    """Of what other products reach, in the smaller products of routed experts."""
    inside_links: Share = 0.7
    """Of the links inside a machine."""
    between_links: Share = 0.7
    """Of the links between machines."""
    host_links: Share = 0.5
    """Of the links to the host's memory, where states of models go that are not at work."""
    memory: Share = 0.9
    """Of the memory that models may fill; the rest is the libraries'."""
    touches: Annotated[float, quantities.number(0.0, 1000.0, "it counts passes over memory: 0 to 1000")] = 0.0
    """How often a forward pass reads or writes each activation beside products; 0 where kernels are fused."""
    head_token_s: Seconds = 0.0
    """Seconds of one head's attention for one token of a row, forward, beside its products: small blocks."""
    hidden: Part = 1.0
    """Of reads token by token and gathers of shards, the share that runs beside products, not before them."""
    pass_s: Seconds = 0.0
    """Seconds of a pass over a micro-batch beside its layers: rows are laid out, losses are added up."""
    launch_s: Seconds = 1e-4
    """Seconds of a layer's pass over a micro-batch beside its arithmetic: what its kernels cost to start."""
    expert_launch_s: Seconds = 5e-4
    """Seconds of a layer of experts beside that: tokens are counted and sorted before they are sent."""
    decode_launch_s: Seconds = 2e-5
    """Seconds of a layer for one token of all rows beside what is read: recorded kernels start faster."""
    decode_row_s: Seconds = 5e-6
    """Seconds of one row for one token beside the model: scheduling and sampling, shared by no devices."""
    row_s: Seconds = 0.0
    """Seconds of a row that is generated beside its tokens: it is given a place, and handed over."""
    collective_s: Seconds = 1e-5
    """Seconds a collective within a machine takes at the least."""
    between_collective_s: Seconds = 3e-5
    """Seconds a collective across machines takes at the least."""
    call_s: Seconds = 0.0
    """Seconds to call a stage on several devices and to have its replies, beside what it computes."""
    step_s: Seconds = 0.0
    """Seconds of a step that belong to no stage."""
    step_row_s: Seconds = 0.0
    """Such seconds for each row of a step: what is recorded of it."""
    refit: Rate = 0.0
    """Bytes a second at which whole tensors go to generation in place; 0: what is missing is gathered."""
    refit_apart: Rate = 0.0
    """Bytes a second at which they go to a sampler apart; 0: as fast as the links are."""


@dataclass(frozen=True, kw_only=True)
class EngineFactors:
    """What a stack does that no number of a device says."""

    zero1: bool = False
    """Whether the optimiser's state is cut over the devices with other rows, weights and gradients whole."""
    offloads: bool = False
    """Whether a model that is not computing keeps its state on the host, unless a sampler is apart."""
    interrupts: bool = True
    """Whether new weights interrupt rows of a sampler apart, which go on; else replicas end theirs first."""
    drains: bool = False
    """Where they do not: whether they wait until all replicas have ended their rows."""
    holds_prompts: bool = False
    """Whether a prompt counts as in flight until its longest answer has ended."""
    cache: Share = 1.0
    """The share of a device's memory that weights and cache of generation may fill, beside training."""
    cache_apart: Share = 1.0
    """The same of a sampler apart."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How far off predictions were on steps that nothing was fitted on."""

    median: float
    """Of the absolute errors, as shares of what was measured."""
    worst: float
    """The largest of them."""
    low: float
    """Measured over predicted: nine in ten steps had more."""
    high: float
    """Nine in ten steps had less."""


_OVERHEADS = {"step_s", "step_row_s"}
OWN_STACK = "rillflow"
"""The factor set of Rillflow's own runs."""
UNFITTED = "default"
"""The factor set of a cluster's file that names none."""
_FLEETS = quantities.checked(
    lambda tables: tables if isinstance(tables, list) and tables else None,
    "a cluster is one or more [[fleet]] tables",
    '[[fleet]], device = "H100", devices = 8, per_machine = 8',
)
_FLEET = {
    "name": TEXT,
    **dict.fromkeys(("devices", "machines", "per_machine"), quantities.whole(1)),
    **dict.fromkeys(("between", "between_machine"), quantities.RATE),
    "price": quantities.PRICE,
}


def _dtypes(data: object, where: str) -> dict[str, float]:
    return values(data, dict.fromkeys(("float8", "bfloat16", "float32"), quantities.FLOPS), where)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator, or the share of a processor that one rank has."""

    name: str
    """What it is called, such as ``H100``."""
    memory_bytes: Annotated[float, quantities.MEMORY, "memory"]
    """Its memory."""
    flops: Annotated[Mapping[str, float], _dtypes]
    """Dense FLOP/s by dtype: ``bfloat16``, ``float32``."""
    memory_bandwidth: Rate
    """Bytes a second of its memory."""
    inside_bandwidth: Annotated[float, quantities.RATE, "inside"]
    """Bytes a second one way between it and the others of its machine."""
    host_bandwidth: Annotated[float, quantities.RATE, "host"]
    """Bytes a second to the host's memory."""
    source: str = ""
    """Where these numbers are from."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines of one kind."""

    name: str
    """What the cluster's file calls them."""
    device: Device
    """What every one of their devices is."""
    devices: int
    """Devices in all machines."""
    per_machine: int
    """Devices of one machine."""
    between_bandwidth: float
    """Bytes a second one way from one device to another machine."""
    price_per_hour: float = 0.0
    """What one device costs an hour; 0 where nobody says."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many devices a pool may have: a divisor of a machine, or whole machines."""
        small = [size for size in range(1, self.per_machine) if self.per_machine % size == 0]
        whole = range(self.per_machine, self.devices + 1, self.per_machine)
        return tuple(size for size in (*small, *whole) if size <= self.devices)

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return max(1, self.devices // self.per_machine)

    def machines_needed(self, sizes: Sequence[int]) -> int:
        """Machines that hold pools of these sizes side by side, parts of a machine laid largest first.

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
    """What it is called."""
    fleets: tuple[Fleet, ...]
    """Its machines by kind; a pool lies in one of them."""
    factors: Factors
    """The share of the devices' numbers that models reach."""
    engine: EngineFactors = field(default_factory=EngineFactors)
    """What the stack on it does."""
    calibrated: str = ""
    """What the factors were fitted to; empty where the file does not say."""
    stack: str = ""
    """The shipped factor set that these are; empty where the file changes them, or names none."""
    accuracy: Accuracy | None = None
    """How far off such factors were on steps left out of their fit; none where nobody measured it."""

    @property
    def title(self) -> str:
        """Its name, and the system that the factors are of, where that is another one."""
        return self.name if self.stack in ("", OWN_STACK) else f"{self.name}, as {self.stack} would run it"

    @property
    def devices(self) -> int:
        """Of all fleets."""
        return sum(fleet.devices for fleet in self.fleets)

    def fleet(self, name: str) -> Fleet:
        """The fleet of a name."""
        return next(fleet for fleet in self.fleets if fleet.name == name)


def shipped_devices() -> dict[str, Device]:
    """The devices that come with the package, by name."""
    return _devices(_shipped("devices"), "devices.toml")


def shipped_stacks() -> dict[str, Hardware]:
    """The factor sets that come with the package, by the name that ``like`` has: clusters of no machines."""
    return {
        name: Hardware(
            name=name,
            fleets=(),
            factors=read(Factors, data.get("factors", {}), name),
            engine=read(EngineFactors, data.get("engine", {}), name),
            calibrated=data["fitted"],
            accuracy=Accuracy(**data["accuracy"]) if "accuracy" in data else None,
        )
        for name, data in _shipped("stacks").items()
    }


def read_hardware(data: Mapping[str, Any], name: str) -> Hardware:
    """A cluster from the content of its TOML file.

    ``[[fleet]]`` tables with ``device``, ``devices`` or ``machines``, ``per_machine``, ``between`` (one
    device's share of the network) or ``between_machine`` (a machine's), ``price``; ``[device.NAME]`` tables
    for devices that are not shipped; ``[factors]`` for the shares of them that models reach, and
    ``calibrated``, a text that says what these were fitted to.

    Raises:
        PlanError: unknown names, missing or contradictory numbers, numbers without a unit, absurd ones.
    """
    stacks = shipped_stacks()
    readers = {"like": quantities.one_of(stacks), "fleet": _FLEETS} | dict.fromkeys(
        ("name", "calibrated"), TEXT
    )
    readers |= dict.fromkeys(("device", "engine", "factors"), quantities.TABLE)
    said = values({"fleet": [], "like": UNFITTED, **data}, readers, name)
    stack, factors, engine = stacks[said["like"]], said.get("factors", {}), said.get("engine", {})
    changed = bool(engine) or bool(set(factors) - _OVERHEADS)
    devices = shipped_devices() | _devices(said.get("device", {}), f"{name}, device")
    listed = enumerate(said["fleet"], 1)
    fleets = tuple(_fleet(one, devices, f"{name}, fleet {place}") for place, one in listed)
    labels = [fleet.name for fleet in fleets]
    doubled = next((label for label in labels if labels.count(label) > 1), None)
    if doubled is not None:
        raise PlanError(f"{name} has two fleets called {doubled!r}", fix="give each fleet a name of its own")
    return Hardware(
        name=said.get("name", name),
        fleets=fleets,
        factors=read(Factors, factors, f"{name}, factors", stack.factors),
        engine=read(EngineFactors, engine, f"{name}, engine", stack.engine),
        calibrated=said.get("calibrated", "" if changed else stack.calibrated),
        stack="" if changed or said["like"] == UNFITTED else said["like"],
        accuracy=None if changed else stack.accuracy,
    )


def _shipped(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text("utf-8"))


def _devices(data: Mapping[str, Any], where: str) -> dict[str, Device]:
    devices: dict[str, Device] = named(Device, data, where)
    for name, device in devices.items():
        _require_slower(device.inside_bandwidth, device.memory_bandwidth, f"{where}.{name}, inside")
    return devices


def _fleet(data: Mapping[str, Any], devices: Mapping[str, Device], where: str) -> Fleet:
    told = f"known are {', '.join(devices)}, and what a table [device.NAME] describes"
    readers = {
        "device": quantities.checked(lambda label: devices.get(str(label)), told, known=devices),
        **_FLEET,
    }
    said = values(data, readers, where, needed={"device"})
    device: Device = said["device"]
    count, per_machine = _counted(said, where)
    links = {"between", "between_machine"} & set(said)
    if len(links) == 2 or (count > per_machine and not links):
        raise PlanError(
            f"{where} has {count // per_machine} machines, and {' and '.join(sorted(links)) or 'no link'}",
            why="one number says how they are linked: of a device, or of a machine, whose devices share it",
            fix='between = "50 GB/s" of one device, or between_machine = "400 GB/s" of one machine',
        )
    alone = said.get("between", device.inside_bandwidth)
    between = said["between_machine"] / per_machine if "between_machine" in said else alone
    _require_slower(between, device.memory_bandwidth, f"{where}, the link between machines")
    return Fleet(
        name=said.get("name", device.name.lower()),
        device=device,
        devices=count,
        per_machine=per_machine,
        between_bandwidth=between,
        price_per_hour=said.get("price", 0.0),
    )


def _counted(said: Mapping[str, int], where: str) -> tuple[int, int]:
    """Devices of a fleet, and of each of its machines; of three numbers that say it one may be missing."""
    machines, per_machine = said.get("machines"), said.get("per_machine")
    count = said.get("devices", (machines or 0) * (per_machine or 0))
    each = per_machine or count // (machines or 1)
    if not each or count % each or machines not in (None, count // each):
        told = f"{count} devices" + (f", {machines} machines" if machines else "") + f", {each} a machine"
        raise PlanError(
            f"{where} has {told}",
            why="machines are alike, and have all devices between them",
            fix="devices = 16, per_machine = 8; or two fleets",
        )
    return count, each


def _require_slower(link: float, memory: float, where: str) -> None:
    if link > memory:
        raise PlanError(
            f"{where} is {link / 1e9:g} GB/s",
            why=f"a device's memory moves {memory / 1e9:g} GB/s, where what a link brings is written",
            fix="check the number and its unit",
        )
