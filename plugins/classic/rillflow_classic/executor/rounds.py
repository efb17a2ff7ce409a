"""Static rounds: the rollouts of a recipe as a static plan, with all actors in this process.

    startup ──┬─> actor 0.sample ─┐
       ^      ├─> actor 1.sample ─┼─> join ──> the algorithm's plan: update, publish
       │      └─> ...            ─┘     │
       └─────────── after=0 ────────────┘

One tag is one round of all actors. Between two tags no actor runs, and weights are loaded then. Everything
else is that of calls (CallSystem), so the weights that follow are the same, bit for bit, for every number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rillflow_classic.executor.plan import StaticPlan
from rillflow_classic.executor.run import StaticRun
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor


def static_rounds(actors: WorkerSet[Actor], threads: int, stack: ExitStack) -> Callable[[], Rollout]:
    """Return a function that lets every actor sample, and returns the fragments side by side.

    Args:
        actors: the actors, on an inline backend.
        threads: threads that run the actors, the caller's included.
        stack: ends the threads, and closes all environments.
    """
    plan = StaticPlan("rollouts")
    again, start = plan.delayed("again"), plan.startup()
    samples = [
        plan.reactor(f"actor {index}", actors.call(index, _itself).read).react(_sample, start, again)
        for index in range(actors.size)
    ]
    joined = plan.reactor("fragments", tuple).react(_join, samples)
    again.connect(joined)
    stack.callback(actors.read_all, "close")
    run = stack.enter_context(StaticRun(plan, workers=threads))

    def next_round() -> Rollout:
        actors.read_all(_itself)  # behind the loads of their weights
        run.step()
        found: Rollout = run.value(joined)
        return found

    return next_round


def _itself(actor: Actor) -> Actor:
    return actor


def _sample(actor: Actor, *_: Any) -> Rollout:
    return actor.sample()


def _join(_: object, fragments: list[Rollout]) -> Rollout:
    return join(fragments)
