"""Fragment queue: newest first, bounded, each use once; and the worker that computes fragments anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import ConfigError
from rillflow_classic.fragment import Fragment
from rillflow_classic.streams.memory import MemoryTransport
from rillflow_classic.streams.stream import Received, StreamSpec
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.buffer_worker import BufferWorker, FragmentQueue
from rillflow_classic.workers.recording import ArraySpec, layout_of

sys.path.insert(0, str(Path(__file__).parent))
from counting import AffinePolicy, CountingEnvironment


class Arriving:
    """Makes fragments with numbers, and notes their release."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def make(self, number: int, version: int) -> Received:
        flags = np.zeros((1, 1), np.bool_)
        fragment = Fragment(
            observations=np.zeros((2, 1)),
            actions=np.zeros((1, 1)),
            rewards=np.zeros((1, 1)),
            terminated=flags,
            truncated=flags,
            valid=~flags,
            versions=np.array([version]),
        )
        return Received(
            actor=0,
            lane=0,
            number=number,
            fragments={"policy": fragment},
            release=lambda: self.released.append(number),
        )


def test_the_newest_come_first_and_the_oldest_are_replaced() -> None:
    arriving, queue = Arriving(), FragmentQueue(3)
    for number in range(5):
        queue.put(arriving.make(number, number))
    assert arriving.released == [0, 1]
    taken = queue.take(2, 9)
    assert taken is not None
    assert [each.number for each in taken.items] == [4, 3]
    assert queue.take(2, 9) is None
    queue.done(taken)
    assert sorted(arriving.released) == [0, 1, 3, 4]
    assert queue.table.dropped == {"replaced by a newer one": 2}


def test_fragments_that_are_too_old_are_dropped_with_the_reason() -> None:
    arriving, queue = Arriving(), FragmentQueue(8, max_lag=2)
    for number in range(4):
        queue.put(arriving.make(number, number))
    taken = queue.take(2, 5)
    assert taken is None, "only version 3 is new enough"
    assert arriving.released == [0, 1, 2]
    (reason,) = queue.table.dropped
    assert "version 3 or newer" in reason


def test_each_fragment_is_used_as_often_as_asked() -> None:
    arriving, queue = Arriving(), FragmentQueue(4, reuses=3)
    queue.put(arriving.make(0, 0))
    for use in range(3):
        taken = queue.take(1, 0)
        assert taken is not None
        assert arriving.released == []
        queue.done(taken)
        assert (arriving.released == [0]) == (use == 2)
    assert queue.take(1, 0) is None


def test_a_dead_taker_loses_its_fragments() -> None:
    now = [0.0]
    arriving, queue = Arriving(), FragmentQueue(4, clock=lambda: now[0])
    queue.put(arriving.make(0, 0))
    assert queue.take(1, 0, "rank 0") is not None
    assert queue.take(1, 0, "rank 1") is None
    now[0] += 10_000
    assert queue.take(1, 0, "rank 1") is not None


def test_an_empty_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match="a queue of 0 fragments"):
        FragmentQueue(0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_nothing_is_lost_or_used_too_often(
    history: list[tuple[bool, int]], capacity: int, reuses: int, max_lag: int | None
) -> None:
    arriving, queue = Arriving(), FragmentQueue(capacity, reuses=reuses, max_lag=max_lag)
    put = version = 0
    uses: dict[int, int] = {}
    for is_put, count in history:
        if is_put:
            queue.put(arriving.make(put, version))
            put += 1
            continue
        taken = queue.take(count, version)
        if taken is not None:
            version += 1
            numbers = [each.number for each in taken.items]
            assert numbers == sorted(numbers, reverse=True)
            assert not set(numbers) & set(arriving.released)
            for number in numbers:
                uses[number] = uses.get(number, 0) + 1
            queue.done(taken)
        assert len(queue) <= capacity
    assert all(count <= reuses for count in uses.values())
    assert len(arriving.released) == len(set(arriving.released))
    assert put == len(queue) + len(arriving.released), "each is held, or was released once"
    queue.clear("the end")
    assert sorted(arriving.released) == list(range(put))


def test_a_buffer_worker_passes_fragments_on_with_what_it_computed() -> None:
    layouts = {"policy": layout_of(AffinePolicy(), CountingEnvironment(3), 3)}
    weights = {"policy": {"bias": ArraySpec(shape=(1,), dtype="int64")}}
    spec = StreamSpec(actors=2, steps=4, layouts=layouts, weights=weights)
    first = MemoryTransport(spec, is_shared=False)
    first.writer().publish("policy", 0, {"bias": np.array([0])})
    second = MemoryTransport(StreamSpec(actors=1, steps=4, layouts=layouts), is_shared=False)

    def reanalyse(fragments: Mapping[str, Fragment]) -> Mapping[str, Fragment]:
        fragment = fragments["policy"]
        return {"policy": replace(fragment, outputs={"values": fragment.outputs["values"] + 100})}

    actors = [
        Actor(
            [CountingEnvironment(3)],
            {"policy": AffinePolicy()},
            4,
            index=index,
            sink=first.sink(index),
            parameters=first.reader(),
        )
        for index in range(2)
    ]
    worker = BufferWorker(first.source(), second.sink(0), reanalyse, first.reader())
    source, seen = second.source(), []
    for _ in range(60):
        for actor in actors:
            actor.poll(0.0)
        worker.poll(0.0)
        for received in source.take(0.0):
            fragment = received.fragments["policy"]
            expected = fragment.observations[:-1, :, 0] * 0.5 + 100
            assert np.array_equal(fragment.outputs["values"], expected)
            seen.append((received.number, len(fragment.episodes)))
            received.release()
    assert [number for number, _ in seen] == list(range(len(seen)))
    assert len(seen) > 10
    first.close()
    second.close()
