"""Evaluation: whole episodes of one version of the weights, with the most likely actions.

    environments ── a quota of episodes for each slot ──> returns ─> mean with its 95% interval

Every slot plays equally many episodes: if the first episodes to end counted, short ones would be
overrepresented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from rillflow.formulas.interval import mean_interval
from rillflow.runs.reader import Evaluation
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.fragment import Array, FinishedEpisode
from rillflow_classic.policy import ActorPolicy
from rillflow_classic.workers.actor import restarted, routed

MOST_SLOTS = 16
"""Most environments that play at the same time."""


def num_slots(episodes: int) -> int:
    """Return the number of environments for some episodes: the largest divisor up to ``MOST_SLOTS``."""
    return max(count for count in range(1, MOST_SLOTS + 1) if episodes % count == 0)


class GreedyPlayer:
    """Environments whose agents take the most likely actions of policies that do not change meanwhile.

    Args:
        environment: its slots play.
        policies: policies by name.
        routes: policy by regular expression of its agents; None for one policy.
        seed: seed of the episodes.
    """

    def __init__(
        self,
        environment: VectorEnvironment,
        policies: Mapping[str, ActorPolicy],
        routes: Mapping[str, str] | None,
        seed: int,
    ) -> None:
        self._environment, self._policies = environment, policies
        self.num_slots = environment.num_slots
        """Number of slots that play."""
        only = next(iter(policies))
        names = np.array([routed(agent, routes) if routes else only for agent in environment.agents])
        groups = {name: np.flatnonzero(names == name) for name in policies}
        self._groups = {name: slots for name, slots in groups.items() if len(slots)}
        self._states = {name: policies[name].initial_state(len(each)) for name, each in self._groups.items()}
        self._versions = {name: policies[name].version for name in self._groups}
        self._observations = environment.reset(seed)
        self.ended: Array = np.zeros(environment.num_slots, np.bool_)
        """[N] whether an episode ended in the last step."""

    def step(self) -> Sequence[FinishedEpisode]:
        """Step every slot; return the episodes that ended."""
        actions: Array | None = None
        for name, slots in self._groups.items():
            policy = self._policies[name]
            assert policy.version == self._versions[name], "one version plays a whole evaluation"
            acted = policy.act(self._observations[slots], self._states[name], greedy=True)
            if actions is None:
                shape = (self._environment.num_slots, *acted.actions.shape[1:])
                actions = np.zeros(shape, acted.actions.dtype)
            actions[slots] = acted.actions
            if acted.state is not None:  # a slot whose episode ended resets in this step
                fresh = policy.initial_state(len(slots))
                self._states[name] = restarted(acted.state, fresh, self.ended[slots])
        assert actions is not None, "every environment has an agent"
        stepped = self._environment.step(actions)
        self._observations, self.ended = (
            stepped.observations,
            np.logical_or(stepped.terminated, stepped.truncated),
        )
        return stepped.episodes


def play(player: GreedyPlayer, num_slots: int, episodes: int) -> list[FinishedEpisode]:
    """Return the first ``episodes`` whole episodes of every slot."""
    left, played = [episodes] * num_slots, list[FinishedEpisode]()
    while any(left):
        for episode in player.step():
            if left[episode.slot]:
                left[episode.slot] -= 1
                played.append(episode)
    return played


def judged_episodes(played: Sequence[FinishedEpisode], success: float | None) -> Evaluation:
    """Summarise episodes; returns that are all equal have an interval without width.

    Args:
        played: the episodes.
        success: smallest return of a successful one; None counts none.
    """
    returns = [each.total_reward for each in played]
    return Evaluation(
        count=len(played),
        mean_reward=fmean(returns),
        correct=None if success is None else sum(each >= success for each in returns),
        is_accuracy=False,
        is_return=True,
        interval=mean_interval(returns) or ((returns[0], returns[0]) if len(returns) > 1 else None),
        more={
            "length_mean": fmean(each.length for each in played),
            "return_min": min(returns),
            "return_max": max(returns),
        },
    )
