"""One plan gives the same items on every backend, and goes on without a worker that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice

import pytest

from rillflow.workers.backend import Backend, Pool
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.operators.iterators import concurrently, from_workers, queue
from rillflow_classic.worker_set import WorkerSet


class PlayerProcess:
    """A worker whose items say which weights made them."""

    def __init__(self, index: int) -> None:
        self.index, self.played, self.version = index, 0, 0

    def play(self) -> tuple[int, int, int]:
        self.played += 1
        return self.index, self.played - 1, self.version

    def load(self, version: int) -> None:
        self.version = version

    def process(self) -> int:
        return os.getpid()


@pytest.fixture(params=["inline", "process", pytest.param("ray", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest) -> Iterator[WorkerSet[PlayerProcess]]:
    backend: Backend
    match request.param:
        case "inline":
            backend = InlineBackend()
        case "process":
            backend = ProcessBackend()
        case _:
            backend = ray_backend()
    backend.open([Pool(name="players", size=2, world=1)])
    try:
        yield WorkerSet(backend, "players", PlayerProcess)
    finally:
        backend.close()


@pytest.mark.timeout(300)
def test_the_laws_hold_and_a_killed_worker_is_left_out(workers: WorkerSet[PlayerProcess]) -> None:
    rounds = from_workers(workers, "play").for_each(lambda item: (*item, "here")).batch_across_workers()
    for version, batch in enumerate(islice(rounds, 4)):
        assert batch == [(worker, version, version, "here") for worker in range(2)]
        workers.call_all("load", version + 1)
    for num_async in (1, 2):
        workers.call_all("load", 0)
        seen = {0: 0, 1: 0}
        plan = from_workers(workers, "play").gather_async(num_async).zip_with_source()
        for source, (worker, _, version) in islice(plan, 30):
            assert source.index == worker
            assert seen[worker] - (num_async - 1) <= version <= seen[worker]
            seen[worker] += 1
            source.call("load", seen[worker])
    put, taken = queue(3)
    flow = from_workers(workers, "play").gather_async(2).for_each(put)
    context = PlanContext()
    items = concurrently([flow, taken], "async", output_indexes=[1]).run(context)
    while {next(items)[0] for _ in range(40)} != {0, 1}:
        pass
    process = workers.call(1, "process").read()
    if process == os.getpid():
        return
    os.kill(process, signal.SIGKILL)
    while not context.notes:
        next(items)
    for _ in range(3):  # the queue may hold its last items
        next(items)
    assert {next(items)[0] for _ in range(20)} == {0}
    assert context.notes[0].startswith("worker 1 of players is left out")
