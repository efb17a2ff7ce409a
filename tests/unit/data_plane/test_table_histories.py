"""The table under random histories, compared with a model in plain sets."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rillflow.data_plane.instructions import Begun, Delete, Dropped, Instruction, Lease
from rillflow.data_plane.table import Table
from rillflow.errors import StreamError
from tests.unit.data_plane.streams import diamond

CAPACITY = 5
STAGES = ("sample", "score", "critic", "train")
READS = {
    "begin": {"sample", "score"},
    "sample": {"score", "critic", "train"},
    "score": {"train"},
    "critic": {"train"},
}
"""Readers of each writer's cells."""
NEEDS = {"sample": {"begin"}, "score": {"begin", "sample"}, "critic": {"sample"}}
NEEDS["train"] = {"sample", "score", "critic"}


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(diamond(train="in_order", critic="in_order"), capacity=CAPACITY)
        self.now = 0.0
        self.finished: dict[str, set[int]] = {stage: set() for stage in STAGES}
        self.out: dict[str, dict[int, int]] = {stage: {} for stage in STAGES}
        self.leases: list[Lease] = []
        self.written: dict[str, set[int]] = {writer: set() for writer in ("begin", *STAGES)}
        self.deleted: set[tuple[str, int]] = set()
        self.uncleared: list[tuple[str, int]] = []
        self.dropped: set[int] = set()
        self.suspect: set[int] = set()

    def obey(self, found: list[Instruction]) -> None:
        for each in found:
            if isinstance(each, Dropped):
                self.dropped |= set(each.ids.tolist())
                for out in self.out.values():
                    self.suspect |= set(out) & set(each.ids.tolist())
                    for group in each.ids.tolist():
                        out.pop(group, None)
            elif isinstance(each, Delete):
                for group in each.ids.tolist():
                    assert group in self.written[each.writer]
                    assert (each.writer, group) not in self.deleted
                    readers = READS[each.writer]
                    assert group in self.dropped or all(group in self.finished[stage] for stage in readers)
                    assert each.is_unread == (group not in self.suspect)
                    self.deleted.add((each.writer, group))
                    self.uncleared.append((each.writer, group))

    @rule(count=st.integers(1, CAPACITY))
    def begin(self, count: int) -> None:
        found = self.table.begin(count, holder="task", now=self.now)
        for each in found:
            if isinstance(each, Begun):
                assert each.ids.tolist() == [*range(self.table.begun - count, self.table.begun)]
                for group in each.ids.tolist():
                    before = group - CAPACITY
                    stored = {writer for writer in self.written if before in self.written[writer]}
                    assert all((writer, before) in self.deleted for writer in stored)
                    assert not [group for _, group in self.uncleared if group == before]
                self.written["begin"] |= set(each.ids.tolist())
        self.obey(found)

    @rule(
        stage=st.sampled_from(STAGES), count=st.integers(1, 4), least=st.integers(1, 2), late=st.floats(1, 9)
    )
    def take(self, stage: str, count: int, least: int, late: float) -> None:
        found = self.table.take(
            stage, max(count, least), least=least, holder=f"h{count}", now=self.now, deadline=self.now + late
        )
        self.obey(found)
        for lease in found:
            if isinstance(lease, Lease):
                self.leases.append(lease)
                assert least <= len(lease.ids) <= max(count, least)
                for group in lease.ids.tolist():
                    assert group not in self.out[stage] and group not in self.finished[stage]
                    assert group not in self.dropped
                    assert all(group in self.written[writer] for writer in NEEDS[stage])
                    self.out[stage][group] = lease.number
                    if stage in ("train", "critic"):
                        earlier = set(range(group)) - self.dropped
                        assert earlier <= self.finished[stage] | self.out[stage].keys()

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        part = np.array(data.draw(st.lists(st.sampled_from(lease.ids.tolist()), min_size=1, max_size=4)))
        mine = all(self.out[lease.stage].get(group) == lease.number for group in part.tolist())
        if not mine or len(set(part.tolist())) < len(part):
            try:
                self.table.done(lease.number, part, now=self.now)
            except StreamError:
                return
            raise AssertionError("accepted twice")
        for group in part.tolist():
            del self.out[lease.stage][group]
            self.finished[lease.stage].add(group)
            self.written[lease.stage].add(group)
        self.obey(self.table.done(lease.number, part, now=self.now))

    def lose(self, lease: Lease) -> None:
        out = self.out[lease.stage]
        for group in [group for group, number in out.items() if number == lease.number]:
            del out[group]
            self.suspect.add(group)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.leases:
            if lease.deadline <= self.now:
                self.lose(lease)
        self.obey(self.table.expire(self.now))

    @rule(holder=st.sampled_from(["h1", "h2", "h3"]))
    def die(self, holder: str) -> None:
        for lease in self.leases:
            if lease.holder == holder:
                self.lose(lease)
        self.obey(self.table.died(holder, self.now))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.table.begun:
            groups = data.draw(st.lists(st.integers(0, self.table.begun - 1), max_size=2))
            self.obey(self.table.drop(np.array(groups, dtype=np.int64), "drawn", self.now))

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        if self.uncleared:
            writer, group = data.draw(st.sampled_from(self.uncleared))
            for _ in range(2):
                self.obey(self.table.cleared(writer, np.array([group])))
            self.uncleared.remove((writer, group))

    @invariant()
    def the_table_is_bounded(self) -> None:
        assert self.table.begun - self.table.oldest <= CAPACITY

    def teardown(self) -> None:
        """Finish the history: all stages continue, and each finishes every undropped group exactly once."""
        self.table.close(self.now)
        for _ in range(8 * CAPACITY):
            self.time_passes(10.0)
            for stage in STAGES:
                self.take(stage, 4, 1, 5.0)
                for lease in self.leases:
                    groups = [
                        group for group, number in self.out[lease.stage].items() if number == lease.number
                    ]
                    for group in groups:
                        del self.out[lease.stage][group]
                        self.finished[lease.stage].add(group)
                        self.written[lease.stage].add(group)
                    if groups:
                        self.obey(self.table.done(lease.number, np.array(groups), now=self.now))
            while self.uncleared:
                writer, group = self.uncleared.pop()
                self.table.cleared(writer, np.array([group]))
        for stage in STAGES:
            assert self.finished[stage] | self.dropped == set(range(self.table.begun))
        assert self.table.oldest == self.table.begun
        stored = {(writer, group) for writer, groups in self.written.items() for group in groups}
        assert {(writer, group) for writer, group in stored if writer != "train"} == self.deleted


def test_exactly_once_whoever_dies() -> None:
    run_state_machine_as_test(
        History, settings=settings(max_examples=30, stateful_step_count=40, deadline=None)
    )
