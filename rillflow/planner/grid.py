"""Grid: how the devices of a pool share one model."""

from __future__ import annotations

from dataclasses import dataclass


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
