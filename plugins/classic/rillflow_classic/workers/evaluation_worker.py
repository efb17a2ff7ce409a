"""Evaluation worker: judge policies by finished episodes, each version of the weights by its own.

    fragments of any actors ── episodes with the versions that acted ─┬─ one version ─> N of them: a result
                                                                      └─ several versions: discarded

An episode may begin in one fragment and end in a later one, with other weights. It says nothing about either
version, so it does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rillflow.errors import ConfigError
from rillflow.runs.reader import Evaluation
from rillflow_classic.evaluation import judged_episodes
from rillflow_classic.fragment import FinishedEpisode, Fragment
from rillflow_classic.streams.stream import FragmentSource

MAX_VERSIONS = 16
"""Versions whose episodes are kept until there are enough; the oldest are dropped."""
_NO_VERSION = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class VersionResult:
    """What the episodes of one version of a policy's weights say."""

    policy: str
    """Name of the policy."""
    version: int
    """The version that took every action of these episodes."""
    evaluation: Evaluation
    """Mean return with its interval."""


class EvaluationWorker:
    """Judges every version by its first whole episodes.

    Args:
        episodes: episodes of a result.
        success: smallest return of a successful episode; None counts none.
        source: stream that ``poll`` takes fragments from; None: they are given to ``add``.
    """

    def __init__(
        self, episodes: int, success: float | None = None, source: FragmentSource | None = None
    ) -> None:
        if episodes < 1:
            raise ConfigError(f"an evaluation has {episodes} episodes", why="a result needs at least one")
        self._wanted, self._success, self._source = episodes, success, source
        self._bounds: dict[tuple[str, int, int], Any] = {}
        self._played: dict[tuple[str, int], list[FinishedEpisode]] = {}
        self._published: dict[str, int] = {}
        self.mixed = 0
        """Episodes in which several versions acted; they were discarded."""
        self.late = 0
        """Episodes of versions that are not newer than the last result; they were discarded."""

    def add(self, fragment: Fragment, lane: int = 0) -> list[VersionResult]:
        """Take a fragment; fragments of a lane come in order. Return results in the order of versions."""
        found = []
        for episode, first, last in self._ended(fragment, lane):
            if first != last:
                self.mixed += 1
            elif first <= self._published.get(fragment.policy, -1):
                self.late += 1
            else:
                self._played.setdefault((fragment.policy, first), []).append(episode)
        for version in sorted(number for policy, number in self._played if policy == fragment.policy):
            played = self._played[fragment.policy, version]
            if len(played) >= self._wanted:
                judged = judged_episodes(played[: self._wanted], self._success)
                found.append(VersionResult(policy=fragment.policy, version=version, evaluation=judged))
                self._published[fragment.policy] = version
        self._forget(fragment.policy)
        return found

    def poll(self, wait_s: float) -> list[VersionResult]:
        """Take what has arrived on the stream, and return results."""
        assert self._source is not None, "the worker has no stream"
        found = []
        for received in self._source.take(wait_s):
            for fragment in received.fragments.values():
                found += self.add(fragment, received.lane)
            received.release()
        return found

    def reset(self) -> None:
        """Drop unfinished episodes: the actors begin new ones."""
        self._bounds.clear()

    @property
    def waiting(self) -> Mapping[tuple[str, int], int]:
        """Number of episodes that wait for more of their version, by policy and version."""
        return {key: len(played) for key, played in self._played.items()}

    def _ended(self, fragment: Fragment, lane: int) -> list[tuple[FinishedEpisode, int, int]]:
        """Return each episode that ended in a fragment, with its lowest and its highest version."""
        steps, slots = fragment.valid.shape
        key = (fragment.policy, fragment.actor, lane)
        bounds = self._bounds.setdefault(key, np.tile([[_NO_VERSION], [-1]], (1, slots)))
        low = np.where(fragment.valid, fragment.versions[:, None], _NO_VERSION)
        high = np.where(fragment.valid, fragment.versions[:, None], -1)
        waiting: dict[int, list[FinishedEpisode]] = {}
        for episode in fragment.episodes:
            waiting.setdefault(episode.slot, []).append(episode)
        found, begins = [], np.zeros(slots, np.int64)
        for slot, episodes in waiting.items():
            ends = np.flatnonzero(fragment.ended[:, slot])
            for end, episode in zip(ends.tolist(), episodes, strict=True):
                rows = slice(int(begins[slot]), end + 1)
                first = min(int(bounds[0, slot]), int(low[rows, slot].min()))
                last = max(int(bounds[1, slot]), int(high[rows, slot].max()))
                found.append((episode, first, last))
                bounds[:, slot] = _NO_VERSION, -1
                begins[slot] = end + 1
        is_open = np.arange(steps)[:, None] >= begins
        bounds[0] = np.minimum(bounds[0], np.where(is_open, low, _NO_VERSION).min(axis=0))
        bounds[1] = np.maximum(bounds[1], np.where(is_open, high, -1).max(axis=0))
        return found

    def _forget(self, policy: str) -> None:
        """Drop episodes of versions that cannot have a result any more, and of the oldest versions."""
        newest = self._published.get(policy, -1)
        versions = sorted(number for name, number in self._played if name == policy)
        kept = [number for number in versions if number > newest][-MAX_VERSIONS:]
        for number in set(versions) - set(kept):
            del self._played[policy, number]
