"""Spaces as users bring them: actions inside the environment's own space, observations held to theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import rillflow
from plugins.classic.tests.odd import ACTIONS, SEEN
from rillflow.errors import ConfigError
from rillflow_classic.environments.actions import MOST_COMBINATIONS, ActionSpaces
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.observations import ObservationSpaces
from rillflow_classic.environments.vector import EnvironmentFailure, array_space

ODD = Path(__file__).with_name("odd.py")


def made(name: str, run: str = "inline", **arguments: Any) -> Any:
    settings = {"id": f"{ODD}:{name}", "run": run, "arguments": arguments}
    return make_environment(EnvironmentSettings.model_validate(settings), 2)


def train(folder: Path, name: str, arguments: dict[str, Any], **settings: Any) -> Any:
    """Make three steps of a run of one of the odd environments."""
    recipe = {
        "kind": "classic",
        "environment": {"id": f"{ODD}:{name}", "run": "inline", "arguments": arguments},
        "network": {"hidden": [8]},
        "algorithm": {"name": "ppo", "steps": 3},
        "workers": {"slots": 2, "steps": 16},
        "evaluate": {"episodes": 2, "video": False},
        "run": {"checkpoint_every": 3, "threads": 1, "dir": str(folder / "run")},
    }
    return rillflow.train({**recipe, **settings})


@pytest.mark.parametrize(
    ("kind", "run"),
    [*((kind, "inline") for kind in ACTIONS), ("float64", "processes"), ("several", "processes")],
)
def test_every_action_is_in_the_environments_own_space(kind: str, run: str) -> None:
    """The environment asserts that its space contains each; the wildest actions are cut to the bounds."""
    environment = made("Strict", run, actions=kind)
    space = environment.action_space
    rows = range(space.n) if isinstance(space, spaces.Discrete) else (-9.0, -0.1, 0.0, 0.1, 9.0)
    dtype = space.dtype if isinstance(space, spaces.Discrete) else np.float32
    for value in rows:
        environment.step(np.full((2, *(space.shape or ())), value, dtype))
    environment.close()


@pytest.mark.parametrize("kind", ["whole", "bytes", "several", "table", "bits", "matrix of bits", "start"])
def test_every_combination_has_one_number(kind: str) -> None:
    both = ActionSpaces.of(ACTIONS[kind], "the actions")
    assert isinstance(both.policy, spaces.Discrete)
    found = both.own_actions(np.arange(both.policy.n))
    assert (
        len({each.tobytes() for each in found})
        == both.policy.n
        == {"start": 3, "bits": 8}.get(kind, len(found))
    )
    assert all(both.own.contains(both.own_action(number)) for number in range(int(both.policy.n)))
    if kind == "several":
        assert {tuple(each) for each in found} == {(a, b) for a in (5, 6) for b in (-1, 0, 1)}


def test_bounds_in_float64_are_kept_by_envpool() -> None:
    settings = EnvironmentSettings(id="HalfCheetah-v4", provider="envpool")
    environment: Any = make_environment(settings, 2)
    assert environment.action_space.dtype == np.float32, "policies act in float32"
    environment.step(np.full((2, 6), 9.0, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_action_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(EnvironmentFailure, match=r"the action of slot 1 is \[ *0"):
        made("Strict", actions="endless").step(np.array([[0, 0], [0, value]], np.float32))


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiBinary(11),
        spaces.MultiDiscrete([MOST_COMBINATIONS, 2]),
        spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64),
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Text(3),
    ],
)
def test_a_space_without_a_policy_is_refused_by_name(space: Any) -> None:
    with pytest.raises(ConfigError, match="the actions of 'x' are") as error:
        ActionSpaces.of(space, "the actions of 'x'")
    assert str(space) in error.value.what and str(MOST_COMBINATIONS) in error.value.why


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ({"name": "ppo"}, "float64"),
        ({"name": "ppo"}, "scalar"),
        ({"name": "ppo"}, "matrix"),
        ({"name": "dqn", "learning_starts": 10}, "several"),
        ({"name": "sac", "learning_starts": 10}, "tiny"),
        ({"name": "sac", "learning_starts": 10}, "float16"),
        pytest.param({"name": "impala"}, "start", marks=pytest.mark.slow),
    ],
)
def test_algorithms_train_and_evaluate_with_such_actions(
    algorithm: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    settings = {"algorithm": {**algorithm, "steps": 3}}
    if algorithm["name"] == "impala":
        settings["workers"] = {"slots": 2, "steps": 16, "transport": "shared_memory", "place": "process"}
    assert train(tmp_path, "Strict", {"actions": kind}, **settings).is_finished


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("number", r"the observation 3, but observation_space is Discrete\(3\)"),
        ("negative", r"the observation -1, but observation_space is Discrete\(3\)"),
        ("from 5", r"the observation 8, but observation_space is Discrete\(3, start=5\)"),
        ("below 5", r"the observation 4, but observation_space is Discrete\(3, start=5\)"),
        (
            "large",
            r"the observation 1e\+300 in Box\(-inf, inf, \(1,\), float64\), and float32 cannot hold it",
        ),
        ("small type", r"the observation 300 in Box\(-128, 127, \(1,\), int8\), and int8 cannot hold it"),
        ("pixels", r"an observation of int64 \[1\], but observation_space is uint8 \[1\]"),
        ("words", r"an observation of <U1 \[1\], but observation_space is float32 \[1\]"),
        ("structured", r"an observation of \[\('a', '<f4'\), \('b', '<f4'\)\] \[1\], but"),
        ("ragged", r"an observation that is no array: setting an array element"),
        ("nothing", r"an observation of object \[\], but observation_space is float32 \[1\]"),
        ("complex", r"an observation of complex128 \[1\], but"),
    ],
)
def test_an_observation_outside_its_space_is_one_clear_error(kind: str, words: str) -> None:
    environment = made("Seen", kind=kind)
    environment.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFailure, match=f"Seen.step of slot 0 returned {words}") as error:
        environment.step(np.zeros(2, np.int64))
    assert error.value.why.startswith("in step 2 of an episode"), error.value.why
    environment.close()


@pytest.mark.parametrize("run", ["inline", "processes"])
def test_a_number_too_large_ends_a_run_in_words(run: str, tmp_path: Path) -> None:
    environment = {"id": f"{ODD}:Seen", "run": run, "arguments": {"kind": "number"}}
    with pytest.raises(EnvironmentFailure, match=r"returned the observation 3, but .* Discrete\(3\)"):
        train(tmp_path, "Seen", {}, environment=environment)


def test_a_reward_that_float32_cannot_hold_is_named() -> None:
    with pytest.raises(EnvironmentFailure, match=r"the reward -1e\+300, and float32 cannot hold it"):
        made("Seen", kind="scalar", reward=-1e300).step(np.zeros(2, np.int64))


def test_an_observation_beyond_its_bounds_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    environment = made("Seen", kind="bounded")
    for _ in range(20):
        environment.step(np.zeros(2, np.int64))
    said = [each for each in caplog.messages if "outside its space" in each]
    assert said == [
        "the environment of slot 0 returned the observation 1.5 at [0] in step 2, outside its space "
        "Box(-1.0, 1.0, (1,), float32)"
    ]


@pytest.mark.parametrize("kind", ["scalar", "flags", "parts"])
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_single_numbers_flags_and_parts_are_learned_from(kind: str, algorithm: str, tmp_path: Path) -> None:
    environment = made("Seen", kind=kind)
    rows = [environment.step(np.zeros(2, np.int64)).observations[0].tolist() for _ in range(4)]
    wanted = {"flags": [[1, 0]] * 4, "parts": [[0, 1, 3.5, 4, 1, 1]] * 4, "scalar": [[1], [2], [3], [1]]}[
        kind
    ]
    assert rows == wanted
    assert train(tmp_path, "Seen", {"kind": kind}, algorithm={"name": algorithm, "steps": 3}).is_finished


@pytest.mark.parametrize("kind", ["two numbers", "bits", "part", "parts"])
def test_a_vector_of_parts_is_that_of_gymnasium(kind: str) -> None:
    space, (_, value, *_) = SEEN[kind]
    if kind == "parts":
        value = (2, {"b": np.array([[3.5, 4]], np.float32)}, np.array([1, 1], np.int8))
    found = ObservationSpaces.of(space, "the observations")
    assert found.policy == array_space(spaces.flatten_space(space), "the same")
    assert found.array(value).tolist() == spaces.flatten(space, value).tolist()


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict({"a": spaces.Dict({"b": spaces.Text(3)})})])
def test_text_is_refused_by_name(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"the observations.*are Text"):
        ObservationSpaces.of(space, "the observations of 'x'")


def test_a_discrete_that_begins_later_is_counted_from_0() -> None:
    environment = made("Seen", kind="from 5")
    assert environment.observation_space == spaces.Discrete(3)
    assert environment.step(np.zeros(2, np.int64)).observations.tolist() == [2, 2]
