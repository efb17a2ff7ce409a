"""Forms of the six workloads: serial loop, static plan on threads, Ray actors written plainly, and tuned.

A form is a function of a number of rounds. The forms of this process share their environments and agents,
because they never run at once; each Ray actor has its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import numpy as np
import torch
from reactor_workloads import (
    AgentPolicy,
    Array,
    EnvironmentWorker,
    QActor,
    QBuffer,
    QLearner,
    Receiver,
    Sender,
    TrafficJunction,
    WholeJunction,
    shown,
)

from rillflow_classic.executor.plan import StaticPlan
from rillflow_classic.executor.run import StaticRun

Form = Callable[[int], object]
"""Makes some rounds."""
SERIAL, ONE, TWO, WIDE, PLAIN, TUNED = (
    "serial loop",
    "static, 1 thread",
    "static, 2 threads",
    "static, a thread each",
    "Ray, plain",
    "Ray, tuned",
)
THREADS = {ONE: 1, TWO: 2}


class RayActors:
    """Bare Ray actors that hold any object; they are started once and reused.

    Args:
        count: number of actors.
        stack: shuts Ray down.
    """

    def __init__(self, count: int, stack: ExitStack) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray

        ray.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=6 * 2**30,
            logging_level="error",
        )
        stack.callback(ray.shutdown)
        self.get, self.put = ray.get, ray.put
        self._all = [ray.remote(num_cpus=0)(Holder).remote() for _ in range(count)]

    def holding(self, makes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return actors, each with an object of its own."""
        actors = self._all[: len(makes)]
        self.get([actor.make.remote(make) for actor, make in zip(actors, makes, strict=True)])
        return actors


class Holder:
    """Ray actor that holds one object and calls its methods."""

    def make(self, make: Callable[[], Any]) -> None:
        """Make the object, in place of the one before."""
        self._object = make()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments)


