"""Rank consistency: the ranks that share a model's weights run the same rows and draw the same tokens.

    step s     rank 0   notes what enters, what was drawn ─ digest ─┐
               rank 1   notes ...                         ─ digest ─┴─ all equal? ─> the pass of step s
                                                                         └ no ─> notes compared, row named

They need not talk to agree: logits have the same bits on all of them, and random numbers follow from row
ids. But ranks that stopped agreeing (other prompts, another version, machines that round differently)
would run passes of other shapes into each other's collectives. So one number is exchanged before a pass
and when no row is left, always of the same size: whoever is in another place of the program still
compares it, and the step that goes wrong is the one that fails, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from rillflow.cluster.ranks import Ranks
from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.native.scheduler import Sequence

_Note = tuple[int, int, int, int]
"""A row's id, and a number that has to be the same everywhere."""


class RankConsistency:
    """What this rank has done since the ranks last compared.

    Args:
        ranks: those who run the same rows; one alone agrees with itself at no cost.
        device: where they exchange it.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._notes: list[_Note] = []

    def note(self, rows: Rows[Sequence], numbers: Rows[int]) -> None:
        """Something was done with each of these rows, and its number says what."""
        if self._ranks.size > 1:
            self._notes += [(*row.rollout.row, said) for row, said in zip(rows, numbers, strict=True)]

    def check(self, *state: int) -> None:
        """Compare notes; all ranks call it.

        Args:
            state: numbers that have to be the same everywhere: the version, how many rows, how long.

        Raises:
            RolloutError: they differ; it names the first row, and is raised on all ranks.
        """
        if self._ranks.size == 1:
            return
        notes, self._notes = self._notes, []
        digest = torch.tensor([hash((state, tuple(notes)))], device=self._device)
        if len(set(self._ranks.stack(digest).flatten().tolist())) > 1:
            self._fail(notes, state)

    def clear(self) -> None:
        """Rows are gone, and what was noted of them."""
        self._notes = []

    def _fail(self, notes: list[_Note], state: tuple[int, ...]) -> None:
        own = torch.tensor([*notes, (-1, -1, -1, hash(state))], device=self._device)
        everyone = [part.tolist() for part in self._ranks.gather(own)]
        for rank, theirs in enumerate(everyone):
            for one, other in zip(everyone[0], theirs, strict=False):
                if one != other:
                    raise _apart(one, other, rank)
        raise AssertionError("digests of equal notes are equal")


def _apart(one: Rows[int], other: Rows[int], rank: int) -> RolloutError:
    first, second = (RowId(*note[:3]) for note in (one, other))
    if -1 in (first.prompt, second.prompt):
        what = (
            f"rank {rank} of a tensor-parallel group runs other rows, or under another version, than rank 0"
        )
    elif first != second:
        what = f"rank {rank} of a tensor-parallel group runs row ({second}) where rank 0 runs row ({first})"
    else:
        what = f"row ({first}) has other tokens on rank {rank} of a tensor-parallel group than on rank 0"
    return RolloutError(
        what,
        why="ranks that share a model's weights run the same rows and draw the same tokens, without talking",
        fix="give every rank of the group the same calls with the same prompts, the same weights, thread "
        "count, processor and library versions",
    )
