"""Grid: how the devices of a pool share one model; the planner's formulas accept an array of grids too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

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

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if axis != "ep")
        return axes if self.ep == 1 else f"{axes}, ep {self.ep}"
