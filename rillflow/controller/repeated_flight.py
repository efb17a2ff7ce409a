"""RepeatedFlight: groups in flight that repeat the decisions of a run, in a replay or after a resume.

    replay   no group ─────────────────────────> repeat ─ all decisions ─> the end
    resume   groups of the checkpoint ─ restore ─> repeat ─ those after it ─> decide
                                                     └─ leave: one that cannot be repeated

A resume repeats all decisions since the checkpoint's step was opened. It makes no calls of a replica until
the ``save`` that wrote the replica's rows (``saved_flight``), because it has these rows. If a decision cannot
be repeated, rows that later decisions led to are dropped. So decisions.jsonl tells how each row came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rillflow.controller.decisions import LEFT_SCRIPT, Event
from rillflow.controller.flight import Flight, GroupInFlight
from rillflow.controller.group_table import GENERATE
from rillflow.controller.replicas import SamplerReplica
from rillflow.controller.saved_flight import KeptFlight
from rillflow.roles.sampler import GroupId
from rillflow.workers.backend import RankDied
from rillflow.workers.pending import Pending


class RepeatedFlight(Flight):
    """Groups in flight that repeat decisions.

    Args: see Flight.
    """

    after = -1
    """Finished steps; -1 until their evaluation ends."""
    _kept: KeptFlight | None = None
    _restored = 0
    _rows: Mapping[tuple[GroupId, int], tuple[int, Pending]] = MappingProxyType({})

    def begin(self, replica: SamplerReplica) -> GroupInFlight:
        """See Flight."""
        begun = super().begin(replica)
        if replica.is_recalled:
            self._find_rows(begun)
        return begun

    def _save(self, replica: SamplerReplica, step: int) -> None:
        if not replica.is_recalled:
            super()._save(replica, step)
            return
        position = self.decisions.position
        self.decisions.note("save", replica.number, step)
        if self._kept is not None and self._kept.saves.get(replica.number) == position:
            self._go_on(replica)

    def _begin_stage(self, number: int, groups: Sequence[GroupId]) -> None:
        """Submit groups to a worker, except those that it loses afterwards."""
        lost = self.decisions.lost(number)
        self._unscored |= {(number, each) for each in groups if each in lost}
        there = [each for each in groups if each not in lost]
        if there:
            super()._begin_stage(number, there)

    def _lose_groups(self, number: int) -> None:
        """Note that a worker lost its groups; it computes none of them."""
        self._unscored = {each for each in self._unscored if each[0] != number}
        lost = self.table.died(self._workers[number].name)
        self.decisions.note("lost", number, [list(each) for each in lost])

    def restore(self, kept: KeptFlight) -> None:
        """Take over the groups in flight of a checkpoint; replicas go on with their saved rows.

        Called once, before any other method.
        """
        self._kept = kept
        state, versions = kept.state, kept.state["versions"]
        self.newest = state["newest"]
        self.published = self._restored = state["published"]
        self._parcels = {self.published: self._parcels[0]} if self._parcels else {}
        self._rows = kept.loaded(self._executor)
        for replica in self.replicas:
            replica.is_recalled = True
            replica.version = replica.received = (
                versions[replica.number] if replica.number < len(versions) else min(versions)
            )
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

    def _go_on(self, replica: SamplerReplica) -> None:
        """Let a replica go on with the rows of a checkpoint, and collect its complete groups."""
        replica.go_on(keeps_rows=True)
        there = [each for each in map(self.groups.get, replica.restored) if each is not None]
        self._collect(
            replica, [each for each in there if each.replica is replica and not replica.restored[each.id]]
        )

    def leave(self, reason: str) -> None:
        """Stop replaying; drop rows sampled after this decision."""
        for number in sorted({number for number, _ in self._unscored}):
            for computed in self.table.held_by(self._workers[number].name):
                if (number, computed) not in self._unscored:
                    self._workers[number].give_up(computed)
            self._lose_groups(number)
        recalled = [each for each in self.replicas if each.is_recalled]
        at = self.decisions.position if self.decisions.left_at is None else self.decisions.left_at
        for replica in recalled:
            for group in [each for each in self.groups.values() if each.replica is replica]:
                position, _ = self._rows.get((group.id, group.begun), (at + 1, None))
                if position > at:
                    self.again(group, reason)
            replica.go_on(keeps_rows=False)
        while self.newest < self._restored:
            self.newest += 1
            self.decisions.note("deliver", self.newest)
        for replica in recalled:
            replica.version = replica.received = max(replica.version, self._restored)
            self.decisions.note("receive", replica.number, replica.version)

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
        elif name == LEFT_SCRIPT:
            self.decisions.note(name)
        elif name == "save":
            self._save(self.replicas[given[0]], given[1])
        elif name == "run" and self._may_compute(*given):
            worker, groups = self._workers[given[0]], [(epoch, prompt) for epoch, prompt in given[1]]
            self._compute(given[0], self.table.take(worker.stage, len(groups), worker.name, groups))
        elif name == "gone":
            recovery = self._holders[given[0]].recovery
            recovery.failed = RankDied(f"{recovery.places[0]} was left out, as in the run")
            self._leave_out(given[0])
        elif name == "lost" and self._may_lose(*given):
            self._lose_groups(given[0])
        elif self.is_past([name, *given]):
            self._pass([name, *given])
        else:
            return False
        return True

    def _repeats_receive(self, replica: SamplerReplica, version: int) -> bool:
        """Repeat the transfer of a version to a replica; return False if it has to wait."""
        if replica.version == version or (replica.is_recalled and version <= self._restored):
            replica.version = replica.received = version  # it began with it, or a new process got it again
            self.decisions.note("receive", replica.number, version)
        elif version in self._parcels and not replica.arriving:
            self._receive(replica, version)
        else:
            return False
        if replica.is_recalled and version >= self._restored and self._goes_on_without_rows(replica):
            replica.go_on(keeps_rows=False)
        return True

    def _goes_on_without_rows(self, replica: SamplerReplica) -> bool:
        """Return whether a replica has no saved rows, and an earlier resume dropped those that it had."""
        assert self._kept is not None  # the replica is recalled
        at = self._kept.left_at
        return replica.number not in self._kept.saves and (at is None or self.decisions.position > at)

    def is_past(self, event: Event) -> bool:
        """Return whether a resumed run has what a decision is about: the loop does it no more."""
        limits = {"deliver": self._restored, "beside": self.after}
        return event[0] in limits and int(event[1]) <= limits[event[0]]

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

    def _may_lose(self, number: int, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether a worker has no other groups than those that it lost."""
        held = {*self.table.held_by(self._workers[number].name)}
        return held == {(epoch, prompt) for epoch, prompt in groups}
