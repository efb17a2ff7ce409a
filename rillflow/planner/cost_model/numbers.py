"""Numbers: the formulas take one grid or an array of grids at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rillflow.planner.grid import Grid

Numbers: TypeAlias = "NDArray[Any] | float | int"
"""A number, or one for each of several grids."""


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

    def __getitem__(self, place: int) -> Grid:
        return Grid(
            dp=int(self.dp[place]),
            pp=int(self.pp[place]),
            tp=int(self.tp[place]),
            cp=int(self.cp[place]),
            ep=int(self.ep[place]),
            is_sharded=bool(self.sharded[place]),
        )

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
    return Grids(
        dp=np.array([grid.dp for grid in grids], dtype=np.float64),
        pp=np.array([grid.pp for grid in grids], dtype=np.float64),
        tp=np.array([grid.tp for grid in grids], dtype=np.float64),
        cp=np.array([grid.cp for grid in grids], dtype=np.float64),
        ep=np.array([grid.ep for grid in grids], dtype=np.float64),
        sharded=np.array([grid.is_sharded for grid in grids], dtype=np.bool_),
    )
