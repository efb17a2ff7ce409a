"""Mesh: a grid of ranks with named axes; the last axis varies fastest.

Mesh.of(dp=2, tp=4)        tp 0  1  2  3
                    dp 0      0  1  2  3     coordinates(6) == {"dp": 1, "tp": 2}
                       1      4  5  6  7     groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from rillflow.errors import PlacementError, nearest


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of a mesh."""

    name: str
    """Name of the axis, such as ``dp``, ``pp`` or ``tp``."""
    size: int
    """Number of its coordinates."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A named grid of ranks.

    Example:
        Mesh.of(dp=2, tp=4, first=8).groups("tp") == ((8, 9, 10, 11), (12, 13, 14, 15))

    Raises:
        PlacementError: an axis has a size below 1 or occurs twice; a rank occurs twice or is negative; the
            ranks do not fill the axes.
    """

    axes: tuple[Axis, ...]
    """The axes, the slowest-varying first; a mesh without axes is one rank."""
    ranks: tuple[int, ...]
    """Global ids of the ranks, row-major."""

    def __post_init__(self) -> None:
        for axis in self.axes:
            if axis.size < 1:
                raise PlacementError(f"axis {axis.name!r} has size {axis.size}", why="the minimum is 1")
        if twice := _twice(self.names):
            raise PlacementError(f"the mesh has axis {twice[0]!r} twice", why="axis names must be unique")
        if twice := _twice(self.ranks):
            raise PlacementError(f"the mesh has rank {twice[0]} twice", why="a rank has one place in a mesh")
        if min(self.ranks, default=0) < 0:
            raise PlacementError(f"the mesh has rank {min(self.ranks)}", why="ranks are counted from 0")
        cells = prod(axis.size for axis in self.axes)
        if len(self.ranks) != cells:
            sizes = " x ".join(f"{axis.name} {axis.size}" for axis in self.axes) or "no axis"
            raise PlacementError(
                f"{len(self.ranks)} ranks do not fill a mesh of {sizes}",
                why=f"it has {cells} places, one for each rank",
            )

    @staticmethod
    def of(*, first: int = 0, ranks: Iterable[int] | None = None, **sizes: int) -> Mesh:
        """Return a mesh with these axes, over ranks from ``first`` on or over ``ranks``, row-major."""
        axes = tuple(Axis(name=name, size=size) for name, size in sizes.items())
        count = prod(max(size, 0) for size in sizes.values())
        return Mesh(axes=axes, ranks=tuple(range(first, first + count) if ranks is None else ranks))

    def turned(self, axis: str) -> Mesh:
        """Return the mesh with one axis counted from the other end.

        Example: ``Mesh.of(dp=2, pp=2).turned("pp").ranks == (1, 0, 3, 2)``
        """
        place = self.names.index(self.axis(axis).name)
        last = self.axis(axis).size - 1
        there = {at: rank for rank, at in self._coordinates.items()}
        ranks = tuple(there[*at[:place], last - at[place], *at[place + 1 :]] for at in there)
        return Mesh(axes=self.axes, ranks=ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, the slowest-varying first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def axis(self, name: str) -> Axis:
        """Return the axis of this name; if there is none, PlacementError suggests the nearest name."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise PlacementError(
            f"the mesh has no axis {name!r}",
            why=f"its axes are {', '.join(self.names) or 'none'}",
            fix=nearest(name, self.names),
        )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by axis.

        Raises:
            PlacementError: the rank is not in the mesh.
        """
        if rank not in self._coordinates:
            raise PlacementError(
                f"rank {rank} is not in the mesh", why=f"its ranks are {_listed(sorted(self.ranks))}"
            )
        return dict(zip(self.names, self._coordinates[rank], strict=True))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return groups of ranks that differ only in this axis; groups and ranks in the order of the mesh."""
        place = self.names.index(self.axis(axis).name)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, at in self._coordinates.items():
            found.setdefault(at[:place] + at[place + 1 :], []).append(rank)
        return tuple(tuple(group) for group in found.values())

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        places = product(*(range(axis.size) for axis in self.axes))
        return dict(zip(self.ranks, places, strict=True))


def divisors(*counts: int) -> list[int]:
    """Return the common divisors of ``counts``: the sizes of an axis that can split all of them evenly."""
    return [part for part in range(1, min(counts) + 1) if not any(count % part for count in counts)]


def require_whole_beside_experts(where: str, *, ep: int, fsdp: int, pp: int, tp: int) -> None:
    """Refuse expert parallelism on ranks that split other weights too.

    Args:
        where: description of the mesh, for the error.
        ep: ranks that share one copy of the experts.
        fsdp: ranks that share one copy of the parameters.
        pp: pipeline stages.
        tp: ranks that hold other parts of the same layers.

    Raises:
        PlacementError: ep and another of these axes are above 1.
    """
    beside = [name for name, size in (("fsdp", fsdp), ("pp", pp), ("tp", tp)) if size > 1]
    if ep > 1 and beside:
        raise PlacementError(
            f"{where}, with both ep and {beside[0]} above 1",
            why="expert parallelism needs ranks that hold every other weight whole",
            fix=f"leave {beside[0]} or ep out; dp works with both",
        )


def _twice(values: Iterable[Hashable]) -> list[Hashable]:
    """Return the values that occur more than once."""
    return [value for value, times in Counter(values).items() if times > 1]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
