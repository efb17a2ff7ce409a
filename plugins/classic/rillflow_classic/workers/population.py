"""Population: population-based training (Jaderberg et al., arXiv 1711.09846).

    members, each with a learner and actors in a process of its own
        train ``every`` steps ─> mean return of their episodes ─> order
        the worst share:  exploit: weights and optimiser state of a random member of the best share
                          explore: settings of that member, each times 0.8 or 1.2, within its bounds

A step of the run is a step of every member. Random numbers depend on the seed of the run and on the step
alone, and every member begins anew after a checkpoint, as in other runs. So a resumed run makes the same
exchanges. The policies that the run evaluates and saves by name are those of the best member.

Legend: M members, S settings that differ among them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rillflow.records.metrics import Max, Mean, Metrics, Sum, merge_metrics
from rillflow.runs.reader import Evaluation
from rillflow.workers.backend import Pool, RankDied, RankLost
from rillflow_classic.build import Parts, keep_state, open_backend
from rillflow_classic.checkpointed import CheckpointedObjects, State
from rillflow_classic.config import PopulationConfig
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.policy import Learner
from rillflow_classic.running_plan import RunningPlan
from rillflow_classic.seeds import seed_of
from rillflow_classic.system import close_all
from rillflow_classic.worker_set import WorkerCall, WorkerSet

_log = logging.getLogger(__name__)
MEMBERS = "members"
"""Pool of the members."""
FACTORS = np.array([0.8, 1.2])
"""Changes of a setting in ``explored``."""
RETURN = "episode/return/mean"
"""Metric that members are ordered by."""
Numbers = NDArray[np.float64]


def exchanges(scores: Numbers, share: float, generator: np.random.Generator) -> dict[int, int]:
    """Return the better member that each replaced member copies: truncation selection.

    Args:
        scores: [M] mean returns; NaN for a member that has ended no episode, which stays.
        share: share of the members that are replaced, and of those that are copied.
        generator: chooses whom each one copies.
    """
    order = sorted((score, -index) for index, score in enumerate(scores.tolist()) if score == score)
    count = min(max(1, round(share * len(scores))), len(order) // 2)
    best = [-index for _, index in order[len(order) - count :]]
    chosen = {-index: best[int(generator.integers(count))] for _, index in order[:count]}
    return {index: copied for index, copied in chosen.items() if scores[copied] > scores[index]}


def explored(values: Numbers, bounds: Numbers, generator: np.random.Generator) -> Numbers:
    """Return values [S] times 0.8 or 1.2 each, within bounds [S, 2]."""
    changed: Numbers = values * FACTORS[generator.integers(2, size=len(values))]
    return changed.clip(*bounds.T)


def drawn_values(bounds: Numbers, generator: np.random.Generator) -> Numbers:
    """Return values [S] whose logarithms are uniform between the logarithms of bounds [S, 2]."""
    drawn: Numbers = np.exp(generator.uniform(*np.log(bounds.T)))
    return drawn.clip(*bounds.T)


def make_member(parts: Parts, index: int) -> RunningPlan:
    """Return member ``index``; its actors run in its own process."""
    workers = parts.workers.model_copy(update={"place": "inline"})
    own = replace(
        parts,
        workers=workers,
        seed=seed_of(parts.seed, index),
        first_copy=parts.first_copy + index * parts.num_copies,
    )
    return RunningPlan(own, ExitStack())


class PopulationSystem:
    """The members of a population, with the methods of a ``RunningPlan``.

    Args:
        members: the members.
        learners: learners of this process, which get the states of the best member.
        config: settings of the population.
        parts: the recipe's; the first member begins with its settings.
    """

    def __init__(
        self,
        members: WorkerSet[RunningPlan],
        learners: Mapping[str, Learner],
        config: PopulationConfig,
        parts: Parts,
    ) -> None:
        self.members = members
        self._learners, self._config, self._seed = learners, config, parts.seed
        self._names, given = sorted(config.perturb), parts.settings.model_dump()
        self._bounds = np.array([config.perturb[name] for name in self._names])
        first = np.array([float(given[name]) for name in self._names])
        others = [drawn_values(self._bounds, self._generator(0, at)) for at in range(1, members.size)]
        self.values = np.stack([first, *others])
        """[M, S] settings of every member."""
        self.scores = np.full(members.size, np.nan)
        """[M] mean returns in the last round with an episode; NaN before."""
        self.returns = np.zeros((members.size, 2))
        """[M, 2] sum and number of the returns since the last exchange."""
        self._step = 0
        self._kept = CheckpointedObjects()
        self._kept.put("population", self)
        self._all(lambda index: self._change(index, {}))
        self.context = PlanContext()
        """See RunningPlan; nothing is recorded in this process."""
        self.statistics = keep_state(self, parts.environment)
        """See RunningPlan."""

    @property
    def best(self) -> int:
        """Index of the member with the highest score; the first one before there are scores."""
        return self._best_of(range(self.members.size))

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learner of every policy, with the state of the best member."""
        self._refresh()
        return self._learners

    @property
    def kept(self) -> CheckpointedObjects:
        """See RunningPlan; the learners in it are up to date."""
        self._refresh()
        return self._kept

    def step(self) -> Metrics:
        """Make a step of every member, and let members exchange after every ``every`` steps."""
        found = self._all(lambda index: self.members.call(index, "step"))
        self._step += 1
        for index, metrics in enumerate(found):
            if isinstance(mean := metrics.get(RETURN), Mean):
                self.returns[index] += mean.total, mean.count
        changed = self.exchange() if self._step % self._config.every == 0 else {}
        own: dict[str, Any] = {"population/exchanges/sum": Sum(value=float(len(changed)))}
        if not np.isnan(self.scores).all():
            own["population/score/max"] = Max(value=float(np.nanmax(self.scores)))
        for name, column in zip(self._names, self.values.T.tolist(), strict=True):
            own[f"population/{name}/mean"] = Mean(total=sum(column), count=len(column))
        return {**merge_metrics(found), **own}

    def reset(self, seed: int) -> None:
        """See System."""
        self._all(lambda index: self.members.call(index, "reset", seed_of(seed, index)))

    def evaluations(self) -> list[Evaluation]:
        """Return nothing: a population has no evaluation worker."""
        return []

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Return the result of a method of every actor of the best member."""
        found: list[Any] = self._read(self.best, "ask_actors", method, *arguments)
        return found

    def close_environments(self) -> None:
        """See RunningPlan."""
        close_all(self.members.call_all("close_environments"))

    def state(self) -> State:
        """Return scores and settings, and the states of all members."""
        members = self._all(lambda index: self.members.call(index, "states"))
        table = torch.from_numpy(np.c_[self.scores, self.returns, self.values])
        return {"step": self._step, "table": table, "members": {str(i): m for i, m in enumerate(members)}}

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""
        self._step = state["step"]
        scores, self.returns, self.values = np.split(state["table"].numpy().copy(), [1, 3], axis=1)
        self.scores = scores[:, 0]
        self._all(lambda index: self._change(index, state["members"][str(index)]))

    def exchange(self) -> dict[int, int]:
        """Let the worst members go on from better ones; return whom each one copied."""
        totals, counts = self.returns.T
        self.scores = np.where(counts > 0, totals / np.maximum(counts, 1), self.scores)
        self.returns = np.zeros_like(self.returns)
        chosen = exchanges(self.scores, self._config.share, self._generator(self._step, 0))
        names = list(self._learners)
        states = {member: self._read(copied, "states", names) for member, copied in chosen.items()}
        for member, copied in chosen.items():
            generator = self._generator(self._step, 1 + member)
            self.values[member] = explored(self.values[copied], self._bounds, generator)
            self.scores[member] = self.scores[copied]
            _log.info("member %d goes on from member %d: %s", member, copied, self.values[member])
        self._all(lambda index: self._change(index, states[index]), sorted(states))
        return chosen

    def _refresh(self) -> None:
        """Give the learners of this process the state of the best member."""
        states = self._read(self.best, "states", list(self._learners))
        for name, learner in self._learners.items():
            learner.restore(states[name])

    def _change(self, index: int, states: Mapping[str, State]) -> WorkerCall:
        settings = dict(zip(self._names, self.values[index].tolist(), strict=True))
        return self.members.call(index, "change", settings, states, seed_of(self._seed, self._step, index))

    def _all(self, call: Callable[[int], WorkerCall], members: Sequence[int] | None = None) -> list[Any]:
        """Return the results of a call of every member; a lost one goes on from the best of the others."""
        calls = {index: call(index) for index in (range(self.members.size) if members is None else members)}
        found, lost = dict.fromkeys(calls), dict[int, RankLost]()
        for index, each in calls.items():
            try:
                found[index] = each.read()
            except RankLost as error:
                lost[index] = error
        for index, reason in lost.items():
            self._replace(index, reason, {*range(self.members.size)} - lost.keys())
            found[index] = call(index).read()
        return list(found.values())

    def _replace(self, index: int, error: RankLost, there: set[int]) -> None:
        """Start a new process for a lost member, with the learners of the best one that is there.

        Raises:
            RankDied: all members are lost.
        """
        if not there:
            raise RankDied(f"all {self.members.size} members are lost", why=str(error)) from None
        copied = self._best_of(there)
        states = self._read(copied, "states", list(self._learners))
        self.members.start_again(index, error)
        _log.warning("member %d goes on from member %d", index, copied)
        self._change(index, states).read()

    def _best_of(self, members: Iterable[int]) -> int:
        return max(sorted(members), key=np.nan_to_num(self.scores, nan=-np.inf).__getitem__)

    def _read(self, index: int, method: str, *arguments: Any) -> Any:
        return self.members.call(index, method, *arguments).read()

    def _generator(self, *parts: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *parts))


def open_population(parts: Parts, config: PopulationConfig, stack: ExitStack) -> PopulationSystem:
    """Start the members, which end with the stack."""
    backend = open_backend(parts.workers.place, [Pool(name=MEMBERS, size=config.members, world=1)], stack)
    members = WorkerSet(backend, MEMBERS, partial(make_member, parts))
    return PopulationSystem(members, parts.learners(), config, parts)
