"""Agents that end and return, or come late: every live agent acts, or one error says which does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rillflow
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import EnvironmentFailure
from rillflow_classic.evaluation import greedy_actor
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.build import build_network
from rillflow_classic.networks.config import NetworkConfig

ODD = Path(__file__).with_name("odd.py")


def made(kind: str, run: str = "inline", slots: int = 1, **settings: Any) -> Any:
    given = {"id": f"{ODD}:Society", "run": run, "arguments": {"kind": kind}, **settings}
    return make_environment(EnvironmentSettings.model_validate(given), slots)


def of_b(environment: Any, steps: int) -> list[tuple[int, float, str]]:
    """Return the step that agent b sees, its reward and its end, by step."""
    rows = []
    for _ in range(steps):
        found = environment.step(np.zeros(environment.num_slots, np.int64))
        end = "T" * int(found.terminated[1]) + "t" * int(found.truncated[1])
        rows.append((int(found.observations[1, 1]) - 1, float(found.rewards[1]), end))
        rows += [("episode", each.length, each.total_reward) for each in found.episodes if each.slot == 1]
    return rows


@pytest.mark.parametrize("run", ["inline", "processes"])
def test_an_agent_that_returns_begins_an_episode(run: str) -> None:
    environment = made("returns", run, 2)
    rows = of_b(environment, 8)
    assert rows == [
        *[(1, 1, ""), (2, 1, "T"), ("episode", 2, 2)],
        *[(2, 0, "t"), (4, 0, "")],
        *[(5, 1, ""), (6, 1, "T"), ("episode", 2, 2)],
        *[(0, 0, ""), (1, 1, "")],
    ]
    environment.close()


@pytest.mark.parametrize("kind", ["late", "late, shown"])
def test_an_agent_that_comes_late_has_no_rows_before(kind: str) -> None:
    environment = made(kind)
    assert environment.absent.tolist() == [False, True, False]
    rows = of_b(environment, 9)
    begin = [(0, 0, "t")] * 3 + [(4, 0, ""), (5, 1, ""), (6, 1, "T"), ("episode", 2, 2)]
    assert rows == [*begin, (0, 0, "t"), (0, 0, "t"), (0, 0, "t")]


def test_a_fragment_masks_the_rows_before_an_agent_comes() -> None:
    environment = made("late", normalise_observations=True)
    network = build_network(
        NetworkConfig(hidden=(8,)), environment.observation_space, environment.action_space, 0
    )
    fragment: Any = greedy_actor(environment, {"policy": NetworkPolicy(network, seed=0)}, None, 0, 6).sample()
    assert fragment.valid[:, 1].tolist() == [False, False, False, False, True, True]
    assert fragment.valid[:, 0].all() and fragment.num_steps == 14
    assert environment.state()["observations.count"] == 2 + 2 + 6 * 2 + 3, "two resets, all steps"


@pytest.mark.parametrize("kind", ["ended again", "left over", "rewarded", "stale list"])
def test_leftovers_of_an_agent_that_has_ended_are_no_return(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = of_b(made(kind), 7)
    assert rows[3:] == [*[(2, 0, "t")] * 4, (0, 0, "")]
    said = [each for each in caplog.messages if "did not act" in each]
    wanted = "Society gave agent 'b' the reward 2.0 in step 3, in which it did not act: it is left out"
    assert said == ([wanted] if kind == "rewarded" else [])


@pytest.mark.parametrize(
    ("kind", "step", "words"),
    [
        ("unseen", 4, "no observation of agent 'b', which has come to agents"),
        ("left", 4, "no end of agent 'c', which has left agents"),
        ("unknown", 4, "an observation of agent 'd', or its name in agents, but possible_agents are .*'c'"),
    ],
)
def test_an_unclear_agent_is_an_error_at_the_first_moment(kind: str, step: int, words: str) -> None:
    environment = made(kind)
    of_b(environment, step - 1)
    with pytest.raises(EnvironmentFailure, match=f"Society.step of slot 0 returned {words}") as error:
        of_b(environment, 1)
    assert error.value.why.startswith(f"in step {step} of an episode")


def test_a_first_agent_without_an_observation_is_an_error() -> None:
    with pytest.raises(EnvironmentFailure, match=r"Society.reset of slot 0 returned no value for agent 'b'"):
        made("hidden")


def test_no_agent_comes_after_the_time_limit() -> None:
    rows = of_b(made("returns", time_limit=4), 6)
    assert rows[3:] == [(2, 0, "t"), (2, 0, "t"), (0, 0, ""), (1, 1, "")]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"network": {"kind": "lstm", "hidden": [8], "lstm_size": 8}},
        {"algorithm": {"name": "dqn", "steps": 3, "learning_starts": 9}},
        {
            "algorithm": {"name": "impala", "steps": 3},
            "workers": {"slots": 2, "steps": 16, "transport": "shared_memory"},
        },
    ],
)
@pytest.mark.parametrize("kind", ["returns", "late"])
def test_runs_with_such_agents_count_each_life(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = {
        "kind": "classic",
        "environment": {"id": f"{ODD}:Society", "run": "inline", "arguments": {"kind": kind}},
        "network": {"hidden": [8]},
        "algorithm": {"name": "ppo", "steps": 3},
        "workers": {"slots": 2, "steps": 16},
        "evaluate": {"episodes": 2},
        "run": {"checkpoint_every": 3, "threads": 1, "dir": str(tmp_path / "run")},
    }
    run = rillflow.train({**recipe, **settings})
    assert run.is_finished and len(list((run.path / layout.MEDIA).iterdir())) == 1
    (last, *_) = [line.data for line in read_lines(run.path / layout.EVALUATIONS).lines][::-1]
    assert last["count"] == 6 and np.isclose(last["mean_reward"], (6 + 6 + 2) / 3)
