"""Population: population-based training (Jaderberg et al., arXiv 1711.09846).

    members, each with a learner and actors in a process of its own
        train ``every`` steps ─> mean return of their episodes ─> order
        the worst share:  exploit: weights and optimiser state of a random member of the best share
                          explore: settings of that member, each times 0.8 or 1.2, within its bounds

A step of the run is a step of every member. Random numbers depend on the seed of the run and on the step
alone, and every member begins anew after a checkpoint, as in other runs. So a resumed run makes the same
exchanges. The policies that the run evaluates and saves by name are those of the best member.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rillflow.errors import ClusterError
from rillflow.records.metrics import Max, Mean, Metrics, Sum, merge_metrics
from rillflow.runs.json_lines import JSON
from rillflow.workers.backend import Pool, RankLost
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.build import BACKENDS, EnvironmentStatistics, Parts, open_system
from rillflow_classic.checkpointed import CheckpointedObjects, State
from rillflow_classic.config import PopulationConfig, perturbed
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.operators.iterators import LocalIterator, from_function
from rillflow_classic.policy import Learner
from rillflow_classic.worker_set import DEADLINE_S, WorkerCall, WorkerSet

_log = logging.getLogger(__name__)
MEMBERS = "members"
"""Pool of the members."""
FACTORS = (0.8, 1.2)
"""Changes of a setting in ``explore``."""
RETURN = "episode/return/mean"
"""Metric that members are ordered by."""
Settings = dict[str, float]
"""Values of the perturbed settings by name."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A member that goes on from another one."""

    member: int
    """Index of the member."""
    copied: int
    """Index of the better one whose learners and settings it gets."""