class Step:
    """A reactor whose reaction calls a function; signals are dropped."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._function = make()

    def first(self, start: Any, again: Any) -> Any:
        """React to the startup, and to the end of the round before."""
        del start, again
        return self._function()

    def ready(self, go: Any) -> Any:
        """React to a signal."""
        del go
        return self._function()

    def use(self, value: Any) -> Any:
        """React to a value."""
        return self._function(value)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the table."""

    name: str
    """Name."""
    paper: str
    """Ratio of the paper."""
    reactors: int
    """Reactors that can run side by side."""
    steps: int
    """Rounds of one measurement."""
    units: int
    """Observations, environment steps or updates of a round."""
    forms: dict[str, Form]
    """Forms by name."""
    pause_s: float = 0.0
    """Sleep of every reactor in a round, which is no overhead."""

    def pauses_s(self, form: str) -> float:
        """Return the sleep that a round of a form cannot avoid."""
        if form == SERIAL:
            return self.reactors * self.pause_s
        return -(-self.reactors // THREADS.get(form, self.reactors)) * self.pause_s


def static_form(plan: StaticPlan, threads: int, stack: ExitStack) -> Form:
    """Return a plan that runs on threads."""
    run = stack.enter_context(StaticRun(plan, workers=threads))
    return lambda steps: run.run(tags=run.counts.tags + steps)


def gather_plan(
    go: Callable[[], Callable[..., Any]],
    workers: Sequence[Callable[[], Callable[..., Any]]],
    end: Callable[[list[Any]], Any],
    method: str = "use",
) -> StaticPlan:
    """Return the plan go -> every worker -> end, whose end begins the next round."""
    plan = StaticPlan("gather")
    again = plan.delayed("again")
    begun = plan.reactor("go", partial(Step, go)).react("first", plan.startup(), again)
    done = [
        plan.reactor(f"worker {index}", partial(Step, make)).react(method, begun)
        for index, make in enumerate(workers)
    ]
    again.connect(
        plan.reactor("end", partial(Step, lambda: lambda found: (end(found), True)[1])).react("use", done)
    )
    return plan


def broadcast(
    size: int, actors: int, pause_s: float, steps: int, ray: RayActors | None, stack: ExitStack
) -> Workload:
    """Broadcast an object, let every actor read it and sleep, and gather the answers."""
    makes = [partial(Receiver, pause_s, index) for index in range(actors)]
    sender, receivers = Sender(size), [make() for make in makes]

    def serial(steps: int) -> None:
        for _ in range(steps):
            sent = sender.make()
            _ = [each.use(sent) for each in receivers]

    forms: dict[str, Form] = {SERIAL: serial}
    for form, threads in {**THREADS, WIDE: actors}.items():
        plan = gather_plan(
            lambda: Sender(size).make,
            [lambda each=each: each.use for each in receivers],  # type: ignore[misc]
            lambda found: found,
        )
        forms[form] = static_form(plan, threads, stack)
    if ray is not None:
        held = ray.holding(makes)

        def plain(steps: int) -> None:
            for _ in range(steps):
                sent = sender.make()
                ray.get([each.call.remote("use", sent) for each in held])

        def tuned(steps: int) -> None:
            for _ in range(steps):
                sent = ray.put(sender.make())
                ray.get([each.call.remote("use", sent) for each in held])

        forms |= {PLAIN: plain, TUNED: tuned}
    paper = {2: "2.4x", 4: "2.5x", 8: "3.2x", 16: "3.4x"}[actors] if size == 10_000_000 else "1.4 to 1.7x"
    name = f"broadcast and gather, {size // 1_000_000} MB, {actors} actors"
    return Workload(
        name=name, paper=paper, reactors=actors, steps=steps, units=1, forms=forms, pause_s=pause_s
    )


def generation(
    name: str,
    make: Callable[[], Any],
    sink: TextIO | None,
    steps: int,
    paper: str,
    ray: RayActors | None,
    stack: ExitStack,
    count: int = 15,
) -> Workload:
    """Step every environment once a round, and gather the observations."""
    makes = [partial(EnvironmentWorker, make, index) for index in range(count)]
    workers = [each() for each in makes]

    def serial(steps: int) -> None:
        for _ in range(steps):
            shown([each.step() for each in workers], sink)

    forms: dict[str, Form] = {SERIAL: serial}
    for form, threads in THREADS.items():
        plan = gather_plan(
            lambda: lambda: True,
            [lambda each=each: each.step for each in workers],  # type: ignore[misc]
            lambda found: shown(found, sink),
            "ready",
        )
        forms[form] = static_form(plan, threads, stack)
    if ray is not None:
        held = ray.holding(makes)

        def plain(steps: int) -> None:
            for _ in range(steps):
                shown(ray.get([each.call.remote("step") for each in held]), sink)

        def tuned(steps: int) -> None:
            found = ray.get([each.call.remote("fragment", steps) for each in held])
            for each in zip(*found, strict=True) if sink is not None else ():
                shown(each, sink)

        forms |= {PLAIN: plain, TUNED: tuned}
    printed = ", every observation printed" if sink is not None else ""
    return Workload(
        name=f"{name}, {count} environments{printed}",
        paper=paper,
        reactors=count,
        steps=steps,
        units=count,
        forms=forms,
    )


def q_learning(
    batch: int, steps: int, paper: str, ray: RayActors | None, stack: ExitStack, count: int = 16
) -> Workload:
    """Let all actors play, store their transitions, learn from the oldest, and send new weights."""
    makes = [partial(QActor, index) for index in range(count)]
    actors, buffer, learner = [make() for make in makes], QBuffer(batch), QLearner()

    def serial(steps: int) -> None:
        for _ in range(steps):
            weights = learner.weights()
            learner.learn(buffer.add([each.play(weights) for each in actors]))

    forms: dict[str, Form] = {SERIAL: serial}
    for form, threads in THREADS.items():
        forms[form] = static_form(_q_plan(batch, actors), threads, stack)
    if ray is not None:
        *held, kept, taught = ray.holding([*makes, partial(QBuffer, batch), QLearner])

        def plain(steps: int) -> None:
            weights = ray.get(taught.call.remote("weights"))
            for _ in range(steps):
                experiences = ray.get([each.call.remote("play", weights) for each in held])
                drawn = ray.get(kept.call.remote("add", experiences))
                weights = ray.get(taught.call.remote("learn", drawn))

        def tuned(steps: int) -> None:
            columns: list[Any] = []
            for _ in range(steps):
                weights = ray.put(learner.weights())
                found = ray.get([each.call.remote("play_arrays", weights) for each in held])
                new = [torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True)]
                columns = [torch.cat(pair) for pair in zip(columns, new, strict=True)] if columns else new
                columns = [column[-20_000:] for column in columns]
                learner.learn_columns([column[:batch] for column in columns])

        forms |= {PLAIN: plain, TUNED: tuned}
    name = f"Q-learning on Blackjack, {count} actors x 100 steps, minibatch {batch}"
    return Workload(name=name, paper=paper, reactors=count, steps=steps, units=count * 100, forms=forms)


