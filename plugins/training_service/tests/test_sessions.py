"""Sessions: order, retries, conflicts, silence and gaps, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.errors import DataError
from rillflow.serving.http_body import Declined
from rillflow_training_service.sessions import (
    EARLIER_S,
    HEARTBEAT_S,
    KEPT_S,
    ClientSession,
    Future,
    Model,
    Sessions,
)
from rillflow_training_service.shared_base import Shape


class World:
    """Sessions with one model, a clock, and what was dispatched and released."""

    def __init__(self) -> None:
        self.time, self.dispatched, self.released = 0.0, list[int](), list[str]()
        self.sessions = Sessions(self.released.append, lambda: self.time)
        self.session: ClientSession = self.sessions.open("s", {})
        self.model = Model(
            name="s:train:0", session=self.session, base_model="b", shape=Shape(rank=1), seed=0, metadata={}
        )
        self.sessions.add_model(self.model)

    def ask(self, seq: int, body: bytes = b"") -> Future:
        def dispatch(future: Future) -> None:
            self.dispatched.append(seq)
            future.finish({"seq": seq})

        return self.sessions.admit_in_order(self.model, seq, body or str(seq).encode(), dispatch)

    def run(self, test: Callable[[], None]) -> None:
        async def inside() -> None:
            test()

        asyncio.run(inside())


def told(future: Future) -> str:
    assert future.done.is_set()
    return str(json.loads(future.body)["error"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 8), max_size=5))
def test_requests_run_in_order_and_once(arrival: list[int], again: list[int]) -> None:
    world = World()

    def test() -> None:
        futures = {seq: world.ask(seq) for seq in arrival}
        assert all(world.ask(seq) is futures[seq] for seq in again)
        assert world.dispatched == sorted(arrival)

    world.run(test)


def test_two_requests_with_one_number() -> None:
    world = World()

    def test() -> None:
        first, second = world.ask(1, b"one"), world.ask(1, b"other")
        assert first is not second and world.dispatched == [1]
        assert "two requests s:train:0:1" in told(second)
        assert world.ask(1, b"other") is second

    world.run(test)


def test_a_gap_ends_in_an_error_and_the_missing_request_may_still_come() -> None:
    world = World()

    def test() -> None:
        third = world.ask(3)
        world.time = EARLIER_S + 1
        world.sessions.sweep()
        assert "waited 60 s for request 1" in told(third)
        world.ask(1), world.ask(2), world.ask(4)
        assert world.dispatched == [1, 2, 4]
        assert "two requests" in told(world.ask(3, b"another"))

    world.run(test)


def test_silence_ends_a_session_and_requests_keep_it_alive() -> None:
    world = World()

    def test() -> None:
        for _ in range(3):
            world.time += HEARTBEAT_S - 1
            world.ask(world.model.next_seq)
            world.sessions.model("s:train:0")
            world.sessions.sweep()
        assert not world.session.ended and not world.released
        waits = world.ask(9)
        world.time += HEARTBEAT_S + 1
        world.sessions.sweep()
        assert world.released == ["s:train:0"]
        assert "no heartbeat for 120 s; its checkpoints remain" in told(waits)
        with pytest.raises(Declined) as gone:
            world.sessions.hear("s")
        assert gone.value.status == 410
        with pytest.raises(DataError, match="no heartbeat"):
            world.sessions.model("s:train:0")

    world.run(test)


def test_delivered_results_are_dropped_and_an_ended_session_is_forgotten() -> None:
    world = World()

    def test() -> None:
        future = world.ask(1)
        assert world.sessions.future("s:train:0:1") is future
        world.sessions.delivered(future)
        world.sessions.end(world.session, "done")
        world.time += KEPT_S + 1
        world.sessions.sweep()
        assert "s" not in world.sessions.all
        with pytest.raises(Declined, match="there is no request"):
            world.sessions.future("s:train:0:1")

    world.run(test)


def test_an_unloaded_model_is_unknown() -> None:
    world = World()

    def test() -> None:
        waits = world.ask(2)
        world.sessions.unload("s:train:0")
        assert "the model was unloaded" in told(waits) and world.released == ["s:train:0"]
        with pytest.raises(DataError, match="no model 's:train:0'"):
            world.sessions.model("s:train:0")

    world.run(test)
