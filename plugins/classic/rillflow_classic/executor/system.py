"""Static system: the rollouts of a recipe as a static plan, with all actors in this process.

    startup ──┬─> actor 0.sample ─┐
       ^      ├─> actor 1.sample ─┼─> join ──> the algorithm's plan: update, publish
       │      └─> ...            ─┘     │
       └─────────── after=0 ────────────┘

One tag is one round of all actors. Between two tags no actor runs, and weights are loaded then. Everything
else is that of calls (CallSystem), so the weights that follow are the same, bit for bit, for every number of
threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rillflow.errors import ConfigError
from rillflow_classic.executor.plan import StaticPlan
from rillflow_classic.executor.run import StaticRun
from rillflow_classic.operators.iterators import LocalIterator, from_function
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.policy import Learner
from rillflow_classic.system import CallSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.evaluation_worker import EvaluationWorker


class StaticSystem(CallSystem):
    """Actors that sample on the threads of a static plan; see ``algorithm.System``.

    Args:
        actors: the actors, on an inline backend.
        learners: learner of every policy, by name.
        threads: threads that run the actors, the caller's included.
        evaluator: see ``ActorSystem``.
    """

    def __init__(
        self,
        actors: WorkerSet[Actor],
        learners: Mapping[str, Learner],
        threads: int,
        evaluator: WorkerSet[EvaluationWorker] | None = None,
    ) -> None:
        super().__init__(actors, learners, evaluator)
        plan = StaticPlan("rollouts")
        again, start = plan.delayed("again"), plan.startup()
        samples = [
            plan.reactor(f"actor {index}", actors.run(index, _itself).read).react(_sample, start, again)
            for index in range(actors.size)
        ]
        self._joined = plan.reactor("fragments", tuple).react(_join, samples)
        again.connect(self._joined)
        self._run = StaticRun(plan, workers=threads)

    def _rounds(self) -> LocalIterator:
        return from_function(self._next_round, f"static plan of {self.actors.size} actors")

    def _as_they_come(self, num_async: int) -> LocalIterator:  # noqa: ARG002
        raise ConfigError(
            "workers.executor is 'static', and the algorithm takes fragments as they come",
            why="which actor is next then depends on time, and a static plan has a fixed pattern",
            fix='set workers.executor = "pull"',
        )

    def close(self) -> None:
        """End the threads, and close all environments."""
        self._run.close()
        self.ask_actors("close")

    def _next_round(self) -> Rollout:
        for index in range(self.actors.size):
            self.actors.run(index, _itself).read()  # behind the loads of its weights
        self._run.step()
        found: Rollout = self._run.value(self._joined)
        return found


def _itself(actor: Actor) -> Actor:
    return actor


def _sample(actor: Actor, *_: Any) -> Rollout:
    return actor.sample()


def _join(_: object, fragments: list[Rollout]) -> Rollout:
    return join(fragments)
