"""Grid: how the devices of a pool share one model. Formulas accept one grid or an array of grids.

Option: a grid with the cost of a unit on it; the search chooses among options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = Any
"""One number, or one number per grid."""


@dataclass(frozen=True, kw_only=True, order=True)
class Grid:
    """Sizes of the parallelism axes for training and scoring; arrays [grids] for several grids at once.

    Example:
        Grid(dp=2, pp=1, tp=4).devices == 8
    """

    dp: Numbers = 1
    """Data parallelism: devices with different rows."""
    pp: Numbers = 1
    """Pipeline parallelism: devices with different layers."""
    tp: Numbers = 1
    """Tensor parallelism: devices with different slices of every layer."""
    cp: Numbers = 1
    """Context parallelism: devices with different slices of every row's tokens."""
    ep: Numbers = 1
    """Expert parallelism: devices of dp x cp x tp with different experts; 1 for a dense model."""
    is_sharded: Numbers = False
    """Whether parameters, gradients and optimiser state are also sharded over dp (``fsdp``)."""

    @property
    def devices(self) -> Numbers:
        """Number of devices; ep adds none, because experts lie on the other axes' devices."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """Sizes as in files: ``fsdp`` instead of dp for sharded parameters; cp and ep only above 1."""
        axes = {"fsdp" if self.is_sharded else "dp": self.dp, "pp": self.pp, "tp": self.tp}
        return axes | {axis: size for axis, size in (("cp", self.cp), ("ep", self.ep)) if size > 1}

    @property
    def copies(self) -> Numbers:
        """Number of devices that compute gradients of the same parameters: dp x cp."""
        return self.dp * self.cp

    @property
    def dense_cuts(self) -> Numbers:
        """Number of shards of the parameters outside experts."""
        return self.pp * self.tp * np.where(self.is_sharded, self.copies, 1.0)

    @property
    def expert_ways(self) -> Numbers:
        """Number of devices of one pipeline stage with different slices of the experts: ep, or tp without
        ep.
        """
        return np.where(np.greater(self.ep, 1), self.ep, self.tp)

    @property
    def expert_cuts(self) -> Numbers:
        """Number of shards of the experts' parameters."""
        return self.pp * np.where(self.is_sharded, self.copies * self.tp, self.expert_ways)

    @property
    def dp_stride(self) -> Numbers:
        """Distance between ranks that differ only in dp.

        For mixtures of experts, pp is the outermost axis.
        """
        return np.where(np.greater(self.ep, 1), self.tp, self.tp * self.pp)

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if axis != "ep")
        return axes if self.ep == 1 else f"{axes}, ep {self.ep}"


def grids_of(*grids: Grid) -> Grid:
    """Combine several grids into one grid of arrays."""
    return Grid(**{axis: np.array([vars(one)[axis] for one in grids]) for axis in vars(Grid())})


@dataclass(frozen=True, kw_only=True)
class Option:
    """A grid for one unit with its cost, in bytes of the fullest device; arrays for several grids at once."""

    grid: Grid
    """How the devices share the model in training and scoring."""
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
