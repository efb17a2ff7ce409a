"""Hardware: the devices there are, the links between them, and how well models use both.

devices.toml (shipped) ─┐
cluster.toml ───────────┴─> Hardware: fleets of one device each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rillflow.planner.factors import Factors


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

    def fleet(self, name: str) -> Fleet:
        """The fleet of a name."""
        return next(fleet for fleet in self.fleets if fleet.name == name)
