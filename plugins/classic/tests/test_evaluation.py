"""Evaluation: every slot plays equally many episodes, of one version, with fresh recurrent states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from rillflow_classic.environments.vector import Stepped
from rillflow_classic.evaluation import (
    MOST_FRAMES,
    greedy_actor,
    judged_episodes,
    num_slots,
    play,
    record_video,
)
from rillflow_classic.fragment import FinishedEpisode
from rillflow_classic.policy import Acted
from rillflow_classic.workers.actor import Actor


class UnequalEnvironment:
    """Slot n ends its episodes after n + 1 steps, each with reward 1; frames show the number of the step."""

    def __init__(self, slots: int) -> None:
        self.num_slots, self.agents = slots, ("",) * slots
        self.observation_space, self.action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        self.absent = np.zeros(slots, np.bool_)
        self.actions: list[Any] = []
        self.limit = 0
        self._at = np.zeros(slots, np.int64)
        self._over = np.zeros(slots, np.bool_)

    def reset(self, seed: int) -> Any:
        self._at[:], self._over[:] = 0, False
        return self._at[:, None].astype(np.float32)

    def step(self, actions: Any) -> Stepped:
        self.actions.append(actions.copy())
        resets = self._over.copy()
        self._at = np.where(resets, 0, self._at + 1)
        self._over = ~resets & (self._at > self.limit + np.arange(self.num_slots))
        return Stepped(
            observations=self._at[:, None].astype(np.float32),
            rewards=np.where(resets, 0, 1).astype(np.float32),
            terminated=self._over.copy(),
            truncated=np.zeros_like(self._over),
            episodes=[
                FinishedEpisode(total_reward=float(self._at[n]), length=int(self._at[n]), slot=int(n))
                for n in np.flatnonzero(self._over)
            ],
        )

    def render(self, slot: int) -> Any:
        return np.full((16, 16, 3), 37 * self._at[slot] % 256, np.uint8)


class CountingPolicy:
    """Acts with the number of steps of its recurrent state."""

    version = 3

    def act(self, observations: Any, state: Any = None, *, greedy: bool = False) -> Acted:
        assert greedy
        return Acted(actions=state[:, 0].astype(np.int64), state=state + 1)

    def initial_state(self, num_slots: int) -> Any:
        return np.zeros((num_slots, 1), np.float32)


def player(slots: int, steps: int = 1) -> tuple[Actor, UnequalEnvironment, CountingPolicy]:
    environment, policy = UnequalEnvironment(slots), CountingPolicy()
    made = greedy_actor(environment, {"policy": policy}, None, 0, steps)  # type: ignore[arg-type, dict-item]
    return made, environment, policy


def test_short_episodes_count_no_more_than_long_ones() -> None:
    made, environment, _ = player(3, steps=4)
    played = play(made, environment.num_slots, 2)
    assert sorted(each.total_reward for each in played) == [1, 1, 2, 2, 3, 3]
    found = judged_episodes(played, success=2.0)
    assert (found.count, found.mean_reward, found.correct) == (6, 2.0, 4)
    assert found.interval is not None and found.interval[0] < 2.0 < found.interval[1]
    assert found.text.startswith("mean return 2 [")


def test_a_recurrent_state_begins_anew_with_every_episode() -> None:
    made, environment, _ = player(2)
    for _ in range(6):
        made.sample()
    # slot 0: a step, a reset, a step, ...; the state counts on through the reset and is then fresh
    assert [int(each[0]) for each in environment.actions] == [0, 1, 0, 1, 0, 1]
    assert [int(each[1]) for each in environment.actions] == [0, 1, 2, 0, 1, 2]


def test_two_versions_never_play_one_evaluation() -> None:
    made, _, policy = player(2)
    made.sample()
    policy.version = 4
    with pytest.raises(AssertionError, match="one version"):
        made.sample()


@pytest.mark.parametrize(("episodes", "slots"), [(1, 1), (20, 10), (16, 16), (17, 1), (100, 10)])
def test_slots_divide_the_episodes(episodes: int, slots: int) -> None:
    assert num_slots(episodes) == slots


def test_a_video_is_one_episode_with_few_frames(tmp_path: Path) -> None:
    made, environment, _ = player(1)
    file = record_video(made, environment, tmp_path, "episode")  # type: ignore[arg-type]
    assert file == tmp_path / "media" / "episode.webp"
    with Image.open(file) as picture:
        assert picture.n_frames == 2  # type: ignore[attr-defined]
    longer = UnequalEnvironment(1)
    longer.limit = 900
    long = greedy_actor(longer, {"policy": CountingPolicy()}, None, 0, steps=1)  # type: ignore[arg-type, dict-item]
    with Image.open(record_video(long, longer, tmp_path, "long")) as picture:  # type: ignore[arg-type]
        assert picture.n_frames <= MOST_FRAMES  # type: ignore[attr-defined]
