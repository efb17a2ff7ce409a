"""Systems: the same plan by calls and by streams, in this process and in others, also when workers die."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow.records.metrics import Metrics, Sum
from rillflow.workers.backend import Backend, Pool, Site
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow_classic.fragment import Fragment
from rillflow_classic.streams.layout import layout_of, record_of
from rillflow_classic.streams.sockets import open_streams
from rillflow_classic.streams.streams import Streams, StreamSpec
from rillflow_classic.system import CallSystem, StreamSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.policy_worker import PolicyWorker

sys.path.insert(0, str(Path(__file__).parent))
from counting import AffinePolicy, CountingEnvironment

STEPS, SLOTS = 5, 3


class AddingLearner:
    """Adds 1 to the policy's weight with every update."""

    def __init__(self) -> None:
        self.version = 0
        self.policy = AffinePolicy()
        self.policy.load(0, {"bias": np.array([0])})
        self.seen: list[Fragment] = []

    def update(self, data: Any) -> Metrics:
        self.version += 1
        self.policy.load(self.version, self.weights())
        self.seen.append(data)
        return {"update/count/sum": Sum(value=1.0)}

    def weights(self) -> Mapping[str, Any]:
        return {"bias": np.array([self.version])}


def make_actor(transport: Streams | None, has_policy: bool, index: int) -> Actor:
    streams = None if transport is None else transport.end("actor", index)
    ring = [CountingEnvironment(SLOTS) for _ in range(1 if transport is None else transport.spec.ring)]
    return Actor(ring, {"policy": AffinePolicy()} if has_policy else {}, STEPS, index=index, streams=streams)  # type: ignore[arg-type]


def make_policy_worker(transport: Streams, index: int) -> PolicyWorker:
    return PolicyWorker({"policy": AffinePolicy()}, transport.end("worker", index))


def stream_spec(workers: int, actors: int = 2, ring: int = 2) -> StreamSpec:
    return StreamSpec(
        actors=actors,
        ring=ring,
        steps=STEPS,
        layouts={"policy": layout_of(AffinePolicy(), CountingEnvironment(SLOTS), SLOTS)},
        weights={"policy": record_of({"bias": np.zeros(1, np.int64)})},
        workers=workers,
    )


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = InlineBackend()
    made.open([Pool(name="actors", size=2, world=1), Pool(name="policies", size=2, world=1)])
    yield made
    made.close()


def streamed(style: str, backend: Backend, transport: Streams, learner: AddingLearner) -> StreamSystem:
    actors: WorkerSet[Actor] = WorkerSet(backend, "actors", partial(make_actor, transport, style == "actor"))
    workers = (
        WorkerSet(backend, "policies", partial(make_policy_worker, transport)) if style == "policy" else None
    )
    server = (
        PolicyWorker({"policy": learner.policy}, transport.end("worker", 0), refreshes=False)
        if style == "trainer"
        else None
    )
    return StreamSystem(
        transport,
        actors,
        {"policy": learner},
        others=[workers] if workers is not None else [],
        server=server,
        budget_s=0.5,  # type: ignore[dict-item]
    )


def test_calls_in_rounds_act_with_the_weights_published_before(backend: Backend) -> None:
    learner = AddingLearner()
    system = CallSystem(WorkerSet(backend, "actors", partial(make_actor, None, True)), {"policy": learner})  # type: ignore[dict-item]
    system.publish()
    for number, fragment in enumerate(islice(system.rollouts("bulk_sync"), 4)):
        assert fragment.observations.shape == (STEPS + 1, 2 * SLOTS, 3)
        assert fragment.versions.tolist() == [number] * STEPS
        assert np.array_equal(fragment.actions, fragment.observations[:-1, :, 0] + number)
        learner.update(fragment)
        system.publish()


def test_calls_come_one_by_one_in_mode_async(backend: Backend) -> None:
    system = CallSystem(
        WorkerSet(backend, "actors", partial(make_actor, None, True)), {"policy": AddingLearner()}
    )  # type: ignore[dict-item]
    actors: set[int] = set()
    for fragment in islice(system.rollouts("async"), 10_000):  # a process that starts late is late
        actors.add(fragment.actor)
        if len(actors) == 2:
            break
    assert actors == {0, 1}


def test_a_reset_with_the_same_seed_gives_the_same_fragments(backend: Backend) -> None:
    system = CallSystem(
        WorkerSet(backend, "actors", partial(make_actor, None, True)), {"policy": AddingLearner()}
    )  # type: ignore[dict-item]
    found = []
    for seed in (5, 5, 6):
        system.reset(seed)
        found.append(next(iter(system.rollouts("bulk_sync"))).observations)
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_the_error_of_a_load_is_raised_at_the_next_publish(backend: Backend) -> None:
    system = CallSystem(
        WorkerSet(backend, "actors", partial(make_actor, None, True)), {"other": AddingLearner()}
    )  # type: ignore[dict-item]
    system.publish()
    with pytest.raises(KeyError, match="other"):
        for _ in range(1000):
            time.sleep(0.01)
            system.publish()


