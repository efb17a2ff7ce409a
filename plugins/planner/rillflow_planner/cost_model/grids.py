"""Grids: numbers that follow from one grid or from an array of grids, and the options of a unit.

Option: a grid with the cost of a unit on it; the search chooses among options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rillflow.placement.grid import Grid, Numbers


def copies_of(grid: Grid) -> Numbers:
    """Return the number of devices that compute gradients of the same parameters: dp x cp."""
    return grid.dp * grid.cp


def dense_cuts(grid: Grid) -> Numbers:
    """Return the number of shards of the parameters outside experts."""
    return grid.pp * grid.tp * np.where(grid.is_sharded, copies_of(grid), 1.0)


def expert_ways(grid: Grid) -> Numbers:
    """Return how many devices of a stage have different slices of the experts: ep, or tp without ep."""
    return np.where(np.greater(grid.ep, 1), grid.ep, grid.tp)


def expert_cuts(grid: Grid) -> Numbers:
    """Return the number of shards of the experts' parameters."""
    return grid.pp * np.where(grid.is_sharded, copies_of(grid) * grid.tp, expert_ways(grid))


def dp_stride(grid: Grid) -> Numbers:
    """Return the distance between ranks that differ only in dp.

    For mixtures of experts, pp is the outermost axis.
    """
    return np.where(np.greater(grid.ep, 1), grid.tp, grid.tp * grid.pp)


def grids_of(*grids: Grid) -> Grid:
    """Combine several grids into one grid of arrays."""
    return Grid(**{axis: np.array([vars(one)[axis] for one in grids]) for axis in vars(Grid())})


@dataclass(frozen=True, kw_only=True)
class Option:
    """A grid for one unit with its cost, in bytes of the fullest device; arrays for several grids at once."""

    grid: Grid
    """Grid of the devices that share the model in training and scoring."""
    generate_tp: int
    """Devices that share one copy during generation; 0 for a unit that does not generate."""
    seconds: Mapping[int, float]
    """Seconds by stage, except for stages that generate."""
    resident_bytes: float
    """Bytes of weights, gradients and optimiser state, kept from step to step."""
    working_bytes: float
    """Largest additional bytes of a stage, without the KV cache."""
    sampling_bytes: float
    """Additional bytes of the copy for generation."""

    @property
    def bytes(self) -> float:
        """Sum of all bytes."""
        return self.resident_bytes + self.working_bytes + self.sampling_bytes
