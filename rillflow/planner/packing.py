"""Packing: whether pools find room on the machines of a fleet, none of them cut by a machine's edge.

sizes of pools ─┬─ whole machines ──────────────┐
                └─ parts of one ─ least machines ┴─> machines a fleet must have

A pool of 12 on machines of 8 takes one whole and 4 of another. Where parts do not fill machines without waste
(3 and 2 of 6), the least number is searched: there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rillflow.planner.hardware import Fleet


def machines_needed(fleet: Fleet, sizes: Sequence[int]) -> int:
    """The least machines that hold pools of these sizes side by side.

    Example:
        machines_needed(fleet_of_8, (4, 2, 16)) == 3
    """
    room = min(fleet.per_machine, fleet.devices)
    whole = sum(size // room for size in sizes)
    parts = tuple(sorted((size % room for size in sizes if size % room), reverse=True))
    return whole + _machines_of_parts(room, parts)


def machines_of(fleet: Fleet) -> int:
    """How many machines a fleet has."""
    return max(1, fleet.devices // fleet.per_machine)


@lru_cache(maxsize=65536)
def _machines_of_parts(room: int, parts: tuple[int, ...]) -> int:
    least = -(-sum(parts) // room)
    while not _fits(parts, (room,) * least):
        least += 1
    return least


def _fits(parts: tuple[int, ...], rooms: tuple[int, ...]) -> bool:
    """Whether parts, largest first, fit into what the machines have left."""
    if not parts:
        return True
    return any(
        _fits(parts[1:], tuple(sorted((*rooms[:place], left - parts[0], *rooms[place + 1 :]))))
        for place, left in enumerate(rooms)
        if left >= parts[0] and left not in rooms[:place]
    )
