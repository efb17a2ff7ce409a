"""Option: one way for a unit to lie on devices, and what it then costs; what the mapping chooses among."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rillflow.graph.graph import Edge, Stage
from rillflow.planner.grid import Grid
from rillflow.planner.problem import Unit


@dataclass(frozen=True, kw_only=True)
class Option:
    """A grid for one unit on a number of devices; bytes are those of its fullest device."""

    grid: Grid
    """How the devices share the model in training and scoring."""
    generate_tp: int
    """Devices that share one copy while they generate; 0 of a unit that does not."""
    seconds: Mapping[int, float]
    """By stage of the unit, all but those that generate."""
    resident_bytes: float
    """Weights, gradients and optimiser, kept from step to step."""
    working_bytes: float
    """The most a stage needs beside, the cache of generation not counted."""
    sampling_bytes: float
    """What the copy for generation takes beside what is resident."""

    @property
    def bytes(self) -> float:
        """All of them in sum."""
        return self.resident_bytes + self.working_bytes + self.sampling_bytes


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a unit lies: enough to say what a transfer from or to it costs."""

    pool: str
    """The pool's name."""
    fleet: str
    """Its machines."""
    devices: int
    """Its size."""
    grid: Grid
    """The grid on which its rows are read or written."""


class Decoder(Protocol):
    """One replica that generates. Continuous batching: a row that ends makes room for one that waits."""

    @property
    def replicas(self) -> int:
        """Replicas alike on the pool's devices."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens of context that fit into the cache of a replica."""
        ...

    @property
    def most_rows(self) -> int:
        """Rows a replica runs at once at most."""
        ...

    def advance_s(self, rows: int, context_tokens: float, tokens: float) -> float:
        """Seconds in which ``rows`` running rows, ``context_tokens`` in sum, get ``tokens`` more each."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Seconds to read prompts of so many tokens in sum."""
        ...

    def entry_s(self, rows: float) -> float:
        """Seconds of a stage with so many rows on this replica, beside all tokens."""
        ...


class Costs(Protocol):
    """What mapping and simulator ask of a cost model; bytes and seconds are of a problem.

    The search is exact under three laws. ``room_bytes`` reads of the options the sum of resident, the sum of
    sampling and the largest working bytes, and whether one generates; none of them makes room. A decoder
    reads of its option ``generate_tp`` and ``grid.ep`` only, and its seconds never rise with its room.
    ``function_s`` never rises with devices.
    """

    def options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        """Every way the unit may lie on just so many devices that is not worse than another in all respects.

        Empty where none fits, even alone.
        """
        ...

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        """The unit on just this grid, be it better than another or not.

        Raises:
            PlanError: the grid does not cut the model, or not so many devices.
        """
        ...

    def shortfall_bytes(self, unit: Unit, fleet: str, devices: int) -> float:
        """By how much the unit's smallest option is too large for its fullest device; 0 where one fits."""
        ...

    def room_bytes(self, fleet: str, options: Mapping[str, Option]) -> float:
        """What a device has left for a cache with these units on it; negative by what is missing."""
        ...

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> Decoder | None:
        """A replica of the unit with that room for its cache; none where not one row fits."""
        ...

    def generate_s(self, stage: Stage, decoder: Decoder) -> float:
        """Seconds until the last of the stage's rows has ended."""
        ...

    def worked_s(self, stage: Stage, decoder: Decoder) -> float:
        """Seconds in which a replica works on the stage's rows, on average over replicas."""
        ...

    def steady_s(self, stage: Stage, decoder: Decoder) -> float:
        """Seconds of replicas that never run dry for as many rows: streamed generation."""
        ...

    def longest_s(self, stage: Stage, decoder: Decoder) -> NDArray[np.float64]:
        """Seconds until the longest of a step's rows has ended, where rows stream, by equal chances."""
        ...

    def function_s(self, stage: Stage, devices: int) -> float:
        """Seconds of a function or a formula."""
        ...

    def transfer_s(self, edge: Edge, source: Seat, destination: Seat) -> float:
        """Seconds of an edge's fields between pools; 0 within one."""
        ...

    def crossing_s(self, source: Seat, destination: Seat, generate_tp: int) -> float:
        """Seconds of the policy's weights from its training to a sampler apart."""
        ...
