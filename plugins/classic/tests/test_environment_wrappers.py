"""Wrappers: stacks across resets, normalisation against numpy, saved and frozen statistics."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.preprocessing import DISCOUNT, Preprocessing, RunningMoments
from rillflow_classic.environments.vector import Stepped, VectorEnvironment
from rillflow_classic.fragment import Array


class Script(VectorEnvironment):
    """A vector environment that plays given rows."""

    def __init__(self, observations: Any, rewards: Any, ended: Any, dtype: Any = np.float32) -> None:
        self.rows = observations.astype(dtype)
        self.rewards, self.ended = rewards.astype(np.float32), ended
        space = gymnasium.spaces.Box(0, 200, self.rows.shape[2:], dtype)
        super().__init__(("",) * ended.shape[1], space, gymnasium.spaces.Discrete(2))
        self.at = 0

    def begin(self, seed: int) -> Array:
        self.at = 0
        return self.rows[0].copy()

    def advance(self, actions: Array) -> Stepped:
        self.at += 1
        ended = self.ended[self.at - 1]
        return Stepped(
            observations=self.rows[self.at].copy(),
            rewards=self.rewards[self.at - 1].copy(),
            terminated=ended,
            truncated=np.zeros_like(ended),
        )


def script(
    seed: int, steps: int = 30, slots: int = 3, shape: tuple[int, ...] = (2,), dtype: Any = np.float32
) -> Script:
    chooser = np.random.default_rng(seed)
    ended = chooser.random((steps, slots)) < 0.2
    ended[1:] &= ~ended[:-1]
    rewards = chooser.normal(3, 2, (steps, slots))
    rewards[1:][ended[:-1]] = 0.0
    rows = np.abs(chooser.normal(5, 20, (steps + 1, slots, *shape)))
    return Script(rows, rewards, ended, dtype)


def changed(inner: Script, frames: int = 1, **given: Any) -> Script:
    space, config = inner.observation_space, EnvironmentSettings(**given)
    inner.preprocess(Preprocessing(config, frames, inner.num_slots, space))
    return inner


def stepped(environment: Any, steps: int) -> list[Stepped]:
    found = []
    for _ in range(steps):
        row = environment.step(np.zeros(environment.num_slots, np.int64))
        found.append(
            Stepped(
                observations=row.observations.copy(),
                rewards=row.rewards.copy(),
                terminated=row.terminated.copy(),
                truncated=row.truncated.copy(),
            )
        )
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), frames=st.integers(2, 6), shape=st.sampled_from([(2,), (3, 4), ()]))
def test_a_stack_holds_the_last_frames_of_its_own_episode(
    seed: int, frames: int, shape: tuple[int, ...]
) -> None:
    inner = script(seed, shape=shape, dtype=np.uint8)
    stack = changed(inner, frames)
    assert stack.observation_space.shape == (frames, *shape) and stack.observation_space.dtype == np.uint8
    found = [stack.reset(0).copy(), *(row.observations for row in stepped(stack, 30))]
    for slot in range(inner.num_slots):
        episode: list[Any] = []
        for row in range(31):
            if row >= 2 and inner.ended[row - 2, slot]:
                episode = []
            episode.append(inner.rows[row, slot])
            wanted = ([episode[0]] * frames + episode)[-frames:]
            assert np.array_equal(found[row][slot], np.array(wanted)), (row, slot)


def test_a_stack_moves_no_older_frames() -> None:
    stack = changed(script(0), 4)
    first = stack.reset(0)
    assert np.shares_memory(first, stack.step(np.zeros(3, np.int64)).observations)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.just(3)), elements=st.floats(-1e4, 1e4)),
        min_size=1,
        max_size=6,
    )
)
def test_running_moments_are_the_moments_of_all(parts: list[Any]) -> None:
    moments, every = RunningMoments((3,)), np.concatenate(parts)
    for part in parts:
        moments.add(part)
    assert np.allclose(moments.mean, every.mean(0), atol=1e-6) and moments.count == len(every)
    if len(every) > 1:
        assert np.allclose(moments.squares / moments.count, every.var(0), rtol=1e-6, atol=1e-3)


def test_observations_are_scaled_by_all_that_were_seen() -> None:
    inner = script(3)
    environment = changed(inner, normalise_observations=True)
    found = [environment.reset(0), *(row.observations for row in stepped(environment, 30))]
    for row in range(31):
        seen = inner.rows[: row + 1].reshape(-1, 2).astype(np.float64)
        wanted = np.clip((inner.rows[row] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -10, 10)
        assert np.allclose(found[row], wanted, atol=1e-4) and found[row].dtype == np.float32


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_rewards_are_divided_by_the_deviation_of_discounted_returns(seed: int) -> None:
    inner = script(seed)
    environment = changed(inner, normalise_rewards=True)
    environment.reset(0)
    found = stepped(environment, 30)
    total, seen = np.zeros(3), []
    for row in range(30):
        after_end = inner.ended[row - 1] if row else np.zeros(3, bool)
        total = np.where(after_end, 0.0, total) * DISCOUNT + inner.rewards[row]
        seen += total[~after_end].tolist()
        wanted = inner.rewards[row] / np.sqrt(np.var(seen) + 1e-8)
        assert np.allclose(found[row].rewards, wanted, rtol=1e-4) and found[row].rewards.dtype == np.float32


def test_rewards_are_clipped() -> None:
    inner = script(1)
    assert np.array_equal(
        stepped(changed(inner, clip_rewards=True), 30)[4].rewards, np.clip(inner.rewards[4], -1, 1)
    )


def chosen(**given: Any) -> EnvironmentSettings:
    return EnvironmentSettings(
        **{
            "id": "CartPole-v1",
            "normalise_observations": True,
            "normalise_rewards": True,
            "run": "inline",
            **given,
        }
    )


@pytest.mark.parametrize("provider", ["envpool", "gymnasium"])
def test_saved_statistics_go_on_and_frozen_ones_stay(provider: str) -> None:
    one = make_environment(chosen(provider=provider), 4)
    stepped(one, 50)
    state = {name: value.copy() for name, value in one.state().items()}
    assert set(state) == {
        f"{part}.{each}" for part in ("observations", "rewards") for each in ("mean", "squares", "count")
    }
    other = make_environment(chosen(provider=provider), 4, seed=9)
    other.restore(state)
    assert np.array_equal(one.reset(3), other.reset(3))
    assert all(
        np.array_equal(a.observations, b.observations) and np.array_equal(a.rewards, b.rewards)
        for a, b in zip(stepped(one, 20), stepped(other, 20), strict=True)
    )
    assert one.state()["observations.count"] > state["observations.count"]
    other.restore(state, frozen=True)
    other.reset(4)
    stepped(other, 20)
    assert all(np.array_equal(value, state[name]) for name, value in other.state().items())


def test_finished_episodes_have_the_rewards_of_the_environment() -> None:
    environment = make_environment(chosen(clip_rewards=True, frame_stack=3), 4)
    assert environment.observation_space.shape == (3, 4)
    episodes = [e for _ in range(100) for e in environment.step(np.ones(4, np.int64)).episodes]
    assert episodes and all(episode.total_reward == episode.length for episode in episodes)


@pytest.mark.parametrize("clip", [False, True])
def test_atari_stacks_four_frames_unless_told(clip: bool) -> None:
    settings = [EnvironmentSettings(id="ALE/Pong-v5", frame_stack=k, clip_rewards=clip) for k in (0, 2)]
    shapes = [make_environment(each, 1).observation_space.shape for each in settings]
    assert shapes == [(4, 84, 84), (2, 84, 84)], "EnvPool stacks them itself"
