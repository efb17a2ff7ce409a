"""Static runs: the same trace on 1, 2 and 4 threads and on backends, equal to a plain interpreter's."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from rillflow.errors import ClusterError, GraphError
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow_classic.executor.plan import PlanChannel, StaticPlan, Tag
from rillflow_classic.executor.run import BackendRun, StaticRun

sys.path.insert(0, str(Path(__file__).parent))
from reference import Interpreter, Line, plans, timer

TAGS = 12


def static_trace(plan: StaticPlan, workers: int, tags: int = TAGS) -> list[Line]:
    lines: list[Line] = []
    with StaticRun(plan, workers=workers, traced=lambda *line: lines.append(line)) as run:
        run.run(tags=tags)
    return lines


def backend_trace(plan: StaticPlan, backend: Backend, ranks: int, tags: int = TAGS) -> list[Line]:
    lines: list[Line] = []
    backend.open([Pool(name="reactors", size=ranks, world=1)])
    try:
        with BackendRun(plan, backend, "reactors", traced=lambda *line: lines.append(line)) as run:
            run.run(tags=tags)
    finally:
        backend.close()
    return lines


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_the_trace_is_the_same_for_every_number_of_workers_and_equals_the_interpreter(
    plan: StaticPlan,
) -> None:
    traces = [static_trace(plan, workers) for workers in (1, 2, 4)]
    assert traces[0] == traces[1] == traces[2]
    by_tag = sorted(traces[0], key=lambda line: (line[0], line[1]))
    assert by_tag == sorted(Interpreter(plan).run(TAGS), key=lambda line: (line[0], line[1]))
    assert backend_trace(plan, InlineBackend(), 3) == traces[0]


class Counter:
    """Counts, doubles and collects; it notes which thread is in it."""

    def __init__(self) -> None:
        self.count, self.inside, self.most, self.called = 0, 0, 0, list[str]()

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.called.append(name)
        time.sleep(0.002)
        yield
        self.inside -= 1

    def tick(self, *given: Any) -> int:
        with self.entered("tick"):
            self.count += 1
        return self.count

    def second(self, *given: Any) -> int:
        with self.entered("second"):
            return self.count

    def gather(self, given: list[int]) -> list[int]:
        with self.entered("gather"):
            return list(given)

    def double(self, given: int) -> int:
        return 2 * given

    def fails(self, *given: Any) -> int:
        raise ValueError(f"no use for {given}")

    def stops(self, *given: Any) -> int:
        raise KeyboardInterrupt


def broadcast(size: int = 4, rounds: int | None = None) -> tuple[StaticPlan, PlanChannel]:
    """Return a plan that sends a number to several reactors and gathers their answers."""
    plan = StaticPlan("broadcast")
    back = plan.delayed("back")
    sent = plan.reactor("source", Counter).react("tick", plan.startup(), back)
    answers = [plan.reactor(f"worker {index}", Counter).react("double", sent) for index in range(size)]
    gathered = plan.reactor("sink", Counter).react("gather", answers)
    back.connect(gathered)
    return plan, gathered


def test_the_trace_is_the_same_in_processes() -> None:
    plan, _ = broadcast()
    assert backend_trace(plan, ProcessBackend(), 2, tags=5) == static_trace(plan, 2, tags=5)


@pytest.mark.slow
def test_the_trace_is_the_same_on_ray() -> None:
    from rillflow.workers.start import ray_backend

    plan, _ = broadcast()
    assert backend_trace(plan, ray_backend(), 2, tags=5) == static_trace(plan, 2, tags=5)


def test_a_gather_runs_once_at_a_tag_after_all_its_writers() -> None:
    plan, gathered = broadcast(size=6)
    with StaticRun(plan, workers=4) as run:
        for number in range(1, 8):
            assert run.step() == Tag(0, number - 1)
            assert run.value(gathered) == [2 * number] * 6
        assert run.reactors["sink"].called == ["gather"] * 7


def test_no_lock_is_used_for_a_message() -> None:
    workers, tags = 3, 20
    for size in (4, 16):
        plan, _ = broadcast(size)
        with StaticRun(plan, workers=workers) as run:
            counts = run.run(tags=tags)
        assert counts.messages == tags * (size + 2), "one per value"
        assert counts.reactions == tags * (size + 2)
        assert counts.handovers == tags * (workers - 1), "the one level with several reactions"
    with StaticRun(broadcast()[0], workers=1) as run:
        assert run.run(tags=tags).handovers == 0


def test_reactions_of_one_reactor_run_in_order_and_never_at_once() -> None:
    plan = StaticPlan("both")
    one = plan.reactor("one", Counter)
    other = plan.reactor("other", Counter)
    ticks = timer(plan, 1)
    one.react("tick", ticks)
    one.react("second", ticks)
    one.react("tick", ticks)
    other.react("tick", ticks)
    with StaticRun(plan, workers=4) as run:
        run.run(tags=10)
        assert run.reactors["one"].called == ["tick", "second", "tick"] * 10
        assert run.reactors["one"].most == 1


def test_timers_and_delays_set_the_tags() -> None:
    plan = StaticPlan("delays")
    later, next_step = plan.delayed("later", after=3), plan.delayed("next")
    counter = plan.reactor("counter", Counter)
    ticked = counter.react("tick", timer(plan, 2))
    later.connect(ticked)
    next_step.connect(ticked)
    plan.reactor("late", Counter).react("double", later)
    plan.reactor("next", Counter).react("double", next_step)
    with StaticRun(plan) as run:
        lines: list[Line] = []
        run._traced = lambda tag, *line: None if line[0].startswith("clock") else lines.append((tag, *line))
        while run.step() != Tag(5, 0):
            pass
    assert lines == [
        (Tag(0, 0), "counter.tick", 1),
        (Tag(0, 1), "next.double", 2),
        (Tag(2, 0), "counter.tick", 2),
        (Tag(2, 1), "next.double", 4),
        (Tag(3, 0), "late.double", 2),
        (Tag(4, 0), "counter.tick", 3),
        (Tag(4, 1), "next.double", 6),
        (Tag(5, 0), "late.double", 4),
    ]


def test_a_plan_without_a_later_tag_ends() -> None:
    plan = StaticPlan("once")
    plan.reactor("counter", Counter).react("tick", plan.startup())
    with StaticRun(plan) as run:
        assert run.run().tags == 1
        assert run.step() is None


@pytest.mark.parametrize("workers", [1, 3])
def test_a_reaction_that_raises_ends_the_run_and_not_the_threads_of_others(workers: int) -> None:
    plan, _ = broadcast()
    plan.reactor("bad", Counter).react("fails", timer(plan, 1))
    before = threading.active_count()
    with StaticRun(plan, workers=workers) as run:
        message = r"(?s)reaction bad\.fails failed at time 0, microstep 0.*ValueError: no use for \(5,\)"
        with pytest.raises(ClusterError, match=message) as caught:
            run.run(tags=5)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(ClusterError, match="after one that did not end"):
            run.step()
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_interrupt_in_any_thread_ends_the_run(workers: int) -> None:
    plan = StaticPlan("stopped")
    ticks, before = timer(plan, 1), threading.active_count()
    for index in range(4):
        plan.reactor(f"counter {index}", Counter).react("stops" if index == 2 else "tick", ticks)
    with StaticRun(plan, workers=workers) as run, pytest.raises(KeyboardInterrupt):
        run.step()
    assert threading.active_count() == before


def test_a_reaction_that_raises_on_a_backend_is_named() -> None:
    plan = StaticPlan("bad")
    plan.reactor("bad", Counter).react("fails", plan.startup())
    with pytest.raises(ClusterError, match=r"reaction bad\.fails failed at time 0, microstep 0"):
        backend_trace(plan, InlineBackend(), 1)


def test_a_missing_method_is_named_before_the_start() -> None:
    plan = StaticPlan("missing")
    plan.reactor("counter", Counter).react("tock", plan.startup())
    with pytest.raises(GraphError, match=r"(?s)reactor 'counter' has no method 'tock'.*it is a Counter"):
        StaticRun(plan)
    with pytest.raises(GraphError, match="reactor 'counter' has no method 'tock'"):
        backend_trace(plan, InlineBackend(), 1)


def test_a_cycle_without_a_delay_is_refused_with_its_path() -> None:
    plan = StaticPlan("cycle")
    one, two = plan.reactor("one", Counter), plan.reactor("two", Counter)
    plan.reactor("before", Counter).react("tick", plan.startup())
    ticked = one.react("tick", plan.startup())
    doubled = two.react("double", ticked)
    plan.reactor("after", Counter).react("double", doubled)
    ticked.connect(doubled)
    with pytest.raises(GraphError) as caught:
        plan.levels()
    assert "one.tick -> two.double -> one.tick" in str(caught.value) or (
        "two.double -> one.tick -> two.double" in str(caught.value)
    )
    assert "plan.delayed(NAME)" in str(caught.value)
    with pytest.raises(GraphError, match="a cycle without a delay"):
        StaticRun(plan)


def test_bad_topologies_are_refused() -> None:
    plan = StaticPlan("bad")
    counter = plan.reactor("counter", Counter)
    with pytest.raises(GraphError, match="two reactors of bad are called 'counter'"):
        plan.reactor("counter", Counter)
    with pytest.raises(GraphError, match="has a delay of -1"):
        plan.delayed("past", after=-1)
    ticked = counter.react("tick", plan.startup())
    loose = plan.delayed("loose")
    counter.react("double", loose)
    with pytest.raises(GraphError, match="'loose' reads no channel"):
        StaticRun(plan)
    loose.connect(ticked)
    with pytest.raises(GraphError, match="'loose' is connected to"):
        loose.connect(ticked)
    with pytest.raises(GraphError, match="on 0 workers"):
        StaticRun(broadcast()[0], workers=0)


def test_channels_of_another_plan_are_refused() -> None:
    plan, foreign = StaticPlan("mine"), StaticPlan("other")
    strange = foreign.startup()
    plan.reactor("counter", Counter).react("tick", strange)
    with pytest.raises(GraphError, match=r"'counter\.tick' reads a channel of another plan"):
        plan.levels()
    plan = StaticPlan("mine")
    back = plan.delayed("back")
    plan.reactor("counter", Counter).react("tick", plan.startup(), back)
    back.connect(strange)
    with pytest.raises(GraphError, match="'back' reads a channel of another plan"):
        plan.levels()


def test_a_reaction_without_an_input_is_refused() -> None:
    plan = StaticPlan("deaf")
    plan.reactor("counter", Counter).react("tick")
    with pytest.raises(GraphError, match=r"'counter\.tick' reads no channel"):
        plan.levels()


def test_the_graph_shows_delays() -> None:
    plan, _ = broadcast(size=2)
    graph = plan.graph()
    assert [each.name for each in graph.stages] == [
        "source.tick",
        "worker 0.double",
        "worker 1.double",
        "sink.gather",
    ]
    edges = {(each.source, each.destination): each.fields for each in graph.edges}
    assert edges[3, 0] == ("delayed",)
    assert edges[-1, 0] == () and edges[0, 1] == () and edges[1, 3] == ()
