"""Bad environments and bad settings: each has one error that names the id, the slot and the value."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow_classic.environments import catalog
from rillflow_classic.environments.catalog import located
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import EnvironmentFailure

FAULTY = Path(__file__).with_name("faulty.py")
NEIGHBOURS = """
import gymnasium as gym
import numpy as np
from physics_of_game import fall


class Game(gym.Env):
    observation_space = gym.spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.height = 5.0
        return np.float32([self.height]), {}

    def step(self, action):
        from rules_of_game import END

        self.height = fall(self.height)
        return np.float32([self.height]), 1.0, self.height <= END, False, {}
"""
NEIGHBOURS_RECIPE = """
kind = "classic"
[environment]
id = "game.py:Game"
[network]
hidden = [8]
[workers]
slots = 2
steps = 16
actors = 2
[algorithm]
name = "ppo"
steps = 2
[evaluate]
episodes = 2
video = false
[run]
threads = 1
"""


def made(id: str = f"{FAULTY}:Counter", slots: int = 3, **settings: Any) -> Any:
    return make_environment(EnvironmentSettings(**{"id": id, "run": "inline", **settings}), slots)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", r"Counter.step of slot 0 raised ZeroDivisionError: no such move"),
        ("nan", r"slot 0 returned the observation nan at \[1\]"),
        ("infinite reward", r"slot 0 returned the reward inf"),
        ("text reward", r"Counter.step of slot 0 returned the reward 'much', which is no number"),
        ("shape", r"Counter.step of slot 0 returned an observation of float32 \[3\], but .* \[2\]"),
        ("scalar", r"Counter.step of slot 0 returned an observation of float64 \[\]"),
        ("dtype", r"Counter.step of slot 0 returned an observation of <U1 \[2\]"),
        ("four", r"Counter.step of slot 0 returned 4 values instead of 5"),
        ("nothing", r"Counter.step of slot 0 returned None"),
        ("text end", r"Counter.step of slot 0 returned 'no' where terminated or truncated is expected"),
        ("exits", r"Counter.step of slot 0 raised SystemExit: 3"),
    ],
)
def test_a_faulty_step_is_one_clear_error(fault: str, words: str) -> None:
    environment = made(arguments={"fault": fault})
    for _ in range(2):
        environment.step(np.zeros(3, np.int64))
    with pytest.raises(EnvironmentFailure, match=words) as failure:
        environment.step(np.zeros(3, np.int64))
    assert failure.value.why and failure.value.fix
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)  # noqa: S301  our own error


def test_the_error_of_an_exception_says_where() -> None:
    environment = made(arguments={"fault": "raises", "at": 1})
    with pytest.raises(EnvironmentFailure) as failure:
        environment.step(np.zeros(3, np.int64))
    line = (
        FAULTY.read_text().splitlines().index('                    raise ZeroDivisionError("no such move")')
    )
    assert f"faulty.py:{line + 1}, in step" in failure.value.why


@pytest.mark.parametrize("fault", ["shape", "nothing"])
def test_the_error_of_a_wrong_value_names_the_method_that_returned_it(fault: str) -> None:
    environment = made(arguments={"fault": fault, "at": 1})
    with pytest.raises(EnvironmentFailure) as failure:
        environment.step(np.zeros(3, np.int64))
    line = FAULTY.read_text().splitlines().index("    def step(self, action: Any) -> Any:")
    assert failure.value.fix == f"correct Counter.step in {FAULTY}, line {line + 1}"
    assert "observation, reward, terminated, truncated, info" in failure.value.why


def test_a_first_observation_that_is_nan_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match=r"slot 0 returned the observation nan at \[1\]"):
        made(arguments={"fault": "nan", "at": 0})


@pytest.mark.parametrize(("name", "lacks"), [("Lone", "step"), ("Silent", "close")])
def test_a_class_that_lacks_a_method_is_no_environment(name: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=rf"is no environment: '{name}' object has no attribute '{lacks}'"):
        made(f"{FAULTY}:{name}")


@pytest.mark.parametrize("provider", ["gymnasium", "envpool"])
@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (np.array([0, 2, 1]), "the action of slot 1 is 2"),
        (np.array([-1, 0, 1]), "the action of slot 0 is -1"),
        (np.array([0, 1]), r"the actions are int64 \[2\]"),
        (np.array([0.0, 1.0, 1.0]), r"the actions are float64 \[3\]"),
        (np.zeros((3, 1), np.int64), r"the actions are int64 \[3, 1\]"),
    ],
)
def test_an_action_outside_its_space_is_refused(provider: str, actions: Any, words: str) -> None:
    environment = made("CartPole-v1", provider=provider)
    with pytest.raises(EnvironmentFailure, match=words):
        environment.step(actions)


@pytest.mark.parametrize("provider", ["gymnasium", "envpool"])
def test_continuous_actions_are_clipped_and_nan_is_refused(provider: str) -> None:
    wide = np.array([[5.0], [-3.0], [1.0]], np.float32)
    ends = np.array([[2.0], [-2.0], [1.0]], np.float32)
    one, other = made("Pendulum-v1", provider=provider), made("Pendulum-v1", provider=provider)
    assert np.array_equal(one.step(wide).rewards, other.step(ends).rewards)
    with pytest.raises(EnvironmentFailure, match=r"the action of slot 1 is \[nan\]"):
        one.step(np.array([[0.0], [np.nan], [0.0]], np.float32))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"id": "CartPole-v7"}, "did you mean 'CartPole-v"),
        ({"id": "cartpole-v1"}, "did you mean 'CartPole-v1'"),
        ({"id": "Pongg-v5"}, "did you mean 'Pong-v5'"),
        ({"id": "MultiAgentCartpole-v0"}, "did you mean 'MultiAgentCartPole-v0'"),
        ({"id": "FishingDerby-v9", "provider": "envpool"}, "did you mean 'FishingDerby-v5'"),
        ({"id": "ALE/Pong-v9", "provider": "gymnasium"}, "did you mean 'ALE/Pong-v5'"),
        ({"id": "TheWholeWorldAndMore"}, "write a registered id or file.py:Class"),
        ({"id": "absent.package:Class"}, "absent.* cannot be imported"),
        ({"id": "rillflow_classic.fragment:Fragmnt"}, "did you mean 'Fragment'"),
        ({"id": f"{FAULTY}:Countr"}, "did you mean 'Counter'"),
        ({"id": f"{FAULTY}:not_a_class"}, "has no class 'not_a_class'"),
        ({"id": f"{FAULTY.parent}/absent.py:Class"}, "absent.py cannot be imported.*FileNotFoundError"),
        ({"provider": "envpool"}, "environment.provider is 'envpool', and EnvPool runs no classes"),
        ({"arguments": {"lenght": 3}}, "unexpected keyword argument 'lenght'"),
        (
            {"id": "CartPole-v1", "provider": "envpool", "arguments": {"speed": 3}},
            "EnvPool cannot make 'CartPole-v1' with .*'speed': 3",
        ),
        (
            {"id": "CartPole-v1", "provider": "gymnasium", "arguments": {"speed": 3}},
            "cannot be made.*'speed'",
        ),
        (
            {"id": f"{FAULTY}:Team", "arguments": {"spaces": "different"}},
            "agents of Team have different spaces: .'a'.*'c'",
        ),
        (
            {"id": "FrozenLake-v1", "provider": "gymnasium", "normalise_observations": True},
            "environment.normalise_observations is set, and observations are Disc",
        ),
        (
            {"id": "FrozenLake-v1", "frame_stack": 3},
            "environment.frame_stack is set, and observations are Disc",
        ),
    ],
)
def test_bad_settings_are_refused_at_the_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        made(**settings)


def test_no_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="an actor has 0 environments"):
        made(slots=0)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "envpool_ids", frozenset)
    with pytest.raises(ConfigError, match=r"EnvPool is not installed(?s:.*)pip install envpool"):
        made("CartPole-v1", provider="envpool")
    assert made("CartPole-v1").num_slots == 3, "Gymnasium has it too"


def test_arguments_that_only_gymnasium_has_choose_it() -> None:
    given = {"is_slippery": False, "map_name": "4x4"}
    for arguments, provider in ((given, "gymnasium"), ({"num_threads": 1}, "envpool"), ({}, "envpool")):
        entry = catalog.find(EnvironmentSettings(id="FrozenLake-v1", arguments=arguments))
        assert entry.provider == provider, arguments
    assert made("FrozenLake-v1", arguments=given).num_slots == 3
    with pytest.raises(ConfigError, match="EnvPool cannot make 'FrozenLake-v1'"):
        made("FrozenLake-v1", arguments=given, provider="envpool")


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    """In a process of its own, as a user has it: from another folder, now and at the first step."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/physics_of_game.py").write_text("def fall(height):\n    return height - 1.0\n")
    (tmp_path / "own/rules_of_game.py").write_text("END = 0.0\n")
    (tmp_path / "own/game.py").write_text(NEIGHBOURS)
    (tmp_path / "own/run.toml").write_text(NEIGHBOURS_RECIPE)
    command = [sys.executable, "-m", "rillflow.cli.main", "run", "own/run.toml", "--dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_workers_and_a_resumed_run_find_the_neighbours_of_a_file(tmp_path: Path) -> None:
    """Actors in forked processes, environments in processes of their own, and another working directory."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/physics_of_game.py").write_text("def fall(height):\n    return height - 1.0\n")
    (tmp_path / "own/rules_of_game.py").write_text("END = 0.0\n")
    (tmp_path / "own/game.py").write_text(NEIGHBOURS)
    (tmp_path / "own/run.toml").write_text(NEIGHBOURS_RECIPE)
    given = ["workers.place=process", "workers.transport=shared_memory", "environment.run=processes"]
    for steps, folder in ((1, tmp_path), (2, Path("/"))):
        words = [f"{tmp_path}/own/run.toml" if folder == Path("/") else "own/run.toml"]
        words += ["--dir", f"{tmp_path}/run", "--set", f"algorithm.steps={steps}"]
        words += [word for each in given for word in ("--set", each)]
        command = [sys.executable, "-m", "rillflow.cli.main", "run", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 1" in done.stdout and f"ppo {steps}/2" in done.stdout


def test_a_file_is_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(FAULTY.read_text())
    found = located(EnvironmentSettings(id="game.py:Counter"), tmp_path)
    assert found.id == f"{tmp_path}/game.py:Counter"
    assert make_environment(found.model_copy(update={"run": "inline"}), 2).num_slots == 2
    with pytest.raises(ConfigError, match="did you mean 'Counter'"):
        located(EnvironmentSettings(id="game.py:Conter"), tmp_path)
    assert located(EnvironmentSettings(id="CartPole-v1"), tmp_path).id == "CartPole-v1"