def _q_plan(batch: int, actors: Sequence[QActor]) -> StaticPlan:
    plan = StaticPlan("q-learning")
    again = plan.delayed("weights")
    learner = QLearner()
    first = plan.reactor("first", partial(Step, lambda: learner.weights)).react("ready", plan.startup())
    relay = plan.reactor("weights", _Either).react("either", first, again)
    played = [
        plan.reactor(f"actor {index}", partial(Step, lambda each=each: each.play)).react("use", relay)
        for index, each in enumerate(actors)
    ]
    drawn = plan.reactor("buffer", partial(Step, lambda: QBuffer(batch).add)).react("use", played)
    again.connect(plan.reactor("learner", partial(Step, lambda: learner.learn)).react("use", drawn))
    return plan


class _Either:
    def either(self, first: Any, again: Any) -> Any:
        """Return the weights of the start, and later those of the learner."""
        return first if again is None else again


def inference(
    agents: int, sink: TextIO | None, steps: int, paper: str, ray: RayActors | None, stack: ExitStack
) -> Workload:
    """Step the junction, and let every agent act on its own observation."""
    whole = WholeJunction(agents)

    def serial(steps: int) -> None:
        for _ in range(steps):
            shown(whole.step(), sink)

    forms: dict[str, Form] = {SERIAL: serial}
    for form, threads in THREADS.items():
        forms[form] = static_form(_junction_plan(agents, sink), threads, stack)
    if ray is not None:
        forms |= _junction_on_ray(agents, sink, ray)
    printed = ", every observation printed" if sink is not None else ""
    name = f"traffic junction, {agents} agents{printed}"
    return Workload(name=name, paper=paper, reactors=agents, steps=steps, units=1, forms=forms)


def _junction_plan(agents: int, sink: TextIO | None) -> StaticPlan:
    plan = StaticPlan("junction")
    again = plan.delayed("actions")
    junction = plan.reactor("junction", partial(_Junction, agents, sink))
    seen = junction.react("step", plan.startup(), again)
    actions = [
        plan.reactor(f"agent {index}", partial(AgentPolicy, index)).react(partial(_act, index), seen)
        for index in range(agents)
    ]
    again.connect(plan.reactor("actions", partial(Step, lambda: list)).react("use", actions))
    return plan


class _Junction:
    def __init__(self, agents: int, sink: TextIO | None) -> None:
        self._environment, self._sink = TrafficJunction(agents), sink

    def step(self, start: Any, actions: list[int] | None) -> list[Array]:
        """Return the observation of every agent."""
        del start
        found = self._environment.step(actions)
        shown(found, self._sink)
        return found


def _act(index: int, policy: AgentPolicy, seen: list[Array]) -> int:
    """Act on the agent's own observation."""
    return policy.act(seen[index])


def _junction_on_ray(agents: int, sink: TextIO | None, ray: RayActors) -> dict[str, Form]:
    held = ray.holding(
        [*(partial(AgentPolicy, index) for index in range(agents)), partial(WholeJunction, agents)]
    )
    environment = TrafficJunction(agents)

    def plain(steps: int) -> None:
        actions = None
        for _ in range(steps):
            seen = environment.step(actions)
            shown(seen, sink)
            calls = [each.call.remote("act", one) for each, one in zip(held[:-1], seen, strict=True)]
            actions = ray.get(calls)

    def tuned(steps: int) -> None:
        for each in ray.get(held[-1].call.remote("fragment", steps)):
            shown(each, sink)

    return {PLAIN: plain, TUNED: tuned}
