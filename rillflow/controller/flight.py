"""Flight: the groups of a ready-first phase from their first token to the step that takes them.

draw ─> table ─ begin ─> replicas: call, call, ... ─ collect ─> streamed stages ─> complete ─> taken
           ^                ^ between two calls: receive            │
           └──── again ─────┴─────── replica died, group too old ───┘

Each method that changes the order of work notes a decision, so that a run can be repeated (``decisions``).
The source decides which groups begin and which make a step (``async_rollout``).

consumes      results of replicas and streamed stages; prompts of the stream; published versions
waits for     nothing: the source waits for ``events``
unblocked by  the ranks of the sampler and of streamed stages
produces      calls to these ranks; complete groups, and their rows and scores as references
shutdown      a replica or a worker that dies gives its groups back and is replaced, at most ``restarts``
              times without a result in between; then its first death ends the phase
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from rillflow.controller.decisions import Decisions
from rillflow.controller.executor import GroupExecutor, GroupPart
from rillflow.controller.group_table import GENERATE, TRAIN, GroupTable
from rillflow.controller.replicas import SamplerReplica
from rillflow.controller.saved_flight import CollectedGroup, FlightSave
from rillflow.controller.source import DataStream, GroupSampling, one_by_one
from rillflow.controller.streamed_stages import StageWorker
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.records.batch import Batch
from rillflow.roles.sampler import GroupId
from rillflow.workers.arguments import Facts, Lie, shares
from rillflow.workers.backend import RankDied
from rillflow.workers.config import SAMPLER
from rillflow.workers.pending import Pending
from rillflow.workers.restarts import Recovery, RestartBudget


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupInFlight:
    """A group whose rows have begun."""

    id: GroupId
    """Epoch and prompt id."""
    version: int
    """Publishes of the phase before the group's first token."""
    replica: SamplerReplica
    """Replica that samples the group."""
    call: int
    """Number of the replica's call that begins the group; earlier calls report on rows that were given up."""
    begun: int
    """Position of the decision that began it."""


_Holder = SamplerReplica | StageWorker


