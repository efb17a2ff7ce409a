"""System: the way from actors to learners and back, behind one interface for plans.

CallSystem      plan ── call sample ──> actors       load ──> actors            (RLlib Flow)
StreamSystem    actors ── sample stream ──> plan     parameters ──> policy workers, actors  (SRL)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rillflow.errors import ConfigError
from rillflow.workers.backend import RankLost
from rillflow_classic.fragment import Fragment, joined
from rillflow_classic.operators.iterators import LocalIterator, from_workers
from rillflow_classic.policy import Learner
from rillflow_classic.worker_set import DEADLINE_S, WorkerCall, WorkerSet
from rillflow_classic.workers.actor import Actor, joined_by_policy

Rollout = Fragment | dict[str, Fragment]
"""Fragment of an actor; by policy if there are several."""


class CallSystem:
    """Actors that sample when they are called; the policies act in the actors.

    Args:
        actors: the actors.
        learners: learner of every policy, by name.

    Example:
        system = CallSystem(actors, {"policy": learner})
        for fragment in system.rollouts("bulk_sync"):
            learner.update(fragment)
            system.publish()
    """

    def __init__(self, actors: WorkerSet[Actor], learners: Mapping[str, Learner]) -> None:
        self.actors, self.learners = actors, learners
        self._loads: list[WorkerCall] = []

    @property
    def learner(self) -> Learner:
        """The learner, if there is one policy."""
        return only_learner(self.learners)

    def rollouts(self, mode: str, *, num_async: int = 1) -> LocalIterator:
        """See System."""
        items = from_workers(self.actors, "sample")
        match mode:
            case "bulk_sync":
                return items.batch_across_workers().for_each(join_rollouts)
            case "async":
                return items.gather_async(num_async)
        raise unknown_mode(mode)

    def publish(self, learner: Learner | None = None) -> None:
        """Send a learner's weights to all actors; without one, those of every learner.

        A call of ``sample`` that is submitted afterwards acts with them.
        """
        self._loads = check_calls(self._loads)
        for name, each in self.learners.items():
            if learner is None or learner is each:
                self._loads += self.actors.call_all("load", each.version, each.weights(), name)

    def reset(self, seed: int) -> None:
        """Begin new episodes in all actors with random numbers of this seed, with the present weights."""
        self.publish()
        for call in self.actors.call_all("reset", seed):
            call.read(DEADLINE_S)


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Return the fragments of several actors as one, policy by policy."""
    single = [each for each in rollouts if isinstance(each, Fragment)]
    several = [each for each in rollouts if not isinstance(each, Fragment)]
    return joined_by_policy(several) if several else joined(single)


def check_calls(calls: Sequence[WorkerCall]) -> list[WorkerCall]:
    """Raise the error of a call that failed, and return those that have not ended.

    The loss of a worker is no error here: it ends the calls that someone reads.
    """
    for call in calls:
        if call.is_ready:
            try:
                call.read(0.0)
            except RankLost:
                continue
    return [call for call in calls if not call.is_ready]


def only_learner(learners: Mapping[str, Learner]) -> Learner:
    """Return the learner.

    Raises:
        ConfigError: there are several policies.
    """
    if len(learners) != 1:
        raise ConfigError(
            f"the learner of {len(learners)} policies is asked for",
            why=f"each policy has its own: {', '.join(learners)}",
            fix="choose one by name: system.learners[NAME]",
        )
    return next(iter(learners.values()))


def unknown_mode(mode: str) -> ConfigError:
    """Return the error for a mode of rollouts that does not exist."""
    return ConfigError(f"rollouts have no mode {mode!r}", why="the modes are bulk_sync and async")
