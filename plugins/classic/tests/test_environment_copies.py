"""Copies of a simulator: each has its number, and where one copy is possible the run is finished."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rillflow
from rillflow.errors import ConfigError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines
from rillflow_classic.environments.copies import with_copy

ODD = Path(__file__).with_name("odd.py")


@pytest.fixture
def port() -> int:
    """Return the first of some free ports."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        return int(link.getsockname()[1])


def train(folder: Path, arguments: dict[str, Any], **settings: Any) -> Any:
    recipe = {
        "kind": "classic",
        "environment": {"id": f"{ODD}:Simulator", "run": "inline", "arguments": arguments},
        "network": {"hidden": [8]},
        "algorithm": {"name": "ppo", "steps": 2},
        "workers": {"slots": 2, "steps": 16},
        "evaluate": {"every": 1, "episodes": 4},
        "run": {"checkpoint_every": 1, "threads": 1, "dir": str(folder / "run")},
    }
    return rillflow.train({**recipe, **settings})


def evaluated(run: Any) -> list[tuple[int, int]]:
    """Return step and number of episodes of every evaluation."""
    lines = read_lines(run.path / layout.EVALUATIONS).lines
    return [(line.data["step"], line.data["count"]) for line in lines]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("{copy}", 3),
        ("{copy+5005}", 5008),
        ("sim-{copy}.log", "sim-3.log"),
        ("{copy+1}/{copy}", "4/3"),
        ({"a": ["{copy}", 1, None, 2.5, True]}, {"a": [3, 1, None, 2.5, True]}),
        ("{slot} {copy + 1}", "{slot} {copy + 1}"),
    ],
)
def test_arguments_have_the_number_of_the_copy(value: Any, found: Any) -> None:
    assert with_copy(value, 3) == found


IMPALA = {"algorithm": {"name": "impala", "steps": 2}}
STREAM = {"slots": 2, "steps": 16, "actors": 2, "transport": "shared_memory", "place": "process"}


@pytest.mark.parametrize(
    ("settings", "training"),
    [
        ({"workers": {"slots": 2, "steps": 16, "actors": 2, "ring": 2}}, 8),
        ({**IMPALA, "workers": STREAM}, 4),
        pytest.param({"environment": {"run": "processes", "processes": 2}}, 2, marks=pytest.mark.slow),
        (
            {"population": {"members": 2, "every": 1, "perturb": {"lr": [1e-4, 1e-3]}}},
            4,
        ),
    ],
)
def test_every_copy_has_a_number_and_a_seed_of_its_own(
    settings: dict[str, Any], training: int, port: int, tmp_path: Path
) -> None:
    """Copies are numbered over members, actors, rings and slots; evaluation and video follow."""
    log = tmp_path / "log-{copy}.jsonl"
    arguments = {"port": f"{{copy+{port}}}", "log": str(log), "options": {"name": "sim {copy}"}}
    own = settings.get("environment", {})
    environment = {"id": f"{ODD}:Simulator", "run": "inline", "arguments": arguments, **own}
    run = train(tmp_path, arguments, **{**settings, "environment": environment})
    assert run.is_finished and evaluated(run) == [(0, 4), (1, 4), (2, 4)]
    assert len(list((run.path / layout.MEDIA).iterdir())) == 1
    lines = {
        copy: [json.loads(line) for line in Path(str(log).format(copy=copy)).read_text().splitlines()]
        for copy in range(training + 4)
    }
    assert not Path(str(log).format(copy=training + 4)).exists()
    for copy, found in lines.items():
        assert {(each["port"], each["options"]["name"]) for each in found} == {(port + copy, f"sim {copy}")}
    shown = [copy for copy, found in lines.items() if any(each["shows"] for each in found)]
    assert shown == [training], "the video has the first number after those of training"
    trained = [{each["seed"] for each in lines[copy][-1:]} for copy in range(training)]
    assert max(Counter(seed for seeds in trained for seed in seeds).values()) == 1


@pytest.mark.parametrize("workers", [{}, {"transport": "shared_memory"}, {"executor": "static"}])
def test_one_copy_evaluates_and_films_after_training(
    workers: dict[str, Any], port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, {"port": port}, workers={"slots": 1, "steps": 16, **workers})
    said = capsys.readouterr().out
    assert run.is_finished and evaluated(run) == [(2, 4)]
    assert len(list((run.path / layout.MEDIA).iterdir())) == 1
    assert "step 0: no evaluation, because no environment can be made beside those of the actors" in said
    assert "Address already in use" in said and "{copy}" in said


def test_an_evaluation_uses_as_many_copies_as_there_are(port: int, tmp_path: Path) -> None:
    """A licence for two: one trains, one evaluates."""
    arguments = {"port": port, "worker": "{copy}"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        run = train(tmp_path, arguments, workers={"slots": 1, "steps": 16})
    assert run.is_finished and evaluated(run) == [(0, 4), (1, 4), (2, 4)]


def test_two_slots_of_one_copy_are_refused_with_the_way_out(port: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Address already in use") as error:
        train(tmp_path, {"port": port})
    assert "this one, number 1" in error.value.fix and '"{copy}"' in error.value.fix


def test_a_refused_environment_lets_go_of_the_copies_before_it(port: int, tmp_path: Path) -> None:
    for _ in range(2):  # the second time, port is free again
        with pytest.raises(ConfigError, match="number 1"):
            train(tmp_path, {"port": port})
