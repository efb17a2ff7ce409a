"""Streams: the same laws on every transport, and the shapes of what passes."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow_classic.streams.layout import layout_of, record_of
from rillflow_classic.streams.sockets import SocketHub, message_head, open_streams
from rillflow_classic.streams.streams import RETRY_S, Received, Streams, StreamSpec
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.policy_worker import PolicyWorker

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))
from counting import AffinePolicy, CountingEnvironment

STEPS, SLOTS = 4, 3
BIAS = record_of({"bias": np.zeros(1, np.int64)})
FREE = -1
"""A round in which actors begin as many fragments as there is room for."""


def spec_of(*, workers: int = 0, ring: int = 1, actors: int = 1, is_recurrent: bool = False) -> StreamSpec:
    policy = AffinePolicy(is_recurrent=is_recurrent)
    return StreamSpec(
        actors=actors,
        ring=ring,
        steps=STEPS,
        layouts={"policy": layout_of(policy, CountingEnvironment(SLOTS), SLOTS)},
        weights={"policy": BIAS},
        workers=workers,
    )


def made(kind: str, spec: StreamSpec, round_: int = FREE) -> Streams:
    streams = open_streams(kind, spec)
    streams.control(is_stopped=False, round_=round_)
    return streams


def run(kind: str, actor: Actor, turns: int = 40) -> None:
    """Let an actor do what it can; messages over TCP need time."""
    deadline = time.monotonic() + 0.5
    while kind == "tcp" and time.monotonic() < deadline:
        actor.poll(0.01)
        time.sleep(0.01)
    for _ in range(turns):
        actor.poll(0.0)


@pytest.fixture(params=["shared_memory", "tcp"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def taken(source: Streams, count: int) -> list[Received]:
    """Take fragments until there are some, and no more."""
    found: list[Received] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += source.take(0.1)
    return [*found, *source.take(0.05)]


def actor_of(transport: Streams, index: int = 0, *, has_policy: bool = True, length: int = 4) -> Actor:
    ring = [CountingEnvironment(SLOTS, length=length) for _ in range(transport.spec.ring)]
    return Actor(
        ring,
        {"policy": AffinePolicy()} if has_policy else {},
        STEPS,
        index=index,
        streams=transport.end("actor", index),
    )


def weights(bias: int) -> dict[str, np.ndarray]:
    return {"bias": np.array([bias])}


def test_fragments_by_stream_equal_those_by_calls(kind: str) -> None:
    transport = made(kind, spec_of())
    transport.publish("policy", 3, weights(2))
    streamed, called = (
        actor_of(transport),
        Actor([CountingEnvironment(SLOTS)], {"policy": AffinePolicy()}, STEPS),
    )
    called.load(3, weights(2))
    source = transport
    received: list[Received] = []
    for number in range(6):
        while not received:
            streamed.poll(0.0)
            received = source.take(0.0)
        expected, first = called.sample(), received.pop(0)
        found = first.fragments["policy"]
        assert first.number == number
        for name in ("observations", "actions", "rewards", "terminated", "truncated", "valid", "versions"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert found.episodes == tuple(expected.episodes)
        assert np.array_equal(found.outputs["values"], expected.outputs["values"])
        first.release()
    transport.close()


def test_a_full_stream_stops_the_actor_until_a_fragment_is_released(kind: str) -> None:
    transport = made(kind, spec_of())
    transport.publish("policy", 0, weights(0))
    actor, source = actor_of(transport), transport
    run(kind, actor)
    held = taken(source, 2)
    assert [each.number for each in held] == [0, 1], "depth 2"
    assert source.take(0.0) == []
    kept = held[0].fragments["policy"].observations.copy()
    run(kind, actor)
    assert np.array_equal(held[0].fragments["policy"].observations, kept), "nobody overwrites what is read"
    held[1].release()
    held[1].release()
    run(kind, actor)
    assert [each.number for each in taken(source, 1)] == [2]
    transport.close()


def test_an_actor_waits_for_its_first_weights_and_takes_the_newest(kind: str) -> None:
    transport = made(kind, spec_of())
    actor, source, writer = actor_of(transport), transport, transport
    assert actor.poll(0.0).rows == 0
    for version in (1, 5, 9):
        writer.publish("policy", version, weights(version))
    run(kind, actor, STEPS)
    seen: list[int] = []
    for _ in range(1 if kind != "tcp" else 50):  # a message of an older version may be under way
        (received,) = taken(source, 1)[:1]
        fragment = received.fragments["policy"]
        bias = fragment.actions - fragment.observations[:-1, :, 0]
        assert np.array_equal(bias, np.broadcast_to(fragment.versions[:, None], bias.shape))
        seen += fragment.versions.tolist()
        received.release()
        if seen[-1] == 9:
            break
        run(kind, actor, STEPS)
    assert seen[-1] == 9
    assert seen == sorted(seen)
    transport.close()


def test_a_lane_begins_one_fragment_in_each_round(kind: str) -> None:
    transport = writer = source = made(kind, spec_of(), round_=1)
    writer.publish("policy", 0, weights(0))
    actor = actor_of(transport)
    run(kind, actor)
    first = taken(source, 1)
    assert source.take(0.0) == [], "a lane begins one fragment in a round"
    writer.control(is_stopped=True, round_=2)
    actor.poll(60.0)
    assert source.take(0.0) == []
    writer.control(is_stopped=False, round_=2)
    run(kind, actor)
    assert [each.number for each in (*first, *taken(source, 1))] == [0, 1]
    transport.close()


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_policy_worker_gives_what_the_policy_gives(kind: str, is_recurrent: bool) -> None:
    spec = spec_of(workers=1, ring=2, is_recurrent=is_recurrent)
    transport = made(kind, spec)
    transport.publish("policy", 4, weights(1))
    actor, source = actor_of(transport, has_policy=False), transport
    policy = AffinePolicy(is_recurrent=is_recurrent)
    worker = PolicyWorker({"policy": policy}, transport.end("worker", 0))
    received = []
    deadline = time.monotonic() + 20
    while len(received) < 12 and time.monotonic() < deadline:
        actor.poll(0.0)
        worker.poll(0.0)
        for each in source.take(0.0):
            fragment = each.fragments["policy"]
            assert np.array_equal(fragment.actions, fragment.observations[:-1, :, 0] + 1)
            assert (fragment.versions == 4).all()
            if is_recurrent:
                assert fragment.state is not None
                assert np.array_equal(fragment.outputs["calls"], fragment.observations[:-1, :, 0])
            received.append((each.lane, each.number))
            each.release()
    assert {lane for lane, _ in received} == {0, 1}
    for lane in (0, 1):
        numbers = [number for which, number in received if which == lane]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 3
    assert max(policy.batches) == 2 * SLOTS, "both lanes' requests are one batch"
    transport.close()


def test_a_request_goes_to_another_worker_and_late_answers_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("rillflow_classic.streams.streams.time.monotonic", lambda: now[0])
    transport = made("shared_memory", spec_of(workers=2))
    client = transport.end("actor", 0)
    servers = [transport.end("worker", index) for index in range(2)]
    policy = AffinePolicy()
    observations = np.arange(9, dtype=np.float32).reshape(3, 3)
    client.post("policy", 0, observations, None)
    late = servers[0].requests("policy")
    assert late is not None
    assert servers[1].requests("policy") is None
    assert client.actions("policy", 0) is None
    assert servers[1].requests("policy") is None, "the first worker still has time"
    now[0] += RETRY_S + 0.1
    assert client.actions("policy", 0) is None
    again = servers[1].requests("policy")
    assert again is not None
    assert np.array_equal(again.observations, observations)
    servers[1].answer("policy", again, policy.act(again.observations), 8)
    answer = client.actions("policy", 0)
    assert answer is not None
    assert answer[1] == 8
    client.post("policy", 0, observations + 1, None)
    servers[0].answer("policy", late, policy.act(late.observations), 7)
    assert client.actions("policy", 0) is None, "an answer to the last request is not one to this request"
    follow = servers[1].requests("policy")
    assert follow is not None, "the lane stays with the worker that answers"
    servers[1].answer("policy", follow, policy.act(follow.observations), 9)
    answer = client.actions("policy", 0)
    assert answer is not None
    assert np.array_equal(answer[0].actions, observations[:, 0] + 1)
    transport.close()


def test_a_slow_worker_answers_although_the_next_one_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a request would wait for ever if every batch took longer than RETRY_S."""
    now = [0.0]
    monkeypatch.setattr("rillflow_classic.streams.streams.time.monotonic", lambda: now[0])
    transport = made("shared_memory", spec_of(workers=3))
    client, slow = transport.end("actor", 0), transport.end("worker", 0)
    observations = np.arange(9, dtype=np.float32).reshape(3, 3)
    client.post("policy", 0, observations, None)
    requests = slow.requests("policy")
    assert requests is not None
    now[0] += RETRY_S + 0.1
    assert client.actions("policy", 0) is None
    slow.answer("policy", requests, AffinePolicy().act(requests.observations), 5)
    answer = client.actions("policy", 0)
    assert answer is not None
    assert answer[1] == 5
    transport.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_delivers_each_fragment_once_and_in_order(data: st.DataObject) -> None:
    spec = spec_of(actors=2, ring=2)
    transport = writer = source = made("shared_memory", spec)
    writer.publish("policy", 0, weights(0))
    actors = [actor_of(transport, index) for index in range(2)]
    held: list[Received] = []
    last: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
    versions: dict[tuple[int, int], int] = {}
    moves = st.sampled_from(["poll 0", "poll 1", "take", "release", "publish", "replace 0"])
    for step, move in enumerate(data.draw(st.lists(moves, max_size=120))):
        match move.split():
            case ["poll", index]:
                actors[int(index)].poll(0.0)
            case ["take"]:
                for each in source.take(0.0):
                    fragment, key = each.fragments["policy"], (each.actor, each.lane)
                    number, observations = last.get(key, (-1, fragment.observations[0]))
                    assert each.number == number + 1
                    assert np.array_equal(fragment.observations[0], observations) or each.actor == 0
                    assert (np.diff(fragment.versions) >= 0).all()
                    assert fragment.versions[0] >= versions.get(key, 0)
                    versions[key] = int(fragment.versions[-1])
                    last[key] = each.number, fragment.observations[-1].copy()
                    held.append(each)
                assert len(held) <= spec.lanes * spec.depth
            case ["release"] if held:
                held.pop(data.draw(st.integers(0, len(held) - 1))).release()
            case ["publish"]:
                writer.publish("policy", step + 1, weights(0))
            case ["replace", index]:  # a killed actor's unfinished fragments are lost, and nothing else
                actors[int(index)] = actor_of(transport, int(index))
    transport.close()


