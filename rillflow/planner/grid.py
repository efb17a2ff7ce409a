"""Grid: how the devices of a pool share one model; formulas take one grid or an array of grids at once.

Option: a grid with what a unit costs on it, what the search chooses among.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = Any
"""A number, or one for each of several grids."""


@dataclass(frozen=True, kw_only=True, order=True)
class Grid:
    """Sizes of the axes over which a model is trained or scores; of several grids at once arrays, [grids].

    Example:
        Grid(dp=2, pp=1, tp=4).devices == 8
    """

    dp: Numbers = 1
    """Devices that have other rows."""
    pp: Numbers = 1
    """Devices that have other layers."""
    tp: Numbers = 1
    """Devices that have other parts of every layer."""
    cp: Numbers = 1
    """Devices that have other parts of every row's tokens."""
    ep: Numbers = 1
    """Devices among those of dp x cp x tp that have other experts; 1 of a dense model."""
    is_sharded: Numbers = False
    """Whether parameters, gradients and optimiser are cut over dp too (``fsdp``)."""

    @property
    def devices(self) -> Numbers:
        """How many devices it takes; experts lie on devices that are counted already."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """Its sizes as files have them: ``fsdp`` where parameters are cut; cp and ep above 1."""
        axes = {"fsdp" if self.is_sharded else "dp": self.dp, "pp": self.pp, "tp": self.tp}
        return axes | {axis: size for axis, size in (("cp", self.cp), ("ep", self.ep)) if size > 1}

    @property
    def copies(self) -> Numbers:
        """Devices that compute gradients of the same parameters: other rows, or other parts of them."""
        return self.dp * self.cp

    @property
    def dense_cuts(self) -> Numbers:
        """Parts that parameters outside experts are cut into."""
        return self.pp * self.tp * np.where(self.is_sharded, self.copies, 1.0)

    @property
    def expert_ways(self) -> Numbers:
        """Devices of one pipeline stage that have different parts of the experts: ep, or tp without it."""
        return np.where(np.greater(self.ep, 1), self.ep, self.tp)

    @property
    def expert_cuts(self) -> Numbers:
        """Parts that the experts' parameters are cut into."""
        return self.pp * np.where(self.is_sharded, self.copies * self.tp, self.expert_ways)

    @property
    def dp_stride(self) -> Numbers:
        """Ranks between two that differ in dp alone; pipelines of mixtures are outermost."""
        return np.where(np.greater(self.ep, 1), self.tp, self.tp * self.pp)

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if axis != "ep")
        return axes if self.ep == 1 else f"{axes}, ep {self.ep}"


def grids_of(*grids: Grid) -> Grid:
    """Grids side by side."""
    return Grid(**{axis: np.array([vars(one)[axis] for one in grids]) for axis in vars(Grid())})


@dataclass(frozen=True, kw_only=True)
class Option:
    """A grid for one unit, bytes those of its fullest device; of several at once all numbers are arrays."""

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
