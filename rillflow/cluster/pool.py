"""Pool: a set of devices, one rank to each; and the place of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Some devices. Roles of one pool share them in turn; other pools run side by side.

    Example:
        Pool(name="main", size=4)
    """

    name: str
    """How a recipe calls it."""
    size: int
    """Its ranks, one to a device."""


@dataclass(frozen=True, order=True)
class Place:
    """One rank."""

    pool: str
    """The pool's name."""
    rank: int
    """Within the pool, from 0."""

    def __str__(self) -> str:
        return f"rank {self.rank} of pool {self.pool!r}"


def places(pools: Sequence[Pool]) -> list[Place]:
    """Every rank of every pool.

    Raises:
        ClusterError: there is no pool, two have one name, or one has no rank.
    """
    if not pools:
        raise ClusterError("there is no pool", why="a role runs on the ranks of one")
    name, count = Counter(pool.name for pool in pools).most_common(1)[0]
    if count > 1:
        raise ClusterError(f"{count} pools are called {name!r}", why="a role finds its pool by name")
    for pool in pools:
        if pool.size < 1:
            raise ClusterError(f"pool {pool.name!r} has size {pool.size}", why="a pool has a rank at least")
    return [Place(pool.name, rank) for pool in pools for rank in range(pool.size)]