def test_closed_streams_leave_no_descriptor_and_no_file() -> None:
    def left() -> tuple[int, set[str]]:
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()]), {each.name for each in Path("/dev/shm").iterdir()}

    made("shared_memory", spec_of(workers=2)).close()
    before = left()
    for _ in range(5):
        transport = made("shared_memory", spec_of(workers=2))
        other = pickle.loads(pickle.dumps(transport))  # noqa: S301  as a backend does
        other.end("actor", 0)
        other.close()
        transport.close()
        del transport, other
    after = left()
    assert after[0] <= before[0]
    assert not {name for name in after[1] - before[1] if "rillflow" in name}


def test_a_message_without_the_token_or_of_other_sizes_is_dropped() -> None:
    transport = made("tcp", spec_of())
    assert isinstance(transport, SocketHub)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(transport.address)
    rows = [(table, 0) for table in transport.spec.sample_tables]
    frames = [bytes(transport.spec.tables[table][0].itemsize) for table, _ in rows]
    mark = np.array([(1, 1, FREE)], transport.spec.tables["marks"][0]).tobytes()
    said = {"from": "actor/0", "to": "trainer", "rows": rows}
    good = [message_head(transport.token, said), *frames[:-1], mark]
    stranger.send_multipart(good)  # nobody of this name has joined
    stranger.send_multipart([message_head(transport.token, {**said, "rows": [], "joins": ""})])
    stranger.send_multipart([message_head(bytes(16), said), *good[1:]])
    stranger.send_multipart([*good[:1], *good[2:]])
    stranger.send_multipart([b"short"])
    time.sleep(0.3)
    assert transport.take(0.1) == []
    stranger.send_multipart(good)
    assert len(taken(transport, 1)) == 1
    stranger.close(linger=0)
    transport.close()


