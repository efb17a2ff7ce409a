"""GroupTable: the groups of a phase in flight, in the table of ``data_plane``; cells are results of ranks.

    add ─> policy.generate ─> reward.score, reference.logprobs, ... ─> train
             a replica          a streamed stage's ranks               the rule of the bound, then a step

A holder takes a group for a stage and is done with it, or loses it: a group whose holder died is ready
again. A group that will not be trained is dropped with a reason. When a group is trained or dropped, its
cells are deleted, which frees its rows in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import numpy as np

from rillflow.data_plane.instructions import Begun, Delete, Instruction, Lease
from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.data_plane.table import Table
from rillflow.records.batch import Batch
from rillflow.roles.sampler import GroupId
from rillflow.workers.pending import Pending

GENERATE = "policy.generate"
"""Stage that samples a group's rows."""
TRAIN = "train"
"""Stage that forms steps of groups whose columns are all there."""


class GroupTable:
    """The groups in flight.

    Args:
        streamed: stages that run group by group on sampled rows.
        capacity: largest number of groups between the oldest in flight and the newest.
        clock: returns seconds, for the stories of groups in errors.
    """

    def __init__(self, streamed: Sequence[str], *, capacity: int, clock: Callable[[], float]) -> None:
        self.stages = (GENERATE, *dict.fromkeys(streamed))
        """Stages that make rows or fields of rows, in the order in which steps are formed of them."""
        column = ColumnType(dtype="int64")
        made = [StageColumns(name=GENERATE, reads=("prompt",), writes=(GENERATE,), order="ready_first")]
        made += [
            StageColumns(name=stage, reads=(GENERATE,), writes=(stage,), order="ready_first")
            for stage in self.stages[1:]
        ]
        made.append(StageColumns(name=TRAIN, reads=self.stages, order="ready_first"))
        columns = {"prompt": column, **dict.fromkeys(self.stages, column)}
        self._clock = clock
        self._table = Table(
            Schema(columns=columns, stages=tuple(made)), capacity=max(64, capacity), now=clock()
        )
        self._groups: dict[int, GroupId] = {}
        self._numbers: dict[GroupId, int] = {}
        self._prompts: dict[GroupId, Batch] = {}
        self._cells: dict[tuple[str, int], Pending] = {}
        self._leases: dict[tuple[str, int], tuple[int, str]] = {}
        """Lease and holder of a group, by stage and number."""

    @property
    def room(self) -> int:
        """Number of groups that may be added now."""
        return self._table.room

    def __contains__(self, group: GroupId) -> bool:
        return group in self._numbers

    def add(self, prompt: Batch) -> None:
        """Add the group of a prompt, a batch of one row."""
        group = prompt.row_ids()[0].group
        made = self._table.begin(1, holder="the stream", now=self._clock())
        (number,) = next(each.ids.tolist() for each in made if isinstance(each, Begun))
        self._groups[number], self._numbers[group], self._prompts[group] = group, number, prompt

    def ready(self, stage: str) -> set[GroupId]:
        """Return the groups that may be taken for a stage."""
        return {self._groups[number] for number in self._table.ready(stage).tolist()}

    def take(
        self, stage: str, count: int, holder: str, only: Sequence[GroupId] | None = None
    ) -> list[GroupId]:
        """Lease at most ``count`` groups that are ready for a stage: the oldest, or ``only`` these."""
        if count < 1:
            return []
        ids = None if only is None else np.array([self._numbers[each] for each in only])
        made = self._table.take(stage, count, holder=holder, now=self._clock(), deadline=inf, only=ids)
        taken = []
        for lease in (each for each in made if isinstance(each, Lease)):
            for number in lease.ids.tolist():
                self._leases[stage, number] = lease.number, holder
                taken.append(self._groups[number])
        return taken

    def done(self, stage: str, group: GroupId, result: Pending | None = None) -> None:
        """Complete a group for a stage that a holder has taken it for; ``result`` holds its rows."""
        number = self._numbers[group]
        if result is not None:
            self._cells[stage, number] = result
        lease, _ = self._leases.pop((stage, number))
        self._carry_out(self._table.done(lease, np.array([number]), now=self._clock()))
        if stage == TRAIN:
            self._forget(group)

    def drop(self, group: GroupId, reason: str) -> Batch:
        """Remove a group, whichever stage has it; return its prompt."""
        prompt, number = self._prompts[group], self._numbers[group]
        self._carry_out(self._table.drop(np.array([number]), reason, self._clock()))
        self._forget(group)
        return prompt

    def died(self, holder: str) -> list[GroupId]:
        """Make the groups of a holder ready again for the stages that it had them for; return them."""
        lost = [key for key, (_, by) in self._leases.items() if by == holder]
        for key in lost:
            del self._leases[key]
        self._table.died(holder, self._clock())
        return [self._groups[number] for _, number in lost]

    def hand_over(self, stage: str, group: GroupId, holder: str) -> None:
        """Give a group that is leased for a stage to another holder."""
        key = stage, self._numbers[group]
        lease, _ = self._leases[key]
        self._leases[key] = lease, holder

    def holders(self, group: GroupId) -> set[str]:
        """Return the holders that have taken a group for a stage and are not done with it."""
        number = self._numbers[group]
        return {by for (_, held), (_, by) in self._leases.items() if held == number}

    def has(self, stage: str, group: GroupId) -> bool:
        """Return whether a group is done for a stage."""
        return (stage, self._numbers.get(group, -1)) in self._cells

    def held_by(self, holder: str) -> list[GroupId]:
        """Return the groups that a holder has taken for a stage and is not done with, oldest first."""
        return [
            self._groups[number]
            for number in sorted(n for (_, n), (_, by) in self._leases.items() if by == holder)
        ]

    def result(self, stage: str, group: GroupId) -> Pending:
        """Return the result that holds a group's rows of a stage."""
        return self._cells[stage, self._numbers[group]]

    def prompt(self, group: GroupId) -> Batch:
        """Return the prompt of a group."""
        return self._prompts[group]

    @property
    def left(self) -> Mapping[GroupId, Batch]:
        """Prompts of the groups in flight, oldest first."""
        return dict(self._prompts)

    def story(self, group: GroupId) -> str:
        """Return the events of a group, in order."""
        return self._table.story(self._numbers[group])

    def _forget(self, group: GroupId) -> None:
        number = self._numbers.pop(group)
        del self._groups[number], self._prompts[group]
        for stage in (*self.stages, TRAIN):
            self._leases.pop((stage, number), None)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Delete the cells that no stage reads any more."""
        for each in instructions:
            if isinstance(each, Delete):
                for number in each.ids.tolist():
                    self._cells.pop((each.writer, number), None)
                self._table.cleared(each.writer, each.ids)
