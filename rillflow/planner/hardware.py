"""Hardware: the devices there are, the links between them, and how well models use both.

devices.toml (shipped) ─┐
cluster.toml ───────────┴─> Hardware: fleets of one device each
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rillflow.errors import PlanError, nearest
from rillflow.planner.factors import Accuracy, Engine, Factors, Stack
from rillflow.planner.quantities import DURATION, FLOPS, MEMORY, PRICE, RATE

_OVERHEADS = {"step_s", "step_row_s"}
_COUNTS = ("devices", "machines", "per_machine")
_MOST_TOUCHES = 1000.0
_MOST_DEVICES = 1_000_000
NO_ENGINE = Engine()
UNFITTED = "default"
"""The factor set of a cluster's file that names none."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator, or the share of a processor that one rank has."""

    name: str
    """What it is called, such as ``H100``."""
    memory_bytes: float
    """Its memory."""
    flops: Mapping[str, float]
    """Dense FLOP/s by dtype: ``bfloat16``, ``float32``."""
    memory_bandwidth: float
    """Bytes a second of its memory."""
    inside_bandwidth: float
    """Bytes a second one way between it and the others of its machine."""
    host_bandwidth: float
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


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster."""

    name: str
    """What it is called."""
    fleets: tuple[Fleet, ...]
    """Its machines by kind; a pool lies in one of them."""
    factors: Factors
    """The share of the devices' numbers that models reach."""
    engine: Engine = NO_ENGINE
    """What the stack on it does."""
    calibrated: str = ""
    """What the factors were fitted to; empty where the file does not say."""
    accuracy: Accuracy | None = None
    """How far off such factors were on steps left out of their fit; none where nobody measured it."""

    @property
    def devices(self) -> int:
        """Of all fleets."""
        return sum(fleet.devices for fleet in self.fleets)

    def fleet(self, name: str) -> Fleet:
        """The fleet of a name."""
        return next(fleet for fleet in self.fleets if fleet.name == name)


def shipped_devices() -> dict[str, Device]:
    """The devices that come with the package, by name."""
    data = tomllib.loads((Path(__file__).parent / "devices.toml").read_text("utf-8"))
    return {name: _device(name, one, f"devices.toml, {name}") for name, one in data.items()}


def shipped_stacks() -> dict[str, Stack]:
    """The factor sets that come with the package, by the name that ``like`` has."""
    data = tomllib.loads((Path(__file__).parent / "stacks.toml").read_text("utf-8"))
    return {name: _stack(name, one) for name, one in data.items()}


def read_hardware(data: Mapping[str, Any], name: str) -> Hardware:
    """A cluster from the content of its TOML file.

    ``[[fleet]]`` tables with ``device``, ``devices`` or ``machines``, ``per_machine``, ``between`` (one
    device's share of the network) or ``between_machine`` (a machine's), ``price``; ``[device.NAME]`` tables
    for devices that are not shipped; ``[factors]`` for the shares of them that models reach, and
    ``calibrated``, a text that says what these were fitted to.

    Raises:
        PlanError: unknown names, missing or contradictory numbers, numbers without a unit, absurd ones.
    """
    _known(data, {"name", "fleet", "device", "like", "engine", "factors", "calibrated"}, name)
    stacks, like = shipped_stacks(), data.get("like", UNFITTED)
    if like not in stacks:
        raise PlanError(
            f"{name} is like {like!r}, which is no factor set",
            why=f"shipped are {', '.join(stacks)}",
            fix=nearest(str(like), stacks),
        )
    stack = stacks[like]
    changed = bool(data.get("engine")) or bool(set(data.get("factors", {})) - _OVERHEADS)
    own = _table(data, "device", name)
    devices = shipped_devices() | {
        label: _device(label, _table(own, label, f"{name}, device"), f"{name}, device.{label}")
        for label in own
    }
    listed = data.get("fleet", [])
    if not isinstance(listed, list) or not listed:
        raise PlanError(
            f"{name} has no machines",
            why="a cluster is one or more [[fleet]] tables",
            fix='[[fleet]], device = "H100", devices = 8, per_machine = 8',
        )
    fleets = tuple(_fleet(one, devices, f"{name}, fleet {place}") for place, one in enumerate(listed, 1))
    labels = [fleet.name for fleet in fleets]
    doubled = next((label for label in labels if labels.count(label) > 1), None)
    if doubled is not None:
        raise PlanError(f"{name} has two fleets called {doubled!r}", fix="give each fleet a name of its own")
    return Hardware(
        name=str(data.get("name", name)),
        fleets=fleets,
        factors=replace(stack.factors, **_factors(_table(data, "factors", name), name)),
        engine=replace(stack.engine, **_engine(_table(data, "engine", name), name)),
        calibrated=str(data.get("calibrated", "" if changed else stack.fitted)),
        accuracy=None if changed else stack.accuracy,
    )