def test_weights_are_never_torn(kind: str) -> None:
    spec = StreamSpec(
        actors=1,
        steps=STEPS,
        workers=1,
        layouts=spec_of().layouts,
        weights={"policy": record_of({"a": np.zeros(50_000, np.float32), "b": np.zeros(1, np.int64)})},
    )
    transport = made(kind, spec)
    writer, reader = transport, transport.end("worker", 0)
    is_over = threading.Event()

    def write() -> None:
        for version in range(1, 400):
            writer.publish(
                "policy", version, {"a": np.full(50_000, version, np.float32), "b": np.array([version])}
            )
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    version, seen = 0, 0
    while not is_over.is_set() or version < 399:
        reader.look()
        newest = reader.newest("policy", version)
        if newest is not None:
            assert newest[0] > version
            version, seen = newest[0], seen + 1
            assert (newest[1]["a"] == version).all()
            assert newest[1]["b"][0] == version
    thread.join()
    assert seen
    transport.close()


def test_a_waiting_reader_wakes_when_a_fragment_comes(kind: str) -> None:
    transport = made(kind, spec_of())
    transport.publish("policy", 0, weights(0))
    actor, source = actor_of(transport), transport
    thread = threading.Thread(target=lambda: (time.sleep(0.1), [actor.poll(0.0) for _ in range(STEPS)]))
    thread.start()
    began = time.monotonic()
    assert source.take(30.0)
    assert time.monotonic() - began < 20
    thread.join()
    transport.close()
