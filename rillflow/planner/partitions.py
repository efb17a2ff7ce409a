"""Partitions: every way to put units into pools, some of them bound together.

units ─ bound ones merged ─> set partitions: 1, 2, 5, 15, 52, 203, 877 of 1 to 7 ─> pools of unit indices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rillflow.errors import PlanError, nearest

Pool = tuple[int, ...]
"""Units that share devices, by their place among the problem's, ascending."""
Partition = tuple[Pool, ...]
"""Pools, ordered by their first unit."""


def partitions(names: Sequence[str], *, fixed: Mapping[str, str], alone: str = "") -> Iterator[Partition]:
    """Every set partition of the units, each once.

    Args:
        names: the units.
        fixed: units that must share the pool of another.
        alone: a unit that shares its pool with none; empty: any may.

    Raises:
        PlanError: a unit is bound to one that is not there.
    """
    blocks = _blocks(names, fixed)
    single = [block for block in blocks if alone and names.index(alone) in block] if alone in names else []
    if single and len(single[0]) > 1:
        raise PlanError(
            f"{alone} is bound to another unit",
            why="generation apart has devices of its own",
            fix="unbind it",
        )
    shared = [block for block in blocks if block not in single]
    for grouped in _set_partitions(shared):
        pools = [tuple(sorted(unit for block in group for unit in block)) for group in grouped]
        yield tuple(sorted((*pools, *(tuple(block) for block in single))))


def _blocks(names: Sequence[str], fixed: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Units that are bound together, directly or through others."""
    found = {name: {name} for name in names}
    for name, other in fixed.items():
        for one in (name, other):
            if one not in found:
                raise PlanError(
                    f"{name!r} is to share the pool of {other!r}",
                    why=f"{one!r} is no model of this step",
                    fix=nearest(one, names),
                )
        merged = found[name] | found[other]
        for one in merged:
            found[one] = merged
    unique = {tuple(sorted(names.index(name) for name in block)) for block in found.values()}
    return sorted(unique)


def _set_partitions(blocks: Sequence[Pool]) -> Iterator[list[list[Pool]]]:
    """Each block joins a group of those before it, or opens one."""
    if not blocks:
        yield []
        return
    for rest in _set_partitions(blocks[:-1]):
        for place in range(len(rest)):
            yield [*rest[:place], [*rest[place], blocks[-1]], *rest[place + 1 :]]
        yield [*rest, [blocks[-1]]]
