"""Instructions: a table's output to its caller, about groups by number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """Groups of a ``begin`` call received their numbers."""

    ids: Ids
    """[N] group numbers, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lease:
    """Groups held by one worker until it is done with them, dies, or passes the deadline."""

    number: int
    """Number of the lease, unique in the table."""
    stage: str
    """Stage that the groups were taken for."""
    holder: str
    """Name of the holder."""
    since: float
    """Time of the lease."""
    deadline: float
    """Time at which the groups become ready again."""
    ids: Ids
    """[N] group numbers, in begin order."""
    rows: Ids
    """[N] rows in each group."""
    tokens: Ids
    """[N] tokens of each group, as reported by writers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """Groups became ready for a stage; waiting takers may try again."""

    stage: str
    """Stage whose input columns are all written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Delete:
    """Cells that no stage will read any more; the caller must answer with ``cleared``."""

    writer: str
    """Stage that wrote the cells, or SOURCE."""
    ids: Ids
    """[N] group numbers."""
    is_unread: bool
    """Whether no reader can have them mapped: False if a lease on one of the groups ended early."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dropped:
    """Groups removed from all stages."""

    ids: Ids
    """[N] group numbers."""
    reason: str
    """Reason for the log."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """Slots are free; a waiting ``begin`` may try again."""

    groups: int
    """Number of groups that may begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """A closed stream has no group left for a stage."""

    stage: str
    """Stage that is finished."""


Instruction = Begun | Lease | Ready | Delete | Dropped | Room | Finished