class Flight:
    """Groups in flight.

    Args:
        executor: has the groups of ranks.
        stream: prompts of the phase.
        sync: transfers versions to the sampler; None if it has the policy's module.
        how: how groups are sampled.
        most_rows: largest number of rows of a replica at once.
        capacity: largest number of groups between the oldest in flight and the newest.
        workers: workers of the stages that run group by group.
        decisions: notes the decisions of the phase, or repeats those of a run.
        again: drawn prompts that no step had trained when the run was interrupted.
    """

    def __init__(
        self,
        executor: GroupExecutor,
        stream: DataStream,
        *,
        sync: WeightSync | None,
        how: GroupSampling,
        most_rows: int,
        capacity: int,
        workers: Sequence[StageWorker],
        decisions: Decisions,
        again: Sequence[Batch],
    ) -> None:
        self._executor, self._stream, self._how, self._workers = executor, stream, how, workers
        self.decisions = decisions
        """Decisions of the phase."""
        budget = RestartBudget(how.restarts)
        self.replicas = [
            SamplerReplica(
                executor=executor,
                sync=sync,
                how=how,
                number=number,
                most_rows=most_rows,
                recovery=self._recovery(ranks, budget),
            )
            for number, ranks in enumerate(how.replicas)
        ]
        """Replicas of the sampler."""
        stages, clock = [each.stage for each in workers], executor.backend.now
        self.table = GroupTable(stages, capacity=len(again) + capacity, clock=clock)
        """Groups that were drawn and that no step has taken, and who has them."""
        for prompt in again:
            self.table.add(prompt)
        self.groups: dict[GroupId, GroupInFlight] = {}
        """Groups that have begun and that no step has taken."""
        self.complete: dict[GroupId, GroupInFlight] = {}
        """Those of them that a step may take."""
        self.dropped: list[tuple[GroupId, str]] = []
        """Groups whose rows were dropped, with reasons; the caller empties the list."""
        self.lost: list[GroupInFlight] = []
        """Groups of replicas that died; the caller empties the list."""
        self._gone: list[_Holder] = []
        """Replicas and workers whose ranks could not be replaced."""
        self._holders: Sequence[_Holder] = [*self.replicas, *workers]
        self._unscored = set[tuple[int, GroupId]]()
        """Workers, by number, and groups that they have and do not compute, in a repeat."""
        self.newest = 0
        """Number of publishes of the phase that were delivered."""
        self.published = 0
        """Number of publishes of the phase."""
        self.saves: list[FlightSave] = []
        """Checkpoints whose groups in flight are not written yet."""
        initial = None if sync is None else sync.initial
        self._parcels: dict[int, PackedWeights] = {} if initial is None else {0: initial}

    def _note_rows(self, group: GroupInFlight) -> None:
        """Note that the rows of a group are on their way to the store, for checkpoints to come."""
        position, collecting = self.decisions.position, group.replica.collecting
        is_stored = self.table.has(GENERATE, group.id)
        rows = self.table.result(GENERATE, group.id) if is_stored else collecting[group.id]
        number = group.replica.number
        for save in self.saves:
            save.collected.append(
                CollectedGroup(
                    group=group.id, begun=group.begun, replica=number, position=position, rows=rows
                )
            )

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the flight after a step was opened, as JSON."""
        self.decisions.flush()
        groups, stages = self.groups.values(), self.table.stages[1:]
        held = [self.table.held_by(worker.name) for worker in self._workers]
        return {
            "step": step,
            "position": self.decisions.position,
            "published": self.published,
            "newest": self.newest,
            "versions": [each.received for each in self.replicas],
            "groups": [[*each.id, each.version, each.replica.number, each.begun] for each in groups],
            "scored": {
                stage: [list(each) for each in self.groups if self.table.has(stage, each)] for stage in stages
            },
            "scoring": [[number, [list(each) for each in own]] for number, own in enumerate(held) if own],
        }

    def begin_saving(self, state: Mapping[str, Any], folder: Path) -> FlightSave:
        """Have the replicas write the groups in flight as soon as each has a checkpoint's weights.

        Args:
            state: state of the flight when the checkpoint's step was opened, the newest step.
            folder: folder of the files.
        """
        scored = dict[str, Mapping[GroupId, Pending]]()
        for stage, groups in state["scored"].items():
            there = [each for each in map(tuple, groups) if self.table.has(stage, each)]
            scored |= {stage: {each: self.table.result(stage, each) for each in there}} if there else {}
        save = FlightSave(
            executor=self._executor,
            step=state["step"],
            folder=folder,
            version=state["published"],
            replicas={each.number for each in self.replicas if each not in self._gone},
            scored=scored,
        )
        self.saves, others = [save], self.saves
        for group in self.groups.values():
            if self.table.has(GENERATE, group.id) or group.id in group.replica.collecting:
                self._note_rows(group)
        self.saves = [*others, save]
        return save

    def save(self) -> None:
        """Have replicas that have a checkpoint's weights write their rows."""
        for save in self.saves:
            for replica in self.replicas:
                if replica.is_live and replica.version >= save.version and replica.number not in save.saved:
                    self._save(replica, save.step)

    def _save(self, replica: SamplerReplica, step: int) -> None:
        """Have a replica write its rows, if the checkpoint of the step is being written here, too."""
        position = self.decisions.position
        self.decisions.note("save", replica.number, step)
        save = next((each for each in self.saves if each.step == step and each.state is None), None)
        made = replica.save(None if save is None else save.folder)
        if save is not None:
            save.saved[replica.number] = position, made

    @property
    def events(self) -> list[Sequence[Pending]]:
        """Results that something waits for: those of each sequence together."""
        found = [part for each in self.replicas for part in each.events]
        found += [part for save in self.saves for part in save.events]
        found += [part for each in self._workers for part in each.events]
        return [each for each in found if each]

    @property
    def running_calls(self) -> list[Pending]:
        """Calls of replicas that run, and rows on their way to the store."""
        return [each for replica in self.replicas for each in (*replica.asked, *replica.collecting.values())]

    @property
    def is_replacing(self) -> bool:
        """Whether a replica, or ranks of a streamed stage, are being replaced."""
        return any(each.recovery.is_replacing for each in self._holders)

    @property
    def is_settled(self) -> bool:
        """Whether every replica has the version that was delivered last, except lost ones."""
        there = [each for each in self.replicas if each not in self._gone]
        return all(each.is_live and each.version == self.newest and not each.arriving for each in there)

    @property
    def lag(self) -> int:
        """Publishes that the replica with the oldest weights has not received."""
        return self.newest - min(each.received for each in self.replicas if each not in self._gone)

    @property
    def unfinished(self) -> list[GroupInFlight]:
        """Groups that are being sampled or scored."""
        return [each for each in self.groups.values() if each.id not in self.complete]

    @property
    def sampling(self) -> int:
        """Number of groups whose rows are being sampled."""
        return sum(each.replica.name in self.table.holders(each.id) for each in self.groups.values())

    def hear(self) -> list[GroupInFlight]:
        """Process finished calls; return the groups that became complete."""
        for replica in self.replicas:
            if replica in self._gone:
                continue
            try:
                self._hear(replica)
            except RankDied as died:
                if died.place not in replica.places:
                    raise
                self._lost(replica, died)
        self.saves = [each for each in self.saves if not each.is_written]
        for worker in self._workers:
            try:
                for group, made in worker.hear(self._how.deadline_s).items():
                    self.table.done(worker.stage, group, made)
            except RankDied as died:
                if died.place not in worker.recovery.places:
                    raise
                self._lose(worker.recovery, died)
        for index, holder in enumerate(self._holders):
            if holder.recovery.failed and holder not in self._gone:
                self._leave_out(index)
        ready = self.table.take(TRAIN, len(self.groups), "the next step")
        self.complete |= {group: self.groups[group] for group in ready}
        return [self.groups[group] for group in ready]

    def _hear(self, replica: SamplerReplica) -> None:
        for save in self.saves:
            save.hear(replica.number, self._how.deadline_s)
        for call, advanced in replica.hear():
            begun = [self.groups[each] for each in advanced.complete if each in self.groups]
            self._collect(replica, [each for each in begun if each.replica is replica and each.call <= call])
        for group, rows in replica.collected():
            if group in self.groups and replica.name in self.table.holders(group):
                self.table.done(GENERATE, group, rows)

    def _collect(self, replica: SamplerReplica, groups: Sequence[GroupInFlight]) -> None:
        replica.collect([each.id for each in groups])
        for group in groups:
            self._note_rows(group)

    def _lost(self, replica: SamplerReplica, died: RankDied) -> None:
        """Give back the groups of a replica that died, and have it replaced.

        Raises:
            RankDied: it may not be replaced again; the error is its first death in a row.
        """
        replica.lose(died)
        for save in self.saves:
            save.lose(replica.number)
        what = str(died).splitlines()[0]
        for group in [each for each in self.unfinished if each.replica is replica]:
            if replica.name in self.table.holders(group.id):
                self.lost.append(group)
                self.again(group, f"its replica was lost: {what}")
        self._how.say(f"{what}; its groups are sampled again, and a new process takes its place")

    def _recovery(self, ranks: Sequence[int], budget: RestartBudget) -> Recovery:
        """Return the recovery of a replica with some ranks of the sampler."""
        restart, places = self._how.restart, self._executor.groups[SAMPLER].places
        replace = None if restart is None else lambda _: restart(ranks)
        return Recovery([places[rank] for rank in ranks], budget, replace)

    def _leave_out(self, index: int) -> None:
        """Go on without a replica or a worker whose ranks could not be replaced.

        Raises:
            RankDied: there is no other one.
        """
        lost = self._holders[index]
        if isinstance(lost, SamplerReplica):
            alike: Sequence[_Holder] = self.replicas
            lost.asked.clear()
            lost.collecting.clear()
            lost.arriving = ()
            for save in self.saves:
                save.leave_out(lost.number)
        else:
            alike = [each for each in self._workers if each.stage == lost.stage]
            lost.forget()
        self.decisions.note("gone", index)
        self._gone.append(lost)
        there = [each for each in alike if each not in self._gone]
        assert lost.recovery.failed is not None
        if not there:
            raise lost.recovery.failed
        for group in self._executor.groups.values():
            ranks = [rank for rank, place in enumerate(group.places) if place in lost.recovery.places]
            if ranks:
                group.leave_out(ranks)
        what = lost.recovery.failed.what
        self._how.say(f"{what}; the run goes on with {len(there)} of {len(alike)} such replicas")

    def _lose(self, recovery: Recovery, died: RankDied) -> None:
        """Give back the groups of the workers on ranks that are lost, and have the ranks replaced.

        Raises:
            RankDied: they may not be replaced again; the error is their first death in a row.
        """
        recovery.lose(died)
        for number, worker in enumerate(self._workers):
            if worker.recovery is recovery:
                groups = self.table.died(worker.name)
                self.decisions.note("lost", number, [list(each) for each in groups])
                worker.forget()
        what = str(died).splitlines()[0]
        self._how.say(f"{what}; its groups are scored again, and a new process takes its place")

    def deliver(self, parcel: PackedWeights) -> None:
        """Note that a version is ready for the replicas."""
        self.newest += 1
        self.decisions.note("deliver", self.newest)
        self._parcels[self.newest] = parcel

    def draw(self, groups: int) -> None:
        """Put prompts of the stream into the table."""
        self.decisions.note("draw", groups)
        for prompt in one_by_one(self._stream.take(groups)):
            self.table.add(prompt)

    def begin(self, replica: SamplerReplica) -> GroupInFlight:
        """Begin the oldest group that waits."""
        (group,) = self.table.take(GENERATE, 1, replica.name)
        begun = GroupInFlight(
            id=group,
            version=replica.version,
            replica=replica,
            call=replica.next_call,
            begun=self.decisions.position,
        )
        self.groups[group] = begun
        replica.begin(self.table.prompt(group))
        self.decisions.note("begin", replica.number, group)
        return begun

    def move(self, group: GroupId, replica: SamplerReplica, rows: int) -> None:
        """Note that the rows of a group, ``rows`` of them unfinished, go on with a replica's next call."""
        moved = self.groups[group]
        moved.replica.rows -= rows
        replica.rows += rows
        self.groups[group] = replace(moved, replica=replica, call=replica.next_call)
        self.table.hand_over(GENERATE, group, replica.name)

    def again(self, group: GroupInFlight, reason: str) -> None:
        """Drop the rows of a group, and put its prompt into the table again."""
        self.decisions.note("again", group.id, reason)
        holders = self.table.holders(group.id)
        if group.replica.name in holders:
            group.replica.give_up(group.id)
        for number, worker in enumerate(self._workers):
            if worker.name in holders and (number, group.id) not in self._unscored:
                worker.give_up(group.id)
        del self.groups[group.id]
        self.complete.pop(group.id, None)
        self.table.add(self.table.drop(group.id, reason))
        self.dropped.append((group.id, reason))

    def call(self, replica: SamplerReplica) -> None:
        """Have a replica run its rows."""
        self.decisions.note("call", replica.number, replica.passes)
        replica.call()

    def receive(self) -> None:
        """Have the first replica that is behind receive the newest version; one receives at a time."""
        behind = [each for each in self.replicas if each.is_live and each.version < self.newest]
        if behind and not any(each.arriving for each in self.replicas):
            self._receive(behind[0], self.newest)

    def _receive(self, replica: SamplerReplica, version: int) -> None:
        self.decisions.note("receive", replica.number, version)
        replica.receive(self._parcels[version], version)
        oldest = min(each.version for each in self.replicas if each not in self._gone)
        least = self.newest if self.decisions.head is None else min(oldest + 1, self.newest)
        self._parcels = {number: each for number, each in self._parcels.items() if number >= least}

    def compute(self) -> None:
        """Have the workers of streamed stages compute what is ready."""
        for stage in self.table.stages[1:]:
            able = [each for each in enumerate(self._workers) if each[1].stage == stage and each[1].room]
            able.sort(key=lambda each: -each[1].room)
            ready = len(self.table.ready(stage)) if able else 0
            for left, (number, worker) in zip(range(len(able), 0, -1), able, strict=True):
                groups = self.table.take(stage, min(-(-ready // left), worker.room), worker.name)
                ready -= len(groups)
                if groups:
                    self._compute(number, groups)
        for worker in self._workers:
            worker.ask()

    def _compute(self, number: int, groups: Sequence[GroupId]) -> None:
        """Have a worker compute groups."""
        self.decisions.note("run", number, [list(each) for each in groups])
        self._begin_stage(number, groups)

    def _begin_stage(self, number: int, groups: Sequence[GroupId]) -> None:
        self._workers[number].begin({each: self.table.result(GENERATE, each) for each in groups})

    def taken(self, groups: Sequence[GroupInFlight]) -> None:
        """Forget groups that a step has taken."""
        for group in groups:
            self.table.done(TRAIN, group.id)
            del self.groups[group.id], self.complete[group.id]

    def gathered(self, groups: Sequence[GroupInFlight]) -> Mapping[str, Pending]:
        """Return the results of every stage for groups of a step, on the ranks that train them.

        A replica that dies afterwards takes nothing of the step along.
        """
        policy, lie = self._executor.groups["policy"], Lie.new(is_even=True, is_whole=True)
        places = policy.takes("update") if "update" in policy.endpoints else policy.places[:1]
        sizes = [size for size in shares(len(groups), len(places)) if size]
        parts = [groups[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        found = {}
        for stage in self.table.stages:
            held = [
                GroupPart(place=place, rows={each.id: self.table.result(stage, each.id) for each in part})
                for place, part in zip(places, parts, strict=False)
            ]
            found[stage] = self._executor.gathered(stage, held, lie)
        return found

    def worked(self, stage: str) -> list[Facts]:
        """Return the times when ranks worked for a stage since the last call."""
        workers: Sequence[_Holder] = self.replicas
        if stage != GENERATE:
            workers = [each for each in self._workers if each.stage == stage]
        found = [each for worker in workers for each in worker.worked]
        for worker in workers:
            worker.worked = []
        return found
