"""Fragment queue: newest first, bounded, each use once; and the worker that computes fragments anew."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import ConfigError
from rillflow_classic.fragment import FinishedEpisode, Fragment
from rillflow_classic.streams.layout import layout_of, record_of
from rillflow_classic.streams.sockets import open_streams
from rillflow_classic.streams.streams import Received, StreamSpec
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.buffer_worker import BufferWorker
from rillflow_classic.workers.trainer_worker import FragmentQueue

sys.path.insert(0, str(Path(__file__).parent))
from counting import AffinePolicy, CountingEnvironment


class Arriving:
    """Makes fragments with numbers, and notes their release."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def make(self, number: int, version: int) -> Received:
        flags = np.zeros((1, 1), np.bool_)
        fragment = Fragment(
            observations=np.full((2, 1), number),
            actions=np.zeros((1, 1)),
            rewards=np.zeros((1, 1)),
            terminated=flags,
            truncated=flags,
            valid=~flags,
            versions=np.array([version]),
            episodes=[FinishedEpisode(total_reward=1.0, length=1)],
        )
        return Received(
            actor=0,
            lane=0,
            number=number,
            fragments={"policy": fragment},
            release=lambda: self.released.append(number),
        )


def numbers(rollout: Any) -> list[int]:
    """Return the numbers of the fragments in a batch."""
    found: list[int] = rollout.observations[0].tolist()
    return found


def test_the_newest_come_first_and_the_oldest_are_replaced() -> None:
    arriving, queue = Arriving(), FragmentQueue(4, batch=2)
    for number in range(5):
        queue.put(arriving.make(number, number))
    assert arriving.released == [0]
    assert numbers(queue.take(9)) == [4, 3]
    assert numbers(queue.take(9)) == [2, 1]
    assert sorted(arriving.released) == [0, 1, 2, 3, 4]
    assert queue.dropped == 1


def test_fragments_that_are_too_old_are_dropped() -> None:
    arriving, queue = Arriving(), FragmentQueue(8, batch=2, max_lag=2)
    for number in range(4):
        queue.put(arriving.make(number, number))
    assert queue.take(5) is None, "only version 3 is new enough"
    assert sorted(arriving.released) == [0, 1, 2] and queue.dropped == 3


def test_each_fragment_is_used_as_often_as_asked_and_its_episodes_count_once() -> None:
    arriving, queue = Arriving(), FragmentQueue(4, reuses=3)
    queue.put(arriving.make(0, 0))
    episodes = []
    for _ in range(3):
        rollout = queue.take(0)
        assert numbers(rollout) == [0]
        episodes.append(len(rollout.episodes))
        assert arriving.released == ([0] if len(episodes) == 3 else []), "held for the uses that follow"
    assert episodes == [1, 0, 0]
    assert queue.take(0) is None


def test_fragments_that_were_not_used_come_first() -> None:
    arriving, queue = Arriving(), FragmentQueue(4, batch=1, reuses=2)
    queue.put(arriving.make(0, 0))
    assert numbers(queue.take(0)) == [0]
    queue.put(arriving.make(1, 0))
    assert [numbers(queue.take(0)) for _ in range(3)] == [[1], [1], [0]]


@pytest.mark.parametrize(("capacity", "batch"), [(0, 1), (2, 3)])
def test_a_queue_that_holds_no_batch_is_refused(capacity: int, batch: int) -> None:
    with pytest.raises(ConfigError, match=f"workers.batch is {batch}, and the stream holds {capacity} frag"):
        FragmentQueue(capacity, batch=batch)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_nothing_is_lost_or_used_too_often(
    history: list[tuple[bool, int]], batch: int, more: int, reuses: int, max_lag: int | None
) -> None:
    arriving = Arriving()
    queue = FragmentQueue(batch + more, batch=batch, reuses=reuses, max_lag=max_lag)
    put = version = 0
    uses: dict[int, int] = {}
    for is_put, count in history:
        if is_put:
            queue.put(arriving.make(put, version))
            put += 1
            continue
        rollout = queue.take(version)
        if rollout is not None:
            version += count
            for number in numbers(rollout):
                uses[number] = uses.get(number, 0) + 1
        assert len(queue) <= batch + more
    assert all(count <= reuses for count in uses.values())
    assert len(arriving.released) == len(set(arriving.released))
    assert put == len(queue) + len(arriving.released), "each is held, or was released once"
    queue.clear()
    assert sorted(arriving.released) == list(range(put))


@pytest.mark.parametrize("kind", ["shared_memory", "tcp"])
def test_a_buffer_worker_passes_fragments_on_with_what_it_computed(kind: str) -> None:
    layouts = {"policy": layout_of(AffinePolicy(), CountingEnvironment(3), 3)}
    weights = {"policy": record_of({"bias": np.zeros(1, np.int64)})}
    spec = StreamSpec(actors=2, steps=4, layouts=layouts, weights=weights, buffers=2)
    streams = open_streams(kind, spec)
    streams.publish("policy", 0, {"bias": np.array([100])})
    streams.control(is_stopped=False, round_=-1)

    def reanalyse(learner: Any, fragment: Fragment) -> dict[str, Any]:
        return {"values": fragment.outputs["values"] + learner.policy.bias}

    def worker(index: int) -> BufferWorker:
        learner: Any = SimpleNamespace(policy=AffinePolicy())
        return BufferWorker({"policy": learner}, streams.end("buffer", index), reanalyse)

    actors = [
        Actor(
            [CountingEnvironment(3)], {"policy": AffinePolicy()}, 4, index=i, streams=streams.end("actor", i)
        )
        for i in range(2)
    ]
    workers, seen = [worker(0), worker(1)], list[tuple[int, int]]()
    deadline, is_replaced = time.monotonic() + 20, False
    while len(seen) < 30 and time.monotonic() < deadline:
        for each in [*actors, *workers[int(not is_replaced and len(seen) > 10) :]]:
            each.poll(0.0)
        if not is_replaced and len(seen) > 10:  # a killed worker leaves its fragments to the next one
            for actor in actors * 9:
                actor.poll(0.0)
            time.sleep(0.1)
            workers[0], is_replaced = worker(0), True
        for received in streams.take(0.0):
            fragment = received.fragments["policy"]
            expected = fragment.observations[:-1, :, 0] * 0.5 + 100
            assert np.array_equal(fragment.outputs["values"], expected), "computed anew once"
            seen.append((received.actor, received.number))
            received.release()
    for actor in (0, 1):
        own = [number for index, number in seen if index == actor]
        assert own == list(range(len(own))) and len(own) > 8
    streams.close()
