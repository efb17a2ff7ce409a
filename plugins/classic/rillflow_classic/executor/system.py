"""Static system: the rollouts of a recipe as a static plan, with all actors in this process.

    go ──┬─> actor 0.sample ─┐
         ├─> actor 1.sample ─┼─> join ──> the algorithm's plan: update, publish
         └─> ...            ─┘     │
     ^                             │  after=0
     └─────────────────────────────┘

One tag is one round of all actors. Between two tags no actor runs, and weights are loaded then. The actors
do what they do when they are called (CallSystem), so the weights that follow are the same, bit for bit, for
every number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rillflow.errors import ConfigError
from rillflow_classic.checkpointed import CheckpointedObjects
from rillflow_classic.executor.plan import StaticPlan
from rillflow_classic.executor.threads import StaticRun
from rillflow_classic.operators.iterators import LocalIterator, from_function
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.policy import Learner
from rillflow_classic.system import only_learner, unknown_mode
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor


class StaticSystem:
    """Actors in this process that sample on the threads of a static plan; see ``algorithm.System``.

    Args:
        actors: the actors.
        learners: learner of every policy, by name.
        threads: threads that run the actors, the caller's included.
    """

    def __init__(self, actors: Sequence[Actor], learners: Mapping[str, Learner], threads: int) -> None:
        self.actors, self.learners = actors, learners
        self.kept = CheckpointedObjects()
        plan = StaticPlan("rollouts")
        again = plan.forward("again", after=0)
        go = plan.reactor("rounds", _Rounds).react("go", plan.startup(), again)
        samples = [
            plan.reactor(f"actor {index}", partial(_Sampler, actor)).react("sample", go)
            for index, actor in enumerate(actors)
        ]
        self._joined = plan.reactor("fragments", _Joiner).react("join", samples)
        again.connect(self._joined)
        self._run = StaticRun(plan, workers=threads)

    @property
    def learner(self) -> Learner:
        """The learner, if there is one policy."""
        return only_learner(self.learners)

    def rollouts(self, mode: str, *, num_async: int = 1) -> LocalIterator:  # noqa: ARG002
        """See System.

        Raises:
            ConfigError: the mode is ``async``.
        """
        if mode == "bulk_sync":
            return from_function(self._next_round, f"static plan of {len(self.actors)} actors")
        if mode == "async":
            raise ConfigError(
                "workers.executor is 'static', and the algorithm takes fragments as they come",
                why="which actor is next then depends on time, and a static plan has a fixed pattern",
                fix='set workers.executor = "pull"',
            )
        raise unknown_mode(mode)

    def publish(self, learner: Learner | None = None) -> None:
        """Load a learner's weights into all actors; without one, those of every learner."""
        for name, each in self.learners.items():
            if learner is None or learner is each:
                self.ask_actors("load", each.version, each.weights(), name)

    def start_workers(self, pool: str, make: Callable[[int], Any]) -> WorkerSet[Any]:
        """Refuse: a static plan has no workers beside it."""
        raise ConfigError(
            f"workers.executor is 'static', and the algorithm starts workers of {pool} ({make})",
            why="its plan has actors only",
            fix='set workers.executor = "pull"',
        )

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Return the result of a method of every actor, between two tags."""
        return [getattr(actor, method)(*arguments) for actor in self.actors]

    def reset(self, seed: int) -> None:
        """Begin new episodes in all actors with random numbers of this seed, with the present weights."""
        self.publish()
        self.ask_actors("reset", seed)

    def close(self) -> None:
        """End the threads, and close all environments."""
        self._run.close()
        self.ask_actors("close")

    def _next_round(self) -> Rollout:
        self._run.step()
        found: Rollout = self._run.value(self._joined)
        return found


class _Rounds:
    def go(self, start: bool | None, again: Rollout | None) -> bool:
        """Begin a round at the start, and after every round."""
        return start is not None or again is not None


class _Sampler:
    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def sample(self, go: bool) -> Any:
        """Return the actor's next fragment."""
        del go
        return self._actor.sample()


class _Joiner:
    def join(self, fragments: Sequence[Rollout]) -> Rollout:
        """Return the fragments side by side."""
        return join(fragments)
