"""Rank consistency: the ranks that share a model's weights run the same rows and draw the same tokens.

    step s     rank 0   notes of new rows and drawn tokens ─ digest ─┐
               rank 1   notes ...                          ─ digest ─┴─ all equal? ─> the pass of step s
                                                                          └ no ─> notes compared, row named

The ranks agree without communication: logits have the same bits on all of them, and random numbers depend
on row ids. But ranks that diverge (other prompts, another version, machines that round differently) would
enter each other's collectives with other shapes. So they exchange one number before every pass, and once
when no row is left. It always has the same size, so a diverged rank still compares it; the step at which
they diverge fails, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.native.scheduler import Sequence
from rillflow.workers.collectives import Ranks

_Note = tuple[int, int, int, int]
"""A row's id, and a number that must be equal on all ranks."""


class RankConsistency:
    """Records of this rank's work since the last comparison.

    Args:
        ranks: the ranks that run the same rows; with a single rank nothing is recorded.
        device: the device of the exchanged tensors.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._notes: list[_Note] = []

    def note(self, rows: Rows[Sequence], numbers: Rows[int]) -> None:
        """Record a number for each of these rows, such as its drawn token."""
        if self._ranks.size > 1:
            self._notes += [(*row.rollout.row, said) for row, said in zip(rows, numbers, strict=True)]

    def check(self, *state: int) -> None:
        """Compare the notes of all ranks; every rank calls it.

        Args:
            state: more numbers that must be equal on all ranks: the version, the rows, the lengths.

        Raises:
            RolloutError: the ranks differ; it names the first row that differs, and all ranks raise it.
        """
        if self._ranks.size == 1:
            return
        notes, self._notes = self._notes, []
        digest = torch.tensor([hash((state, tuple(notes)))], device=self._device)
        if len(set(self._ranks.stack(digest).flatten().tolist())) > 1:
            self._fail(notes, state)

    def clear(self) -> None:
        """Discard all notes; called when all rows are removed."""
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
            f"rank {rank} of a tensor-parallel group has other rows, or another weight version, than rank 0"
        )
    elif first != second:
        what = f"rank {rank} of a tensor-parallel group runs row ({second}) where rank 0 runs row ({first})"
    else:
        what = f"row ({first}) has other tokens on rank {rank} of a tensor-parallel group than on rank 0"
    return RolloutError(
        what,
        why="the ranks of a group sample the same tokens independently, without communication",
        fix="make the same calls with the same prompts on every rank of the group, and use the same weights, "
        "thread count, processor and library versions",
    )