def test_an_unknown_mode_and_a_missing_learner_are_named(backend: Backend) -> None:
    system = CallSystem(WorkerSet(backend, "actors", partial(make_actor, None, True)), {})
    with pytest.raises(ConfigError, match="no mode 'sync'"):
        system.rollouts("sync")
    with pytest.raises(ConfigError, match="learner of 0 policies"):
        _ = system.learner


@pytest.mark.parametrize("style", ["actor", "policy", "trainer"])
@pytest.mark.parametrize("kind", ["shared_memory", "tcp"])
def test_rounds_by_streams_are_those_by_calls(backend: Backend, style: str, kind: str) -> None:
    learner = AddingLearner()
    workers = {"actor": 0, "policy": 2, "trainer": 1}[style]
    transport = open_streams(kind, stream_spec(workers))
    system = streamed(style, backend, transport, learner)
    system.reset(3)
    for number, fragment in enumerate(islice(system.rollouts("bulk_sync"), 6)):
        assert fragment.observations.shape == (STEPS + 1, 4 * SLOTS, 3)
        if (style, kind) != ("policy", "tcp"):  # the weights reach a policy worker by a way of their own
            assert fragment.versions.tolist() == [number] * STEPS
            assert np.array_equal(fragment.actions, fragment.observations[:-1, :, 0] + number)
        learner.update(fragment)
        system.publish()
    system.close()
    transport.close()


@pytest.mark.parametrize("style", ["actor", "policy", "trainer"])
@pytest.mark.parametrize("kind", ["shared_memory", "tcp"])
def test_fragments_come_as_they_are_made(backend: Backend, style: str, kind: str) -> None:
    learner = AddingLearner()
    transport = open_streams(kind, stream_spec({"actor": 0, "policy": 2, "trainer": 1}[style]))
    system = streamed(style, backend, transport, learner)
    last = -1
    for fragment in islice(system.rollouts("async"), 30):
        bias = fragment.actions - fragment.observations[:-1, :, 0]
        assert np.array_equal(bias, np.broadcast_to(fragment.versions[:, None], bias.shape))
        last = max(last, int(fragment.versions.max()))
        learner.update(fragment)
        system.publish()
    assert last > 5, "actors act with new weights"
    system.reset(4)
    after = next(iter(system.rollouts("async")))
    assert after.versions.min() == learner.version, "nothing from before the reset is left"
    system.close()
    transport.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Backend]:
    made = ProcessBackend()
    made.open([Pool(name="actors", size=2, world=1), Pool(name="policies", size=2, world=1)])
    yield made
    made.close()


def process_id(site: Site, pool: str) -> int:
    del site, pool
    return os.getpid()


@pytest.mark.parametrize(
    ("style", "victim", "workers", "kind"),
    [
        ("policy", "actors", 2, "shared_memory"),
        *(
            pytest.param(*each, kind, marks=pytest.mark.slow)
            for kind in ("shared_memory", "tcp")
            for each in (
                ("policy", "policies", 2),
                ("actor", "actors", 0),
                ("trainer", "actors", 1),
                ("policy", "actors", 2),
            )
            if (*each, kind) != ("policy", "actors", 2, "shared_memory")
        ),
    ],
)
def test_a_killed_worker_stops_no_other(
    processes: Backend, style: str, victim: str, workers: int, kind: str
) -> None:
    learner = AddingLearner()
    transport = open_streams(kind, stream_spec(workers))
    system = streamed(style, processes, transport, learner)
    hit = system._polled[victim == "policies"]
    killed = hit.workers.submit(0, process_id).read()
    seen: list[int] = []
    began = time.monotonic()
    for number, fragment in enumerate(system.rollouts("async")):
        seen.append(fragment.actor)
        bias = fragment.actions - fragment.observations[:-1, :, 0]
        assert np.array_equal(bias, np.broadcast_to(fragment.versions[:, None], bias.shape))
        if number == 10:
            os.kill(killed, signal.SIGKILL)
        learner.update(fragment)
        system.publish()
        if number > 30 and hit.lost == 1 and len(hit.alive) == 2 and set(seen[-10:]) == {0, 1}:
            break
        assert time.monotonic() - began < 120
    assert hit.lost == 1
    system.close()
    transport.close()


def test_a_killed_actor_of_calls_is_left_out_until_the_next_reset(processes: Backend) -> None:
    learner = AddingLearner()
    actors: WorkerSet[Actor] = WorkerSet(processes, "actors", partial(make_actor, None, True))
    system = CallSystem(actors, {"policy": learner})  # type: ignore[dict-item]
    system.reset(1)
    widths = []
    for number, fragment in enumerate(islice(system.rollouts("bulk_sync"), 5)):
        widths.append(fragment.observations.shape[1])
        if number == 1:
            os.kill(actors.submit(0, process_id).read(), signal.SIGKILL)
        learner.update(fragment)
        system.publish()
    assert widths[:2] == [2 * SLOTS, 2 * SLOTS]
    assert widths[-1] == SLOTS
    system.reset(2)
    again = next(iter(system.rollouts("bulk_sync")))
    assert again.observations.shape[1] == 2 * SLOTS
    assert (again.versions == learner.version).all()
