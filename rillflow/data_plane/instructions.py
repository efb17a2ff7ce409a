"""Instructions: what a table says to whoever runs it, about groups by their numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """The groups that a ``begin`` was for have numbers."""

    ids: Ids
    """[N] in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lease:
    """Groups that a holder has until it is done with them, dies, or lets the deadline pass."""

    number: int
    """No other lease of the table has it."""
    stage: str
    """That the groups were taken for."""
    holder: str
    """Who took them."""
    since: float
    """When."""
    deadline: float
    """When they go back."""
    ids: Ids
    """[N] the groups, in begin order."""
    rows: Ids
    """[N] rows in each."""
    tokens: Ids
    """[N] tokens of each, as their writers said."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """Groups became ready for a stage: whoever waits for some may ask again."""

    stage: str
    """Whose columns are all written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Delete:
    """Cells that nobody will read any more; ``cleared`` is expected in answer."""

    writer: str
    """The stage that wrote the cells, or SOURCE."""
    ids: Ids
    """[N] the groups."""
    is_unread: bool
    """Whether nobody can be reading: false where a holder of one of the groups was given up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dropped:
    """Groups that no stage will be given."""

    ids: Ids
    """[N] the groups."""
    reason: str
    """For the ledger."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """Slots are free: whoever waits to begin may ask again."""

    groups: int
    """How many may begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """A closed stream has nothing left for a stage, and never will."""

    stage: str
    """That is through."""


Instruction = Begun | Lease | Ready | Delete | Dropped | Room | Finished
