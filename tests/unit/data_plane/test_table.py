"""The table: permitted reads over time, in cases by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from rillflow.data_plane.instructions import Begun, Delete, Dropped, Finished, Instruction, Lease, Ready, Room
from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.data_plane.table import Table
from rillflow.errors import StreamError
from tests.unit.data_plane.streams import NUMBER, diamond


def ids(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def lease_of(found: list[Instruction]) -> Lease:
    return next(each for each in found if isinstance(each, Lease))


def run(table: Table, stage: str, count: int, now: float = 0.0) -> list[Instruction]:
    """Take groups and finish them at once; the store clears at once."""
    lease = lease_of(table.take(stage, count, holder=stage, now=now, deadline=now + 1))
    found = table.done(lease.number, lease.ids, now=now)
    for each in found:
        if isinstance(each, Delete):
            table.cleared(each.writer, each.ids)
    return found


def deletes(found: list[Instruction]) -> dict[str, list[int]]:
    return {each.writer: each.ids.tolist() for each in found if isinstance(each, Delete)}


def test_a_group_is_ready_for_a_stage_once_all_it_reads_is_written() -> None:
    table = Table(diamond(), capacity=4)
    begun = table.begin(2, holder="task", now=0.0)[0]
    assert isinstance(begun, Begun) and begun.ids.tolist() == [0, 1]
    assert table.counts()["sample"] == (0, 2, 0, 0) and table.counts()["score"] == (2, 0, 0, 0)
    run(table, "sample", 1)
    assert table.counts()["score"] == (1, 1, 0, 0) and table.counts()["train"] == (2, 0, 0, 0)
    run(table, "score", 2)
    assert table.counts()["train"] == (2, 0, 0, 0)
    run(table, "critic", 2)
    assert table.counts()["train"] == (1, 1, 0, 0)


def test_cells_are_deleted_after_their_last_reader_and_only_then() -> None:
    table = Table(diamond(), capacity=4)
    table.begin(1, holder="task", now=0.0)
    assert deletes(run(table, "sample", 1)) == {}
    assert deletes(run(table, "score", 1)) == {"begin": [0]}
    assert deletes(run(table, "critic", 1)) == {}
    assert deletes(run(table, "train", 1)) == {"sample": [0], "score": [0], "critic": [0]}
    assert table.oldest == table.begun == 1


def test_no_number_is_given_out_before_the_store_has_cleared_its_slot() -> None:
    schema = Schema(columns={"x": NUMBER}, stages=(StageColumns(name="train", reads=("x",)),))
    table = Table(schema, capacity=2)
    table.begin(2, holder="task", now=0.0)
    assert table.begin(1, holder="task", now=0.0) == []
    lease = lease_of(table.take("train", 2, holder="a", now=0.0, deadline=1.0))
    table.done(lease.number, lease.ids, now=0.0)
    assert table.begin(1, holder="task", now=0.0) == []
    assert "the store has not cleared it" in table.waits(None, 1.0)
    assert [type(each) for each in table.cleared("begin", ids(0))] == [Room]
    assert table.cleared("begin", ids(0)) == []
    assert isinstance(table.begin(1, holder="task", now=0.0)[0], Begun)
    assert table.begin(1, holder="task", now=0.0) == []


def test_a_slot_is_free_once_the_cells_of_every_writer_are_cleared() -> None:
    table = Table(diamond(), capacity=1)
    table.begin(1, holder="task", now=0.0)
    for stage in ("sample", "score", "critic", "train"):
        lease = lease_of(table.take(stage, 1, holder="a", now=0.0, deadline=9.0))
        with pytest.raises(StreamError, match="before their last reader has finished"):
            table.cleared("begin" if stage == "sample" else "sample", ids(0))
        table.done(lease.number, lease.ids, now=0.0)
    for writer in ("begin", "sample", "score"):
        assert table.cleared(writer, ids(0)) == []
    assert [type(each) for each in table.cleared("critic", ids(0))] == [Room]
    table.begin(1, holder="task", now=0.0)
    lease = lease_of(table.take("sample", 1, holder="a", now=0.0, deadline=9.0))
    with pytest.raises(StreamError, match="does not hold group 0"):
        table.done(lease.number, ids(0), now=0.0)


def test_the_end_of_a_closed_stream_wakes_whoever_waits_for_it() -> None:
    schema = Schema(columns={"x": NUMBER}, stages=(StageColumns(name="train", reads=("x",)),))
    for ending in ("done", "drop"):
        table = Table(schema, capacity=1)
        table.begin(1, holder="task", now=0.0)
        lease = lease_of(table.take("train", 1, holder="a", now=0.0, deadline=9.0))
        assert [type(each) for each in table.close(0.0)] == [Ready]
        assert table.take("train", 1, holder="b", now=0.0, deadline=9.0) == []
        ended = (
            table.done(lease.number, lease.ids, now=1.0)
            if ending == "done"
            else table.drop(ids(0), "no", 1.0)
        )
        assert Ready in [type(each) for each in ended]
        assert isinstance(table.take("train", 1, holder="b", now=1.0, deadline=9.0)[0], Finished)


def test_a_lease_that_let_its_deadline_pass_gives_its_groups_to_another_and_is_refused() -> None:
    table = Table(diamond(), capacity=4)
    table.begin(2, holder="task", now=0.0)
    slow = lease_of(table.take("sample", 2, holder="slow", now=1.0, deadline=5.0))
    assert table.deadline == 5.0 and table.expire(4.9) == []
    table.done(slow.number, ids(0), now=2.0)
    table.expire(5.0)
    again = lease_of(table.take("sample", 2, holder="quick", now=6.0, deadline=9.0))
    assert again.ids.tolist() == [1]
    with pytest.raises(StreamError) as late:
        table.done(slow.number, ids(1), now=7.0)
    assert late.value.why == (
        "group 1: begun by task at 0 s, taken for sample by slow at 1 s, returned from sample, for slow "
        "passed its deadline at 5 s, taken for sample by quick at 6 s"
    )
    table.done(again.number, ids(1), now=8.0)
    with pytest.raises(StreamError, match="does not hold group 1"):
        table.done(again.number, ids(1), now=8.0)


def test_nobody_writes_into_cells_that_a_lost_holder_may_still_read() -> None:
    table = Table(diamond(), capacity=4)
    table.begin(2, holder="task", now=0.0)
    run(table, "sample", 2)
    table.take("score", 1, holder="lost", now=0.0, deadline=9.0)
    table.died("lost", 1.0)
    found = run(table, "score", 2)
    told = [(each.ids.tolist(), each.is_unread) for each in found if isinstance(each, Delete)]
    assert told == [([1], True), ([0], False)]


def test_a_dropped_group_is_taken_from_everybody_and_dropped_once() -> None:
    table = Table(diamond(), capacity=4)
    table.begin(2, holder="task", now=0.0)
    run(table, "sample", 2)
    lease = lease_of(table.take("critic", 2, holder="a", now=0.0, deadline=9.0))
    found = table.drop(ids(0, 0), "too old", 1.0)
    assert [(each.ids.tolist(), each.reason) for each in found if isinstance(each, Dropped)] == [
        ([0], "too old")
    ]
    assert deletes(found) == {"begin": [0], "sample": [0]}
    with pytest.raises(StreamError, match="dropped: too old at 1 s"):
        table.done(lease.number, lease.ids, now=2.0)
    assert table.drop(ids(0), "again", 2.0) == []
    table.done(lease.number, ids(1), now=2.0)
    with pytest.raises(StreamError, match="there is no group 7"):
        table.drop(ids(7), "never begun", 2.0)


def test_in_order_waits_for_the_first_and_ready_first_does_not() -> None:
    for order, expected in (("in_order", [0]), ("ready_first", [0, 2])):
        table = Table(diamond(score=order), capacity=4)
        table.begin(4, holder="task", now=0.0)
        lease = lease_of(table.take("sample", 3, holder="a", now=0.0, deadline=9.0))
        table.done(lease.number, ids(0, 2), now=0.0)
        found = lease_of(table.take("score", 4, holder="b", now=0.0, deadline=9.0))
        assert found.ids.tolist() == expected


def test_a_taker_gets_as_many_groups_as_its_tokens_allow_and_one_at_least() -> None:
    table = Table(diamond(), capacity=8)
    table.begin(4, holder="task", now=0.0, rows=2, tokens=ids(5, 6, 7, 100))
    taken = [
        lease_of(table.take("sample", 4, holder="a", now=0.0, deadline=9.0, tokens=12)).ids.tolist()
        for _ in range(3)
    ]
    assert taken == [[0, 1], [2], [3]]


def test_a_taker_that_wants_several_waits_for_them_until_no_more_can_come() -> None:
    table = Table(diamond(), capacity=8)
    table.begin(3, holder="task", now=0.0)
    assert table.take("sample", 4, least=4, holder="a", now=0.0, deadline=9.0) == []
    table.close(1.0)
    assert len(lease_of(table.take("sample", 4, least=4, holder="a", now=1.0, deadline=9.0)).ids) == 3
    assert table.take("sample", 4, holder="b", now=1.0, deadline=9.0) == []
    table.expire(9.0)
    run(table, "sample", 3, now=9.0)
    assert isinstance(table.take("sample", 1, holder="b", now=9.0, deadline=9.0)[0], Finished)
    with pytest.raises(StreamError, match="closed"):
        table.begin(1, holder="task", now=9.0)


def test_groups_whose_tokens_are_too_old_are_dropped_whole_with_the_reason() -> None:
    table = Table(diamond(), capacity=8)
    table.begin(3, holder="task", now=0.0)
    for version in (3, 4, 5):
        lease = lease_of(table.take("sample", 1, holder="a", now=0.0, deadline=9.0))
        table.done(lease.number, lease.ids, now=0.0, version=version)
    found = table.take("critic", 3, holder="b", now=1.0, deadline=9.0, least_version=4)
    dropped = [each for each in found if isinstance(each, Dropped)]
    assert [each.reason for each in dropped] == ["critic takes version 4 or newer"]
    assert [each.ids.tolist() for each in dropped] == [[0]] and lease_of(found).ids.tolist() == [1, 2]


def test_whoever_waits_is_told_for_whom_for_what_and_since_when() -> None:
    table = Table(diamond(), capacity=2)
    assert table.waits("train", 3.0) == "train waits for new groups: none has begun for 3 s"
    assert table.waits(None, 3.0) == "2 groups may begin"
    table.begin(2, holder="task", now=4.0)
    assert table.waits("train", 6.0) == (
        "train waits: train lacks tokens of group 0; group 0 is ready for sample: no worker ever took a group"
    )
    run(table, "sample", 2, now=6.0)
    run(table, "score", 1, now=6.0)
    table.take("critic", 1, holder="rank 3", now=7.0, deadline=99.0)
    assert table.waits("train", 9.0) == (
        "train waits: train lacks value of group 0; rank 3 has held group 0 for critic for 2 s"
    )
    assert table.waits("score", 9.0) == "score waits: group 1 is ready for score: no worker took one for 3 s"
    assert table.waits(None, 9.0).startswith(
        "all 2 slots are in use; the oldest: group 0: begun by task at 4 s"
    )
    assert table.waits(None, 9.0).endswith("rank 3 has held group 0 for critic for 2 s")


def test_two_streams_share_nothing() -> None:
    schema = diamond()
    one, other = Table(schema, capacity=4), Table(schema, capacity=4)
    one.begin(3, holder="task", now=0.0)
    run(one, "sample", 2)
    assert other.counts() == dict.fromkeys(("sample", "score", "critic", "train"), (0, 0, 0, 0))


def test_a_batch_out_of_100000_groups_is_scheduled_in_under_a_millisecond() -> None:
    table = Table(diamond(sample="in_order"), capacity=100_000)
    table.begin(100_000, holder="task", now=0.0)
    took = []
    for _ in range(100):
        before = time.thread_time()
        lease = lease_of(table.take("sample", 256, holder="a", now=0.0, deadline=9.0))
        table.done(lease.number, lease.ids, now=0.0)
        took.append(time.thread_time() - before)
    assert sorted(took)[50] < 2e-3, (
        "a median of twice the figure of the benchmark: other work slows the processor too"
    )


@pytest.mark.parametrize(
    ("columns", "stages", "said"),
    [
        ({"x": "float31"}, [("a", ["x"], [])], "did you mean 'float32'"),
        ({"x": "int64"}, [("a", ["y"], [])], "names column 'y'"),
        ({"x": "int64", "y": "int64"}, [("a", ["x"], [])], "'y' is read by no stage"),
        ({"x": "int64"}, [("a", ["x"], []), ("a", ["x"], [])], "are not unique"),
        ({"x": "int64"}, [("begin", ["x"], [])], "are not unique"),
        ({"x": "int64", "y": "int64"}, [("a", ["x"], ["y"]), ("b", ["y"], ["y"])], "written by a and b"),
        ({"x": "int64", "y": "int64"}, [("a", ["x", "y"], ["y"])], "wait for each other"),
        ({"x": "int64"}, [("a", ["x"], ["x"])], "needs columns of its own"),
        ({"../x": "int64"}, [("a", ["../x"], [])], "is not a valid name"),
        ({"x": "int64"}, [("a", [], [])], "reads no column"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(
    columns: dict[str, str], stages: list[tuple[str, list[str], list[str]]], said: str
) -> None:
    with pytest.raises(StreamError, match=said):
        Schema(
            columns={name: ColumnType(dtype=dtype) for name, dtype in columns.items()},
            stages=tuple(
                StageColumns(name=name, reads=tuple(reads), writes=tuple(writes))
                for name, reads, writes in stages
            ),
        )


@pytest.mark.parametrize("count", [0, -1, 9])
def test_more_groups_at_once_than_there_are_slots_are_refused_not_waited_for(count: int) -> None:
    with pytest.raises(StreamError, match=f"begins {count} groups"):
        Table(diamond(), capacity=8).begin(count, holder="task", now=0.0)


def test_a_renewed_lease_ends_at_its_new_deadline_and_numbers_begin_where_told() -> None:
    table = Table(diamond(), capacity=4, first_lease=70)
    table.begin(1, holder="task", now=0.0)
    (lease,) = (
        each for each in table.take("sample", 1, holder="s", now=0.0, deadline=5.0) if isinstance(each, Lease)
    )
    assert lease.number == 70
    table.renew(70, 9.0)
    assert table.expire(5.0) == [] and table.deadline == 9.0
    assert table.expire(9.0) != []
    with pytest.raises(StreamError, match="there is no lease 70"):
        table.renew(70, 20.0)