def _stack(name: str, data: Mapping[str, Any]) -> Stack:
    accuracy = data.get("accuracy")
    return Stack(
        name=name,
        fitted=str(data["fitted"]),
        factors=Factors(**_factors(data.get("factors", {}), name)),
        engine=Engine(**_engine(data.get("engine", {}), name)),
        accuracy=None if accuracy is None else Accuracy(**accuracy),
    )


def _engine(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Settings of an engine: yes or no, and shares of the memory."""
    known = {field.name: field.default for field in fields(Engine)}
    _known(data, set(known), f"{name}, engine")
    for key, value in data.items():
        if isinstance(known[key], bool) and not isinstance(value, bool):
            raise PlanError(f"{name}, engine.{key} is {value!r}", why="it is true or false")
        if not isinstance(known[key], bool):
            _share(value, f"{name}, engine.{key}")
    return dict(data)


def _device(name: str, data: Mapping[str, Any], where: str) -> Device:
    keys = {"memory", "memory_bandwidth", "inside", "host", "flops", "source"}
    _known(data, keys, where)
    _required(data, keys - {"source"}, where)
    flops = _table(data, "flops", where)
    if not flops:
        raise PlanError(f"{where} has no flops", fix='flops = { bfloat16 = "312 TFLOP/s", float32 = ... }')
    _known(flops, {"float8", "bfloat16", "float32"}, f"{where}, flops")
    bandwidth, inside = (RATE.read(data[key], f"{where}, {key}") for key in ("memory_bandwidth", "inside"))
    _slower(inside, bandwidth, f"{where}, inside")
    speeds = {dtype: FLOPS.read(value, f"{where}, flops.{dtype}") for dtype, value in flops.items()}
    return Device(
        name=name,
        memory_bytes=MEMORY.read(data["memory"], f"{where}, memory"),
        flops=speeds,
        memory_bandwidth=bandwidth,
        inside_bandwidth=inside,
        host_bandwidth=RATE.read(data["host"], f"{where}, host"),
        source=str(data["source"]) if "source" in data else "",
    )


def _fleet(data: Mapping[str, Any], devices: Mapping[str, Device], where: str) -> Fleet:
    keys = {"name", "device", "devices", "machines", "per_machine", "between", "between_machine", "price"}
    wrong = next((key for key in data if "price" in key and key != "price"), None)
    if wrong is not None:
        raise PlanError(f"{where} has {wrong}", why="the key is price, of a device", fix='price = "2.5 $/h"')
    _known(data, keys, where)
    _required(data, {"device"}, where)
    label = data["device"]
    if label not in devices:
        raise PlanError(
            f"{where} is made of {label!r}, which is not known",
            fix=f"{nearest(str(label), devices)} or describe it in a table [device.{label}]",
        )
    per_machine, count = _counts(data, where)
    between = devices[label].inside_bandwidth
    if "between" in data and "between_machine" in data:
        raise PlanError(
            f"{where} has both between and between_machine",
            why="one is a device's share of the other",
            fix="keep the one that was measured",
        )
    if "between" in data:
        between = RATE.read(data["between"], f"{where}, between")
    elif "between_machine" in data:
        between = RATE.read(data["between_machine"], f"{where}, between_machine") / per_machine
    elif count > per_machine:
        raise PlanError(
            f"{where} has {count // per_machine} machines and no link between them",
            fix='between = "50 GB/s" of one device, or between_machine = "400 GB/s" of one machine',
        )
    _slower(between, devices[label].memory_bandwidth, f"{where}, the link between machines")
    return Fleet(
        name=str(data["name"]) if "name" in data else str(label).lower(),
        device=devices[label],
        devices=count,
        per_machine=per_machine,
        between_bandwidth=between,
        price_per_hour=PRICE.read(data["price"], f"{where}, price") if "price" in data else 0.0,
    )


def _slower(link: float, memory: float, where: str) -> None:
    if link > memory:
        raise PlanError(
            f"{where} is {link / 1e9:g} GB/s",
            why=f"a device's memory moves {memory / 1e9:g} GB/s, where what a link brings is written",
            fix="check the number and its unit",
        )


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Devices of a machine, and of all of them."""

    per_machine: int
    devices: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.per_machine, self.devices))


