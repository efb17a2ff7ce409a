"""Multi-agent environments: slots by agent, masks of agents that ended, time limits; choices and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rillflow_classic.environments import make
from rillflow_classic.environments.catalog import find
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.copies import Copies
from rillflow_classic.environments.make import choose, make_environment, make_video_environment
from rillflow_classic.environments.processes import ProcessEnvironment

FAULTY = Path(__file__).with_name("faulty.py")
TEAM = EnvironmentSettings(id=f"{FAULTY}:Team", run="inline")


def test_an_agent_that_has_ended_is_masked_until_all_have() -> None:
    environment = make_environment(TEAM, 2)
    assert environment.agents == ("a", "b", "c", "a", "b", "c") and environment.num_slots == 6
    assert environment.reset(0)[:3].tolist() == [[0, 0], [1, 0], [2, 0]]
    rows = []
    for _ in range(9):
        stepped = environment.step(np.ones(6, np.int64))
        assert np.array_equal(stepped.observations[:3], stepped.observations[3:])
        kinds = [
            "T" * int(end) + "t" * int(cut)
            for end, cut in zip(stepped.terminated, stepped.truncated, strict=True)
        ]
        steps = stepped.observations[:, 1].astype(int).tolist()
        rows.append([(steps[slot], float(stepped.rewards[slot]), kinds[slot]) for slot in range(3)])
        if stepped.episodes:
            ended = [(each.slot, each.length, each.total_reward) for each in stepped.episodes]
            rows[-1].append(ended)
    a, b, c = ([row[slot] for row in rows] for slot in range(3))
    assert a == [(1, 1, ""), (2, 1, "T"), *[(2, 0, "t")] * 4, (0, 0, ""), (1, 1, ""), (2, 1, "T")]
    assert b == [
        (1, 1, ""),
        (2, 1, ""),
        (3, 1, ""),
        (4, 1, "t"),
        *[(4, 0, "t")] * 2,
        (0, 0, ""),
        (1, 1, ""),
        (2, 1, ""),
    ]
    assert c == [*[(k, 1, "") for k in range(1, 6)], (6, 1, "T"), (0, 0, ""), (1, 1, ""), (2, 1, "")]
    told = [row[3] for row in rows if len(row) > 3]
    assert told == [
        [(0, 2, 2), (3, 2, 2)],
        [(1, 4, 4), (4, 4, 4)],
        [(2, 6, 6), (5, 6, 6)],
        [(0, 2, 2), (3, 2, 2)],
    ]


def test_a_time_limit_truncates_every_agent_that_is_left() -> None:
    environment = make_environment(TEAM.model_copy(update={"time_limit": 3}), 1)
    kinds = [environment.step(np.zeros(3, np.int64)) for _ in range(2)] and environment.step(
        np.zeros(3, np.int64)
    )
    assert kinds.truncated.tolist() == [True, True, True] and not kinds.terminated.any()
    assert environment.step(np.zeros(3, np.int64)).observations[:, 1].tolist() == [0, 0, 0]


def test_four_cartpoles_are_cartpoles() -> None:
    environment = make_environment(EnvironmentSettings(id="MultiAgentCartPole-v0", run="inline"), 1)
    assert environment.agents == tuple(f"agent_{index}" for index in range(4))
    first = environment.reset(5).copy()
    assert len({row.tobytes() for row in first}) == 4
    plain = gymnasium.make("CartPole-v1")
    plain.reset(seed=0)
    plain.unwrapped.state = first[2].astype(np.float64)  # type: ignore[attr-defined]
    for _ in range(5):
        row = environment.step(np.ones(4, np.int64)).observations[2]
        assert np.allclose(row, plain.step(1)[0], atol=1e-5)
    fewer = EnvironmentSettings(id="MultiAgentCartPole-v0", arguments={"num_agents": 2})
    assert make_environment(fewer, 3).num_slots == 6


@pytest.mark.parametrize(
    ("step_s", "num", "cores", "run"),
    [
        (5e-6, 16, 2, "inline"),
        (5e-3, 8, 2, "processes"),
        (5e-3, 1, 2, "inline"),
        (5e-3, 8, 1, "inline"),
        (5e-5, 2, 2, "inline"),
        (1e-4, 64, 2, "processes"),
    ],
)
def test_cheap_environments_run_inline_and_slow_ones_in_processes(
    step_s: float, num: int, cores: int, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "measured_step_s", lambda _: step_s)
    monkeypatch.setattr(make, "num_cores", lambda: cores)
    settings = EnvironmentSettings(provider="gymnasium")
    assert choose(settings, find(settings), Copies(num)) == run
    assert choose(settings.model_copy(update={"run": "inline"}), find(settings), Copies(num)) == "inline"


def test_the_step_time_is_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Slow(CartPoleEnv):\n"
        "    def step(self, action):\n        time.sleep(0.004)\n        return super().step(action)\n"
    )
    settings = EnvironmentSettings(id=f"{tmp_path}/slow.py:Slow", processes=2)
    with caplog.at_level("INFO"):
        environment = make_environment(settings, 8)
    assert isinstance(environment, ProcessEnvironment)
    environment.close()
    said = next(each for each in caplog.messages if "runs processes" in each)
    inline_us = float(said.split("about ")[1].split(" us")[0])
    assert 8 * 3_000 < inline_us < 8 * 400_000, said


def test_envpool_is_chosen_where_it_has_the_id() -> None:
    providers: Any = {
        id: find(EnvironmentSettings(id=id)).provider
        for id in ("CartPole-v1", "Pong-v5", "HalfCheetah-v4", "MultiAgentCartPole-v0", f"{FAULTY}:Counter")
    }
    assert list(providers.values()) == ["envpool", "envpool", "envpool", "class", "class"]


@pytest.mark.parametrize("id", ["CartPole-v1", "Pong-v5", "MultiAgentCartPole-v0"])
def test_a_video_environment_shows_what_the_policy_sees(id: str) -> None:
    settings = EnvironmentSettings(id=id, normalise_observations=id != "Pong-v5")
    environment: Any
    environment, trained = make_video_environment(settings, seed=3), make_environment(settings, 1)
    assert environment.observation_space == trained.observation_space
    assert environment.action_space == trained.action_space
    frame = environment.render(0)
    assert frame is not None and frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8
    for step in range(20):
        environment.step(np.full(environment.num_slots, step % environment.action_space.n))
    assert not np.array_equal(frame, environment.render(0))
    environment.close()


def test_an_environment_without_pictures_renders_none() -> None:
    environment = make_video_environment(EnvironmentSettings(id=f"{FAULTY}:Counter"))
    assert environment.render(0) is None
    assert environment.step(np.ones(1, np.int64)).observations[0, 0] == 1
