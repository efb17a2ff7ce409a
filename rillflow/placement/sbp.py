"""Placement: the distribution of a value over a mesh: Split, Broadcast or Partial for every axis.

    mesh dp 2, tp 2, ranks 0 1    {"tp": Split(0)}         the upper half on 0 and 2, the lower on 1 and 3
                           2 3    {"dp": Partial()}       the value is rank 0's plus rank 2's

Several axes may split one dim: the first of ``Placement.order`` splits the dim, the next one splits every
piece of it. The default is the order of the mesh, as in DTensor. FSDP2 over tensor parallelism splits
with ``tp`` first, so its ``(_StridedShard(0, split_factor=tp), Shard(0))`` on a mesh (dp, tp) is

    Placement(mesh, {"dp": Split(0), "tp": Split(0)}, order=("tp", "dp"))

Any other ``_StridedShard(dim, split_factor=n)`` is ``Split(dim, runs=n)``: a rank then holds several slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh


@dataclass(frozen=True)
class Split:
    """The axis splits a dim: every coordinate holds its piece.

    Raises:
        PlacementError: the dim, a size or the number of runs is invalid.
    """

    dim: int
    """Index of the dim."""
    _: KW_ONLY
    sizes: tuple[int, ...] | None = None
    """Length of every coordinate's piece; None for the pieces of torch.chunk.

    Those have ceil(length / coordinates) elements, the last ones fewer or none.
    """
    runs: int = 1
    """Number of runs to cut the dim into first; every coordinate gets its piece of each (a fused weight)."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise PlacementError(
                f"the split has dim {self.dim}", why="dims are counted from 0, from the front"
            )
        if self.runs < 1:
            raise PlacementError(f"the split has {self.runs} runs", why="the minimum is 1")
        if self.sizes is not None and min(self.sizes, default=0) < 0:
            raise PlacementError(f"the split has a piece of length {min(self.sizes)}", why="the minimum is 0")
        if self.sizes is not None and self.runs > 1:
            raise PlacementError(
                f"the split has both sizes {self.sizes} and {self.runs} runs",
                why="it is not clear which run the sizes belong to",
                fix="make each run a value of its own",
            )


@dataclass(frozen=True)
class Broadcast:
    """Every coordinate of the axis holds the same value."""


@dataclass(frozen=True)
class Partial:
    """Every coordinate of the axis holds a contribution; the value is their sum."""


Part = Split | Broadcast | Partial


@dataclass(frozen=True)
class Placement:
    """Distribution of a value over a mesh. Axes that are not named are Broadcast.

    Example:
        Placement(Mesh.of(dp=2, tp=4), {"tp": Split(0)})

    Raises:
        PlacementError: the mesh lacks an axis; the number of sizes differs from the coordinates; the order
            names an axis that does not split, or an axis twice.
    """

    mesh: Mesh
    """The mesh of ranks."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Split, Broadcast or Partial by axis; complete and in mesh order after construction."""
    _: KW_ONLY
    order: tuple[str, ...] = ()
    """The splitting axes, the first to cut in front; omitted ones follow in mesh order."""

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            size = self.mesh.axis(name).size
            if isinstance(part, Split) and part.sizes is not None and len(part.sizes) != size:
                raise PlacementError(
                    f"axis {name!r} has {len(part.sizes)} sizes {part.sizes} and {size} coordinates",
                    why="every coordinate holds one piece, so it needs one size",
                )
        parts: dict[str, Part] = {name: Broadcast() for name in self.mesh.names} | dict(self.parts)
        splitting = [name for name, part in parts.items() if isinstance(part, Split)]
        for place, name in enumerate(self.order):
            self.mesh.axis(name)
            if name not in splitting or name in self.order[:place]:
                problem = "twice" if name in splitting else "which does not split a dim"
                raise PlacementError(f"the order has axis {name!r} {problem}", why="an axis splits once")
        rest = [name for name in splitting if name not in self.order]
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "order", (*self.order, *rest))

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(self.parts.items()), self.order))

    @property
    def partial(self) -> tuple[str, ...]:
        """Axes whose coordinates hold contributions, in mesh order, without axes of size 1."""
        parts = self.parts.items()
        return tuple(
            name for name, part in parts if isinstance(part, Partial) and self.mesh.axis(name).size > 1
        )

    def splits(self, dim: int) -> dict[str, Split]:
        """Return the axes that split a dim, in the order of their cuts."""
        cutting = ((name, self.parts[name]) for name in self.order)
        return {name: part for name, part in cutting if isinstance(part, Split) and part.dim == dim}
