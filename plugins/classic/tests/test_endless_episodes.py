"""Episodes that never end: evaluations are bounded, say that they go on, and stop when the user asks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rillflow
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines
from rillflow_classic.config import EpisodesConfig
from rillflow_classic.run_evaluations import SAID_S, Patience

ODD = Path(__file__).with_name("odd.py")
TOML = """
kind = "classic"
[environment]
id = "{odd}:Room"
run = "inline"
arguments = {{ has_door = false, sleep_s = {sleep_s} }}
[network]
hidden = [8]
[workers]
slots = 2
steps = 16
[algorithm]
name = "ppo"
steps = 4
[evaluate]
episodes = 2
every = 2
[run]
threads = 1
"""


def train(folder: Path, **settings: Any) -> Any:
    recipe = {
        "kind": "classic",
        "environment": {"id": f"{ODD}:Room", "run": "inline", "arguments": {"has_door": False}},
        "network": {"hidden": [8]},
        "algorithm": {"name": "ppo", "steps": 2},
        "workers": {"slots": 2, "steps": 16},
        "evaluate": {"episodes": 4, "episode_limit": 50},
        "run": {"threads": 1, "dir": str(folder / "run")},
    }
    return rillflow.train({**recipe, **settings})


def evaluations(run: Any) -> list[dict[str, Any]]:
    return [dict(line.data) for line in read_lines(run.path / layout.EVALUATIONS).lines]


@pytest.mark.parametrize(
    "environment",
    [
        {"id": f"{ODD}:Room", "run": "inline", "arguments": {"has_door": False}},
        {"id": f"{ODD}:Room", "run": "processes", "arguments": {"has_door": False}},
        pytest.param({"id": "Pendulum-v1", "provider": "gymnasium", "run": "inline"}, marks=pytest.mark.slow),
        {"id": "Pendulum-v1", "provider": "envpool"},
        pytest.param(
            {"id": f"{ODD}:Room", "run": "inline", "arguments": {"has_door": False}, "time_limit": 80},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_limit_cuts_every_episode_of_an_evaluation(
    environment: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, environment=environment)
    assert run.is_finished
    assert [(each["step"], each["count"], each["length_mean"]) for each in evaluations(run)] == [
        (0, 4, 50.0),
        (2, 4, 50.0),
    ]
    said = capsys.readouterr().out
    assert "step 2: evaluate.episode_limit cut 4 of 4 episodes after 50 steps; environment.time_limit" in said


def test_a_lower_limit_of_the_environment_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"id": f"{ODD}:Room", "run": "inline", "arguments": {"has_door": False}, "time_limit": 20}
    run = train(tmp_path, environment=own)
    assert [each["length_mean"] for each in evaluations(run)] == [20.0, 20.0]
    assert "episode_limit" not in capsys.readouterr().out


def test_the_default_is_a_bound_above_the_limit_of_atari() -> None:
    assert EpisodesConfig().episode_limit == 30_000


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "impala", "maml"])
def test_training_without_an_end_is_noted(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"algorithm": {"name": algorithm, "steps": 2}}
    if algorithm == "impala":
        settings["workers"] = {"slots": 2, "steps": 16, "transport": "shared_memory"}
    assert train(tmp_path, **settings).is_finished
    assert "no episode has ended in training: environment.time_limit cuts episodes" in capsys.readouterr().out


def test_training_with_ends_is_not_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, environment={"id": f"{ODD}:Room", "run": "inline", "arguments": {}}).is_finished
    assert "no episode has ended" not in capsys.readouterr().out


def test_a_long_evaluation_says_that_it_goes_on_at_doubled_times() -> None:
    now, said, wants = [0.0], list[str](), [False]
    patience = Patience("step 3: an evaluation of 4 episodes", said.append, lambda: wants[0], lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        assert not patience([], 1000 * second)
    assert SAID_S == 5.0 and said == [
        f"step 3: an evaluation of 4 episodes: 0 are over after {second} s, {second},000 steps a slot"
        for second in (5, 10, 20)
    ]
    wants[0] = True
    assert patience([], 0) and patience.has_ended


@pytest.mark.parametrize(
    ("every", "step", "words"),
    [
        (2, 2, "stopped before a step began, as requested"),
        pytest.param(3, 3, "stopped after step 3, as requested", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_an_evaluation_that_goes_on(every: int, step: int, words: str, tmp_path: Path) -> None:
    """At one that a resumed run makes up for, and at one after a step; from another folder."""
    (tmp_path / "run.toml").write_text(TOML.format(odd=ODD, sleep_s=0.0005))
    command = [sys.executable, "-u", "-m", "rillflow.cli.main", "run", f"{tmp_path}/run.toml"]
    command += ["--dir", f"{tmp_path}/run", "--set"]
    first = [*command, "evaluate.episodes=0", "--set", "algorithm.steps=2", "--set", "evaluate.video=false"]
    assert subprocess.run(first, cwd="/", capture_output=True, check=False).returncode == 0
    with subprocess.Popen(
        [*command, f"evaluate.every={every}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        seen = next((line for line in run.stdout if "an evaluation of 2 episodes goes on" in line), "")
        run.send_signal(signal.SIGINT)
        rest = run.stdout.read()
    assert seen.startswith(f"step {step}: ") and "30,000 steps" in seen
    assert run.returncode != 0 and words in rest, rest
