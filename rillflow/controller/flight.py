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
shutdown      a replica that dies gives its groups back and is replaced, at most ``restarts`` times without
              a complete group in between; then its first death ends the phase
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rillflow.controller.decisions import Decisions, Event
from rillflow.controller.executor import GroupExecutor, GroupPart
from rillflow.controller.group_table import GENERATE, TRAIN, GroupTable
from rillflow.controller.replicas import SamplerReplica
from rillflow.controller.saved_flight import CollectedGroup, FlightSave, KeptFlight
from rillflow.controller.source import DataStream, GroupSampling, one_by_one
from rillflow.controller.streamed_stages import StageWorker
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.records.batch import Batch
from rillflow.roles.sampler import GroupId
from rillflow.workers.backend import RankDied
from rillflow.workers.pending import Pending
from rillflow.workers.restarts import RestartBudget
from rillflow.workers.values import Facts, Lie, shares


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


class Flight:
    """Groups in flight.

    Args:
        executor: has the groups of ranks.
        stream: prompts of the phase.
        sync: transfers versions to the sampler.
        how: how groups are sampled.
        most_rows: largest number of rows of a replica at once.
        capacity: largest number of groups between the oldest in flight and the newest.
        workers: workers of the stages that run group by group.
        decisions: notes the decisions of the phase, or repeats those of a run.
        again: drawn prompts that no step had trained when the run was interrupted.
        kept: groups in flight of the checkpoint to resume from; None to begin with none.
    """

    def __init__(
        self,
        executor: GroupExecutor,
        stream: DataStream,
        sync: WeightSync,
        *,
        how: GroupSampling,
        most_rows: int,
        capacity: int,
        workers: Sequence[StageWorker],
        decisions: Decisions,
        again: Sequence[Batch],
        kept: KeptFlight | None = None,
    ) -> None:
        self._executor, self._stream, self._how, self._workers = executor, stream, how, workers
        self.decisions = decisions
        """Decisions of the phase."""
        budget = RestartBudget(how.restarts)
        self.replicas = [
            SamplerReplica(
                executor=executor, sync=sync, how=how, number=number, most_rows=most_rows, budget=budget
            )
            for number in range(len(how.replicas))
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
        self.newest = 0
        """Number of publishes of the phase that were delivered."""
        self.published = 0
        """Number of publishes of the phase."""
        self.saves: list[FlightSave] = []
        """Checkpoints whose groups in flight are not written yet."""
        self.is_begun = False
        """Whether the loop has begun: an evaluation at the checkpoint's step is over."""
        self._kept, self._after, self._restored = kept, -1, 0
        self._rows: Mapping[tuple[GroupId, int], tuple[int, Pending]] = {}
        if kept is not None:
            self._restore(kept)
        self._parcels: dict[int, PackedWeights] = {} if sync.initial is None else {self.published: sync.initial}

    def _restore(self, kept: KeptFlight) -> None:
        """Take over the groups in flight of a checkpoint; replicas go on with their saved rows."""
        state, versions = kept.state, kept.state["versions"]
        self._after, self.newest = state["step"], state["newest"]
        self.published = self._restored = state["published"]
        self._rows = kept.loaded(self._executor)
        for replica in self.replicas:
            replica.is_recalled = True
            replica.version = versions[replica.number] if replica.number < len(versions) else min(versions)
            if replica.number in kept.saves:
                replica.restore(kept.folder)
        for epoch, prompt, version, number, begun in state["groups"]:
            if (epoch, prompt) in self.table:
                replica = self.replicas[number % len(self.replicas)]
                self.table.take(GENERATE, 1, replica.name, [(epoch, prompt)])
                group = GroupInFlight(
                    id=(epoch, prompt), version=version, replica=replica, call=0, begun=begun
                )
                self.groups[group.id] = group
                self._find_rows(group)
        for stage, (scored, made) in kept.scored(self._executor).items():
            for scored_group in (each for each in scored if each in self.groups):
                if self.table.take(stage, 1, "the checkpoint", [scored_group]):
                    self.table.done(stage, scored_group, made)
        for number, groups in state["scoring"]:
            worker = self._workers[number]
            ready = self.table.ready(worker.stage)
            there = [each for epoch, prompt in groups if (each := (epoch, prompt)) in ready]
            if there:
                self._begin_stage(number, self.table.take(worker.stage, len(there), worker.name, there))

    def _find_rows(self, group: GroupInFlight) -> None:
        """Complete a group that the checkpoint's run had collected before its replica's rows were saved."""
        if (group.id, group.begun) in self._rows:
            self.table.done(GENERATE, group.id, self._rows[group.id, group.begun][1])
            self._note_rows(group)

    def _note_rows(self, group: GroupInFlight) -> None:
        """Note that the rows of a group are on their way to the store, for checkpoints that will keep them."""
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
        held = [[each for each in self.table.left if worker.name in self.table.holders(each)]
                for worker in self._workers]
        return {
            "step": step,
            "position": self.decisions.position,
            "published": self.published,
            "newest": self.newest,
            "versions": [each.version for each in self.replicas],
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
            replicas=len(self.replicas),
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
        if replica.is_recalled:
            if self._kept is not None and self._kept.saves.get(replica.number) == position:
                self._go_on(replica)
            return
        save = next((each for each in self.saves if each.step == step and each.state is None), None)
        made = replica.save(None if save is None else save.folder)
        if save is not None:
            save.saved[replica.number] = position, made

    def _go_on(self, replica: SamplerReplica) -> None:
        """Let a replica go on with the rows of a checkpoint, and collect its complete groups."""
        replica.go_on(keeps_rows=True)
        there = [each for each in map(self.groups.get, replica.restored) if each is not None]
        self._collect(
            replica, [each for each in there if each.replica is replica and not replica.restored[each.id]]
        )

    def leave(self, reason: str) -> None:
        """Go on without decisions of the interrupted run: rows that came of its later ones are dropped."""
        recalled = [each for each in self.replicas if each.is_recalled]
        for replica in recalled:
            for group in [each for each in self.groups.values() if each.replica is replica]:
                position, _ = self._rows.get((group.id, group.begun), (self.decisions.position + 1, None))
                if position > self.decisions.position:
                    self.again(group, reason)
            replica.go_on(keeps_rows=False)
        while self.newest < self._restored:
            self.newest += 1
            self.decisions.note("deliver", self.newest)
        for replica in recalled:
            if replica.version < self._restored:
                replica.version = self._restored
                self.decisions.note("receive", replica.number, replica.version)

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
        """Whether a replica is being replaced."""
        return any(each.restart is not None for each in self.replicas)

    @property
    def is_settled(self) -> bool:
        """Whether every replica has the version that was delivered last."""
        ready = (each.is_live and each.version == self.newest and not each.arriving for each in self.replicas)
        return all(ready)

    @property
    def lag(self) -> int:
        """Publishes that the replica with the oldest weights has not received."""
        return self.newest - min((each.version for each in self.replicas if each.version >= 0), default=0)

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
            try:
                self._hear(replica)
            except RankDied as died:
                if died.place not in replica.places:
                    raise
                self._lost(replica, died)
        self.saves = [each for each in self.saves if not each.is_written]
        for worker in self._workers:
            for group, made in worker.hear(self._how.deadline_s).items():
                self.table.done(worker.stage, group, made)
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
        if replica.is_recalled:
            self._find_rows(begun)
        return begun

    def again(self, group: GroupInFlight, reason: str) -> None:
        """Drop the rows of a group, and put its prompt into the table again."""
        self.decisions.note("again", group.id, reason)
        holders = self.table.holders(group.id)
        if group.replica.name in holders:
            group.replica.give_up(group.id)
        for worker in self._workers:
            if worker.name in holders:
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
        oldest = min(each.version for each in self.replicas)
        least = self.newest if self.decisions.head is None else min(oldest + 1, self.newest)
        self._parcels = {number: each for number, each in self._parcels.items() if number >= least}

    def compute(self) -> None:
        """Have the workers of streamed stages compute what is ready."""
        for number, worker in enumerate(self._workers):
            groups = self.table.take(worker.stage, worker.room, worker.name)
            if groups:
                self.decisions.note("run", number, [list(each) for each in groups])
                self._begin_stage(number, groups)
            worker.ask()

    def _begin_stage(self, number: int, groups: Sequence[GroupId]) -> None:
        self._workers[number].begin({each: self.table.result(GENERATE, each) for each in groups})

    def repeat(self) -> None:
        """Repeat the decisions of a run as far as their results are there."""
        while (head := self.decisions.head) and self._repeats(*head):
            pass
        for worker in self._workers:
            worker.ask()

    def _repeats(self, name: str, *given: Any) -> bool:
        """Repeat a decision; return False if it has to wait."""
        if name == "draw":
            self.draw(given[0])
        elif name == "begin":
            self.begin(self.replicas[given[0]])
        elif name == "again":
            self.again(self.groups[given[0][0], given[0][1]], given[1])
        elif name == "call":
            self.replicas[given[0]].passes = given[1]
            self.call(self.replicas[given[0]])
        elif name == "receive":
            return self._repeats_receive(self.replicas[given[0]], given[1])
        elif name == "save":
            self._save(self.replicas[given[0]], given[1])
        elif name == "run" and self._may_compute(*given):
            worker, groups = self._workers[given[0]], [(epoch, prompt) for epoch, prompt in given[1]]
            taken = self.table.take(worker.stage, len(groups), worker.name, groups)
            self.decisions.note("run", given[0], [list(each) for each in taken])
            self._begin_stage(given[0], taken)
        elif self.is_past([name, *given]):
            self._pass([name, *given])
        else:
            return False
        return True

    def _repeats_receive(self, replica: SamplerReplica, version: int) -> bool:
        """Repeat the transfer of a version to a replica; return False if it has to wait."""
        if replica.version == version or (replica.is_recalled and version <= self._restored):
            replica.version = version  # a resumed run began with it; or a new process received it again
            self.decisions.note("receive", replica.number, version)
        elif version in self._parcels and not replica.arriving:
            self._receive(replica, version)
        else:
            return False
        is_saved = self._kept is not None and replica.number in self._kept.saves
        if replica.is_recalled and version >= self._restored and not is_saved:
            replica.go_on(keeps_rows=False)
        return True

    def is_past(self, event: Event) -> bool:
        """Return whether a resumed run has what a decision is about: the loop does it no more."""
        return (event[0] == "deliver" and event[1] <= self._restored) or (
            event[0] == "beside" and event[1] <= self._after and self.is_begun
        )

    def _pass(self, event: Event) -> None:
        """Note a decision that is past; after an evaluation rows go on from their tokens."""
        self.decisions.note(*event)
        if event[0] == "deliver":
            self.newest = event[1]
        else:
            for replica in (each for each in self.replicas if each.is_live and not each.is_recalled):
                replica.save(None)

    def _may_compute(self, number: int, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether a worker can take groups now."""
        worker = self._workers[number]
        ready = self.table.ready(worker.stage)
        return worker.room > 0 and all((epoch, prompt) in ready for epoch, prompt in groups)

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
        workers: Sequence[SamplerReplica | StageWorker] = self.replicas
        if stage != GENERATE:
            workers = [each for each in self._workers if each.stage == stage]
        found = [each for worker in workers for each in worker.worked]
        for worker in workers:
            worker.worked = []
        return found
