"""Hardware: the devices there are, the links between them, and how well models use both.

devices.toml (shipped) ─┐
cluster.toml ───────────┴─> Hardware: fleets of one device each
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rillflow.errors import PlanError, nearest
from rillflow.planner.factors import Accuracy, EngineFactors, Factors, Stack
from rillflow.planner.quantities import (
    DURATION,
    FLOPS,
    MEMORY,
    PRICE,
    RATE,
    TABLE,
    TEXT,
    YES,
    Reader,
    kind,
    number,
    values,
    whole,
)

_OVERHEADS = {"step_s", "step_row_s"}
NO_ENGINE = EngineFactors()
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

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return max(1, self.devices // self.per_machine)

    def machines_needed(self, sizes: Sequence[int]) -> int:
        """The least machines that hold pools of these sizes side by side, what is no whole machine on one.

        Example:
            fleet_of_8.machines_needed((4, 2, 16)) == 3
        """
        room = min(self.per_machine, self.devices)
        parts = tuple(sorted((size % room for size in sizes if size % room), reverse=True))
        return sum(size // room for size in sizes) + _machines_of_parts(room, parts)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster."""

    name: str
    """What it is called."""
    fleets: tuple[Fleet, ...]
    """Its machines by kind; a pool lies in one of them."""
    factors: Factors
    """The share of the devices' numbers that models reach."""
    engine: EngineFactors = NO_ENGINE
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
    return {name: _device(name, one, f"devices.toml, {name}") for name, one in _shipped("devices").items()}


