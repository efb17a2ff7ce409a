"""Evaluation worker: judge each version of the weights by whole training episodes that it played alone.

    fragments ── episodes with the version that acted ─┬─ one version ─> N of them: a result
                                                       └─ several versions: discarded

An actor knows which weights took the actions of an episode (``FinishedEpisode.version``). An episode that
began with other weights than it ended with says nothing about either version. So a version has a result if
its weights stay at the actors for as long as N episodes last: short episodes, or rare publications.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rillflow.errors import ConfigError
from rillflow.runs.reader import Evaluation
from rillflow_classic.evaluation import judged_episodes
from rillflow_classic.fragment import FinishedEpisode

MAX_VERSIONS = 16
"""Versions whose episodes are kept until there are enough; the oldest are dropped."""
TRAINING = "training"
"""Name of the set of these episodes."""


class EvaluationWorker:
    """Judges every version by its first whole episodes.

    Args:
        episodes: episodes of a result.
        success: smallest return of a successful episode; None counts none.
    """

    def __init__(self, episodes: int, success: float | None = None) -> None:
        if episodes < 1:
            raise ConfigError(f"an evaluation has {episodes} episodes", why="a result needs at least one")
        self._wanted, self._success = episodes, success
        self.waiting: dict[tuple[str, int], list[FinishedEpisode]] = {}
        """Episodes that wait for more of their version, by policy and version."""
        self._judged: dict[str, int] = {}

    def add(self, policy: str, episodes: Sequence[FinishedEpisode]) -> list[Evaluation]:
        """Take episodes of a policy, and return results, with ``policy`` and ``version`` in ``more``.

        A version that is not newer than the last result is dropped.
        """
        for each in episodes:
            if each.version > self._judged.get(policy, -1):
                self.waiting.setdefault((policy, each.version), []).append(each)
        found = []
        for version in sorted(number for name, number in self.waiting if name == policy):
            played = self.waiting[policy, version]
            if len(played) >= self._wanted:
                result = judged_episodes(played[: self._wanted], self._success)
                more = {**result.more, "policy": policy, "version": version}
                found.append(replace(result, set=TRAINING, more=more))
                self._judged[policy] = version
        versions = sorted(number for name, number in self.waiting if name == policy)
        for number in versions:
            if number <= self._judged.get(policy, -1) or number not in versions[-MAX_VERSIONS:]:
                del self.waiting[policy, number]
        return found
