"""Conformance: Gymnasium's and PettingZoo's own checks of the environments that are shipped here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from rillflow_classic.environments.minatar_adapter import GAMES, MinAtarGame
from rillflow_classic.environments.multi_agent_cartpole import MultiAgentCartPole
from rillflow_classic.environments.point_navigation import PointNavigation

CORRIDOR = Path(__file__).parents[1] / "examples/corridor.py"


def corridor() -> Any:
    """Return the environment of the page."""
    spec = importlib.util.spec_from_file_location("corridor_of_the_page", CORRIDOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Corridor()


@pytest.mark.parametrize("make", [PointNavigation, lambda: PointNavigation(goal=1.0, swirl=0.1), corridor])
def test_gymnasium_accepts_our_environments(make: Any) -> None:
    """Odd bounds are warnings, and errors raise."""
    check_env(make(), skip_render_check=True)


@pytest.mark.parametrize("id", sorted(GAMES))
def test_gymnasium_accepts_the_games_of_minatar(id: str) -> None:
    pytest.importorskip("minatar")
    check_env(MinAtarGame(*GAMES[id], render_mode="rgb_array"), skip_render_check=True)


def test_a_check_that_passes_would_refuse_a_wrong_environment() -> None:
    class Wrong(PointNavigation):
        def reset(self, **given: Any) -> Any:
            return super().reset(**given)[0]

    with pytest.raises(AssertionError):
        check_env(Wrong(), skip_render_check=True)


def test_pettingzoo_accepts_our_cartpoles() -> None:
    zoo, checks = pytest.importorskip("pettingzoo"), pytest.importorskip("pettingzoo.test")

    class Zoo(MultiAgentCartPole, zoo.ParallelEnv):  # type: ignore[name-defined, misc]
        """The same in PettingZoo's class, which its check wants."""

    checks.parallel_api_test(Zoo(), num_cycles=300)


def test_cartpoles_reset_and_step_by_the_parallel_form() -> None:
    """Check what PettingZoo's own test checks, also on machines without PettingZoo."""
    environment = MultiAgentCartPole(3)
    observations, infos = environment.reset(seed=1)
    assert observations.keys() == infos.keys() == set(environment.possible_agents) == set(environment.agents)
    for agent in environment.possible_agents:
        space = environment.observation_space(agent)
        assert space is environment.observation_space(agent) and space.contains(observations[agent])
        assert isinstance(environment.action_space(agent), gymnasium.spaces.Discrete)
    while live := set(environment.agents):
        results = environment.step(dict.fromkeys(environment.agents, 1))
        assert all(each.keys() == live for each in results)
        ended = {agent for agent in live if results[2][agent] or results[3][agent]}
        assert set(environment.agents) == live - ended
    environment.close()