def shipped_stacks() -> dict[str, Stack]:
    """The factor sets that come with the package, by the name that ``like`` has."""
    return {
        name: Stack(
            name=name,
            fitted=str(data["fitted"]),
            factors=Factors(**values(data.get("factors", {}), _FACTORS, name)),
            engine=EngineFactors(**values(data.get("engine", {}), _ENGINE, name)),
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
    said = values(data, _CLUSTER, name)
    stacks, like = shipped_stacks(), said.get("like", UNFITTED)
    if like not in stacks:
        raise PlanError(
            f"{name} is like {like!r}, which is no factor set",
            why=f"shipped are {', '.join(stacks)}",
            fix=nearest(like, stacks),
        )
    stack, factors = stacks[like], values(said.get("factors", {}), _FACTORS, f"{name}, factors")
    engine = values(said.get("engine", {}), _ENGINE, f"{name}, engine")
    changed = bool(engine) or bool(set(factors) - _OVERHEADS)
    devices = shipped_devices() | {
        label: _device(label, one, f"{name}, device.{label}") for label, one in said.get("device", {}).items()
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
        name=said.get("name", name),
        fleets=fleets,
        factors=replace(stack.factors, **factors),
        engine=replace(stack.engine, **engine),
        calibrated=said.get("calibrated", "" if changed else stack.fitted),
        accuracy=None if changed else stack.accuracy,
    )


def _shipped(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text("utf-8"))


def _device(name: str, data: Mapping[str, Any], where: str) -> Device:
    said = values(data, _DEVICE, where, needed=set(_DEVICE) - {"source"})
    flops = values(said["flops"], dict.fromkeys(("float8", "bfloat16", "float32"), FLOPS.read), where)
    if not flops:
        raise PlanError(f"{where} has no flops", fix='flops = { bfloat16 = "312 TFLOP/s", float32 = ... }')
    _slower(said["inside"], said["memory_bandwidth"], f"{where}, inside")
    return Device(
        name=name,
        memory_bytes=said["memory"],
        flops=flops,
        memory_bandwidth=said["memory_bandwidth"],
        inside_bandwidth=said["inside"],
        host_bandwidth=said["host"],
        source=said.get("source", ""),
    )


def _fleet(data: Mapping[str, Any], devices: Mapping[str, Device], where: str) -> Fleet:
    wrong = next((key for key in data if "price" in key and key != "price"), None)
    if wrong is not None:
        raise PlanError(f"{where} has {wrong}", why="the key is price, of a device", fix='price = "2.5 $/h"')
    said = values(data, _FLEET, where, needed={"device"})
    label = said["device"]
    if label not in devices:
        raise PlanError(
            f"{where} is made of {label!r}, which is not known",
            fix=f"{nearest(label, devices)} or describe it in a table [device.{label}]",
        )
    count, per_machine = _devices(said, where), said["per_machine"]
    if "between" in said and "between_machine" in said:
        raise PlanError(
            f"{where} has both between and between_machine",
            why="one is a device's share of the other",
            fix="keep the one that was measured",
        )
    if count > per_machine and not {"between", "between_machine"} & set(said):
        raise PlanError(
            f"{where} has {count // per_machine} machines and no link between them",
            fix='between = "50 GB/s" of one device, or between_machine = "400 GB/s" of one machine',
        )
    share = said["between_machine"] / per_machine if "between_machine" in said else None
    between = said.get("between", devices[label].inside_bandwidth) if share is None else share
    _slower(between, devices[label].memory_bandwidth, f"{where}, the link between machines")
    return Fleet(
        name=said.get("name", label.lower()),
        device=devices[label],
        devices=count,
        per_machine=per_machine,
        between_bandwidth=between,
        price_per_hour=said.get("price", 0.0),
    )


def _devices(said: dict[str, Any], where: str) -> int:
    """Devices of a fleet, of whose numbers one of three may be missing: ``per_machine`` is filled in."""
    machines = said.get("machines")
    if "devices" not in said and (machines is None or "per_machine" not in said):
        raise PlanError(f"{where} does not say how many devices it has", fix="devices = 8, per_machine = 8")
    count: int = said["devices"] if "devices" in said else machines * said["per_machine"]
    parts: int = said.get("per_machine", machines or count)
    if count % parts:
        raise PlanError(
            f"{where} has {count} devices, {parts} a machine",
            why=f"machines are alike: {count} / {parts} leaves {count % parts}",
            fix="make devices a multiple, or split them into two fleets",
        )
    per_machine: int = said.setdefault("per_machine", count // (machines or 1))
    if machines and machines * per_machine != count:
        raise PlanError(
            f"{where} has {machines} machines of {per_machine} devices, and {count} devices",
            why=f"{machines} x {per_machine} is {machines * per_machine}",
            fix="leave one of the three out",
        )
    return count


def _slower(link: float, memory: float, where: str) -> None:
    if link > memory:
        raise PlanError(
            f"{where} is {link / 1e9:g} GB/s",
            why=f"a device's memory moves {memory / 1e9:g} GB/s, where what a link brings is written",
            fix="check the number and its unit",
        )


def _factor(name: str) -> Reader:
    """The reader of a factor, by its name."""
    if name.endswith("_s"):
        return DURATION.read
    if name.startswith("refit"):
        return RATE.read
    return _TOUCHES if name == "touches" else _NONE_TO_ALL if name.startswith("hidden") else _SHARE


@lru_cache(maxsize=65536)
def _machines_of_parts(room: int, parts: tuple[int, ...]) -> int:
    least = -(-sum(parts) // room)
    while not _fits(parts, (room,) * least):
        least += 1
    return least


def _fits(parts: tuple[int, ...], rooms: tuple[int, ...]) -> bool:
    """Whether parts, largest first, fit into what the machines have left."""
    if not parts:
        return True
    return any(
        _fits(parts[1:], tuple(sorted((*rooms[:place], left - parts[0], *rooms[place + 1 :]))))
        for place, left in enumerate(rooms)
        if left >= parts[0] and left not in rooms[:place]
    )


_SHARE = number(0.0, 1.0, "it is a share of the device's number, above 0 up to 1", is_open=True)
_NONE_TO_ALL = number(0.0, 1.0, "it is a share, from 0 to 1")
_TOUCHES = number(0.0, 1000.0, "it counts passes over memory: 0 to 1000")
_FACTORS = {field.name: _factor(field.name) for field in fields(Factors)}
_ENGINE = {field.name: YES if isinstance(field.default, bool) else _SHARE for field in fields(EngineFactors)}
_RATES = dict.fromkeys(("memory_bandwidth", "inside", "host"), RATE.read)
_DEVICE: Mapping[str, Reader] = {"memory": MEMORY.read, **_RATES, "flops": TABLE, "source": TEXT}
_FLEET: Mapping[str, Reader] = {
    **dict.fromkeys(("name", "device"), TEXT),
    **dict.fromkeys(("devices", "machines", "per_machine"), whole(1)),
    **dict.fromkeys(("between", "between_machine"), RATE.read),
    "price": PRICE.read,
}
_CLUSTER: Mapping[str, Reader] = {
    **dict.fromkeys(("name", "like", "calibrated"), TEXT),
    **dict.fromkeys(("device", "engine", "factors"), TABLE),
    "fleet": kind(object, ""),
}