def exchanges(scores: Sequence[float], share: float, generator: np.random.Generator) -> list[Exchange]:
    """Return which members are replaced: truncation selection.

    Args:
        scores: mean return of every member; NaN for one that has ended no episode, which stays.
        share: share of the members that are replaced, and of those that are copied.
        generator: chooses whom each one copies.
    """
    order = sorted((score, -index) for index, score in enumerate(scores) if not math.isnan(score))
    count = min(max(1, round(share * len(scores))), len(order) // 2)
    best = [-index for _, index in order[len(order) - count :]]
    worst = [-index for _, index in order[:count]]
    chosen = [(index, best[int(generator.integers(count))]) for index in worst]
    return [Exchange(member=index, copied=at) for index, at in chosen if scores[at] > scores[index]]


def explored(
    settings: Settings, bounds: Mapping[str, tuple[float, float]], generator: np.random.Generator
) -> Settings:
    """Return each setting times 0.8 or 1.2, within its bounds."""
    return {
        name: float(np.clip(settings[name] * FACTORS[int(generator.integers(2))], low, high))
        for name, (low, high) in bounds.items()
    }


def drawn_settings(bounds: Mapping[str, tuple[float, float]], generator: np.random.Generator) -> Settings:
    """Return a value of each setting whose logarithm is uniform between its bounds."""
    logs = {name: generator.uniform(math.log(low), math.log(high)) for name, (low, high) in bounds.items()}
    return {name: float(np.clip(math.exp(each), *bounds[name])) for name, each in logs.items()}


class PopulationMember:
    """One member: a system of calls in this process, and the plan of its algorithm.

    Args:
        parts: the member's parts, with a seed of its own.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._stack = parts, ExitStack()
        self._open({}, {})

    def step(self) -> Metrics:
        """Make a step of the plan."""
        return {**next(self._items), **self._context.take_metrics()}

    def reset(self, seed: int) -> None:
        """Begin new episodes and a new plan."""
        self._system.reset(seed)
        plan: Any = algorithm_of(self._parts.algorithm).plan(self._system, self._settings)
        self._context = PlanContext()
        self._items: Iterator[Metrics] = plan.run(self._context)

    def change(self, settings: Settings, states: Mapping[str, State], seed: int) -> None:
        """Go on with other settings, and with the given states in place of its own.

        Learners and actors are made anew, because either may have read a setting when it was made.
        """
        self._open(settings, {**self.states(), **states})
        self.reset(seed)

    def states(self, names: Sequence[str] = ()) -> dict[str, State]:
        """Return the states of some objects; of all without names: learners, buffers, environments."""
        return self._system.kept.states(names)

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """See System."""
        return self._system.ask_actors(method, *arguments)

    def _open(self, settings: Settings, states: Mapping[str, State]) -> None:
        self._settings = perturbed(self._parts.settings, settings)
        self._stack.close()
        self._stack = ExitStack()
        self._system = open_system(replace(self._parts, settings=self._settings), self._stack)
        kept = self._system.kept
        kept.take(states)
        for name, learner in self._system.learners.items():
            kept.keep(name, partial(_given, learner))
        if self._parts.environment.normalise_observations or self._parts.environment.normalise_rewards:
            kept.keep("environments", partial(EnvironmentStatistics, self._system))


def make_member(parts: Parts, seeds: Sequence[int], index: int) -> PopulationMember:
    """Return member ``index``; its actors run in its own process."""
    workers = parts.workers.model_copy(update={"place": "inline"})
    return PopulationMember(replace(parts, workers=workers, seed=seeds[index]))


class PopulationSystem:
    """The members of a population, as the system of a run.

    Args:
        members: the members.
        learners: learners of this process, which get the states of the best member.
        config: settings of the population.
        first: values of the perturbed settings in the recipe; the first member begins with them.
        seed: seed of the run.
    """

    def __init__(
        self,
        members: WorkerSet[PopulationMember],
        learners: Mapping[str, Learner],
        config: PopulationConfig,
        first: Settings,
        seed: int,
    ) -> None:
        self.members = members
        self._learners, self._config, self._seed = learners, config, seed
        self._bounds = dict(sorted(config.perturb.items()))
        others = range(1, members.size)
        self.settings = [first, *(drawn_settings(self._bounds, self._generator(0, each)) for each in others)]
        """Values of the perturbed settings of every member."""
        self.scores = [math.nan] * members.size
        """Mean return of every member in its last round with an episode."""
        self._returns: list[Metrics] = [{} for _ in self.settings]
        self._step, self._is_stale = 0, True
        self._kept = CheckpointedObjects()
        self._kept.keep("population", partial(_given, self))
        self._all(lambda index: self._change(index, {}))

    @property
    def best(self) -> int:
        """Index of the member with the highest score; the first one before there are scores."""
        return max(range(self.members.size), key=lambda at: (_known(self.scores[at]), -at))

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learner of every policy, with the state of the best member."""
        self._refresh()
        return self._learners

    @property
    def kept(self) -> CheckpointedObjects:
        """See System; the learners in it are up to date."""
        self._refresh()
        return self._kept

    def plan(self) -> LocalIterator:
        """Return the dataflow: an item is a step of every member."""
        return from_function(self.step, "members")

    def step(self) -> Metrics:
        """Make a step of every member, and let members exchange after every ``every`` steps."""
        found = self._all(lambda index: self.members.call(index, "step"))
        self._step, self._is_stale = self._step + 1, True
        self._returns = [
            merge_metrics([held, {RETURN: metrics[RETURN]} if RETURN in metrics else {}])
            for held, metrics in zip(self._returns, found, strict=True)
        ]
        changed: Sequence[Exchange] = ()
        if self._step % self._config.every == 0:
            changed = self._exchange()
        of_settings = [
            {f"population/{name}/mean": Mean(total=value, count=1) for name, value in each.items()}
            for each in self.settings
        ]
        known = [score for score in self.scores if not math.isnan(score)]
        best: Metrics = {"population/score/max": Max(value=max(known))} if known else {}
        exchanged: Metrics = {"population/exchanges/sum": Sum(value=float(len(changed)))}
        return merge_metrics([*found, *of_settings, best, exchanged])

    def reset(self, seed: int) -> None:
        """See System."""
        self._all(lambda index: self.members.call(index, "reset", _seed_of(seed, index)))

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Return the result of a method of every actor of the best member."""
        found: list[Any] = self._read(self.best, "ask_actors", method, *arguments)
        return found

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, JSON]]:
        """Return scores and settings, and the states of all members."""
        found = self._all(lambda index: self.members.call(index, "states"))
        tensors, states = dict[str, Tensor](), list[JSON]()
        for index, member in enumerate(found):
            states.append({name: dict(state) for name, (_, state) in member.items()})
            for name, (held, _) in member.items():
                tensors |= {f"{index}/{name}/{key}": value for key, value in held.items()}
        scores: list[JSON] = [None if math.isnan(score) else score for score in self.scores]
        returns: list[JSON] = [
            [each.total, each.count] if isinstance(each := held.get(RETURN), Mean) else None
            for held in self._returns
        ]
        settings: list[JSON] = [dict(each) for each in self.settings]
        return tensors, {
            "step": self._step,
            "scores": scores,
            "returns": returns,
            "settings": settings,
            "members": states,
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        members: list[dict[str, Any]] = [
            {name: ({}, each) for name, each in member.items()} for member in state["members"]
        ]
        for key, value in tensors.items():
            index, name, rest = key.split("/", 2)
            members[int(index)][name][0][rest] = value
        self._step, self._is_stale = int(state["step"]), True
        self.scores = [math.nan if score is None else score for score in state["scores"]]
        self.settings = [dict(each) for each in state["settings"]]
        self._returns = [
            {} if held is None else {RETURN: Mean(total=held[0], count=held[1])} for held in state["returns"]
        ]
        self._all(lambda index: self._change(index, members[index]))

    def _exchange(self) -> Sequence[Exchange]:
        """Let the worst members go on from better ones."""
        for index, held in enumerate(self._returns):
            if RETURN in held and not math.isnan(held[RETURN].value):
                self.scores[index] = float(held[RETURN].value)
        self._returns = [{} for _ in self.settings]
        chosen = exchanges(self.scores, self._config.share, self._generator(self._step, 0))
        names = list(self._learners)
        copied = {each.copied: self._read(each.copied, "states", names) for each in chosen}
        for each in chosen:
            generator = self._generator(self._step, 1 + each.member)
            self.settings[each.member] = explored(self.settings[each.copied], self._bounds, generator)
            self.scores[each.member] = self.scores[each.copied]
            _log.info("member %d goes on from member %d: %s", each.member, each.copied, self.settings)
        states = {each.member: copied[each.copied] for each in chosen}
        self._all(lambda index: self._change(index, states[index]), sorted(states))
        return chosen

    def _change(self, index: int, states: Mapping[str, State]) -> WorkerCall:
        seed = _seed_of(self._seed, self._step, index)
        return self.members.call(index, "change", self.settings[index], states, seed)

    def _refresh(self) -> None:
        """Give the learners of this process the state of the best member."""
        if not self._is_stale:
            return
        states = self._read(self.best, "states", list(self._learners))
        for name, learner in self._learners.items():
            learner.restore(*states[name])
        self._is_stale = False

    def _all(self, call: Callable[[int], WorkerCall], members: Sequence[int] | None = None) -> list[Any]:
        """Return the results of a call of every member; a lost one goes on from the best of the others."""
        every = range(self.members.size) if members is None else members
        calls = [(index, call(index)) for index in every]
        found, lost = {}, {}
        for index, each in calls:
            try:
                found[index] = each.read(DEADLINE_S)
            except RankLost as error:
                lost[index] = error
        for index, reason in lost.items():
            self._replace(index, reason, set(lost))
            found[index] = call(index).read(DEADLINE_S)
        return [found[index] for index in every]

    def _replace(self, index: int, error: RankLost, lost: set[int]) -> None:
        """Start a new process for a lost member, with the learners of the best one that is there.

        Raises:
            ClusterError: all members are lost.
        """
        there = sorted({*range(self.members.size)} - lost, key=lambda at: _known(self.scores[at]))
        if not there:
            raise ClusterError(f"all {self.members.size} members are lost", why=str(error)) from None
        copied = there[-1]
        _log.warning("member %d is lost, and goes on from member %d: %s", index, copied, error)
        states = self._read(copied, "states", list(self._learners))
        self.members.replace(index).read(DEADLINE_S)
        self.members.make_again(index).read(DEADLINE_S)
        self._change(index, states).read(DEADLINE_S)

    def _read(self, index: int, method: str, *arguments: Any) -> Any:
        return self.members.call(index, method, *arguments).read(DEADLINE_S)

    def _generator(self, *parts: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *parts))


def open_population(parts: Parts, config: PopulationConfig, stack: ExitStack) -> PopulationSystem:
    """Start the members, which end with the stack, and return the system of a run."""
    backend = BACKENDS[parts.workers.place]()
    stack.callback(backend.close)
    backend.open([Pool(name=MEMBERS, size=config.members, world=1)])
    seeds = [_seed_of(parts.seed, index) for index in range(config.members)]
    members = WorkerSet(backend, MEMBERS, partial(make_member, parts, seeds))
    given = parts.settings.model_dump()
    first = {name: float(given[name]) for name in sorted(config.perturb)}
    return PopulationSystem(members, parts.learners(), config, first, parts.seed)


def _given(value: Any) -> Any:
    return value


def _known(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _seed_of(*parts: int) -> int:
    """Return a seed below 2^31 made of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)
