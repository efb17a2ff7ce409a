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

    def __str__(self) -> str:
        axes = f"{'fsdp' if self.is_sharded else 'dp'} {self.dp} x pp {self.pp} x tp {self.tp}"
        axes += f" x cp {self.cp}" if self.cp > 1 else ""
        return axes if self.ep == 1 else f"{axes}, ep {self.ep}"
