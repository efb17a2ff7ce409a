"""Grid: how the devices of a pool share one model; formulas take one grid or an array of grids at once.

Option: a grid with what a unit costs on it, what the search chooses among.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = "NDArray[Any] | float | int"
"""A number, or one for each of several grids."""


@dataclass(frozen=True, kw_only=True, order=True)
class Grid:
    """Sizes of the axes over which a model is trained or scores.

    Example:
        Grid(dp=2, pp=1, tp=4).devices == 8
    """

    dp: int = 1
    """Devices that have other rows."""
    pp: int = 1
    """Devices that have other layers."""
    tp: int = 1
    """Devices that have other parts of every layer."""
    cp: int = 1
    """Devices that have other parts of every row's tokens."""
    ep: int = 1
    """Devices among those of dp x cp x tp that have other experts; 1 of a dense model."""
    is_sharded: bool = False
    """Whether parameters, gradients and optimiser are cut over dp too (``fsdp``)."""

    @property
    def devices(self) -> int:
        """How many devices it takes; experts lie on devices that are counted already."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """Its sizes as files have them: ``fsdp`` where parameters are cut; cp and ep above 1."""
        axes = {"fsdp" if self.is_sharded else "dp": self.dp, "pp": self.pp, "tp": self.tp}
        return axes | {axis: size for axis, size in (("cp", self.cp), ("ep", self.ep)) if size > 1}

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if axis != "ep")
        return axes if self.ep == 1 else f"{axes}, ep {self.ep}"


@dataclass(frozen=True, kw_only=True)
class Grids:
    """Grids side by side: arrays of the same length, [grids]."""

    dp: NDArray[np.float64]
    """Devices that have other rows."""
    pp: NDArray[np.float64]
    """Devices that have other layers."""
    tp: NDArray[np.float64]
    """Devices that have other parts of every layer."""
    ep: NDArray[np.float64]
    """Devices that have other experts."""
    cp: NDArray[np.float64]
    """Devices that have other parts of every row."""
    sharded: NDArray[np.bool_]
    """Whether parameters are cut over dp too."""

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def devices(self) -> NDArray[np.float64]:
        """Devices of each grid."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def copies(self) -> NDArray[np.float64]:
        """Devices that compute gradients of the same parameters: other rows, or other parts of them."""
        return self.dp * self.cp

    @property
    def dense_cuts(self) -> NDArray[np.float64]:
        """Parts that parameters outside experts are cut into."""
        return self.pp * self.tp * np.where(self.sharded, self.copies, 1.0)

    @property
    def expert_ways(self) -> NDArray[np.float64]:
        """Devices of one pipeline stage that have different parts of the experts: ep, or tp without it."""
        return np.where(self.ep > 1, self.ep, self.tp)

    @property
    def expert_cuts(self) -> NDArray[np.float64]:
        """Parts that the experts' parameters are cut into."""
        return self.pp * np.where(self.sharded, self.copies * self.tp, self.expert_ways)

    @property
    def dp_stride(self) -> NDArray[np.float64]:
        """Ranks between two that differ in dp alone; pipelines of mixtures are outermost."""
        return np.where(self.ep > 1, self.tp, self.tp * self.pp)


def grids_of(*grids: Grid) -> Grids:
    """Grids as arrays."""
    axes = np.array([(one.dp, one.pp, one.tp, one.ep, one.cp) for one in grids], dtype=np.float64)
    dp, pp, tp, ep, cp = axes.reshape(-1, 5).T
    sharded = np.array([grid.is_sharded for grid in grids], dtype=np.bool_)
    return Grids(dp=dp, pp=pp, tp=tp, ep=ep, cp=cp, sharded=sharded)


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