def _counts(data: Mapping[str, Any], where: str) -> _Counts:
    numbers = {key: _count(data[key], f"{where}, {key}") for key in _COUNTS if key in data}
    if "devices" not in numbers and not {"machines", "per_machine"} <= set(numbers):
        raise PlanError(f"{where} does not say how many devices it has", fix="devices = 8, per_machine = 8")
    machines = numbers.get("machines", 0)
    devices = numbers["devices"] if "devices" in numbers else machines * numbers["per_machine"]
    per_machine = numbers["per_machine"] if "per_machine" in numbers else devices // max(machines, 1)
    if per_machine == 0 or devices % per_machine:
        raise PlanError(
            f"{where} has {devices} devices, {per_machine or machines} a machine",
            why=f"machines are alike: {devices} / {per_machine or machines} leaves "
            f"{devices % (per_machine or machines)}",
            fix="make devices a multiple, or split them into two fleets",
        )
    if machines and machines * per_machine != devices:
        raise PlanError(
            f"{where} has {machines} machines of {per_machine} devices, and {devices} devices",
            why=f"{machines} x {per_machine} is {machines * per_machine}",
            fix="leave one of the three out",
        )
    return _Counts(per_machine=per_machine, devices=devices)


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_DEVICES:
        raise PlanError(f"{where} is {value!r}", why=f"it is a whole number from 1 to {_MOST_DEVICES:,}")
    return value


def _factors(data: Mapping[str, Any], name: str) -> dict[str, float]:
    known = {field.name: field.default for field in fields(Factors)}
    _known(data, set(known), f"{name}, factors")
    found: dict[str, float] = {}
    for key, value in data.items():
        where = f"{name}, factors.{key}"
        if key.endswith("_s"):
            found[key] = DURATION.read(value, where)
            continue
        match key:
            case "refit" | "refit_apart":
                found[key] = RATE.read(value, where)
            case "touches":
                found[key] = _touches(value, where)
            case "hidden_gathers" | "hidden_reads":
                found[key] = 0.0 if value == 0 and not isinstance(value, bool) else _share(value, where)
            case _:
                found[key] = _share(value, where)
    return found


def _share(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise PlanError(f"{where} is {value!r}", why="it is a share of the device's number, above 0 up to 1")
    return float(value)


def _touches(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= _MOST_TOUCHES:
        raise PlanError(f"{where} is {value!r}", why=f"it counts passes over memory: 0 to {_MOST_TOUCHES:g}")
    return float(value)


def _known(data: Mapping[str, Any], keys: set[str], where: str) -> None:
    odd = next((key for key in data if key not in keys), None)
    if odd is not None:
        raise PlanError(f"{where} has the key {odd!r}, which means nothing here", fix=nearest(odd, keys))


def _required(data: Mapping[str, Any], keys: set[str], where: str) -> None:
    missing = sorted(keys - set(data))
    if missing:
        raise PlanError(f"{where} has no {missing[0]}", fix=f"needed: {', '.join(sorted(keys))}")


def _table(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise PlanError(f"{where}: {key} is {found!r}", why="it is a table")
    return found
