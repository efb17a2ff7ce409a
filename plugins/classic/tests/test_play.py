"""Play: episodes of a run's policy in simulators with copies, without end, and with broken graphics."""

from __future__ import annotations

import json
import shlex
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import rillflow
import rillflow_classic
from plugins.classic.tests.test_environment_copies import port
from plugins.classic.tests.test_environment_copies import train as simulated
from rillflow.cli.main import main
from rillflow.runs import layout
from rillflow_classic.trained_policy import FilmError

__all__ = ["port"]

ODD = Path(__file__).with_name("odd.py")
TOML = f"""
kind = "classic"
[environment]
id = "{ODD}:NAME"
run = "inline"
arguments = ARGUMENTS
[network]
hidden = [8]
[workers]
slots = 2
steps = 16
[algorithm]
name = "ppo"
steps = 2
[evaluate]
episodes = 4
episode_limit = 50
[run]
threads = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(folder: Path, name: str, arguments: str) -> str:
    file = folder / "run.toml"
    file.write_text(TOML.replace("NAME", name).replace("ARGUMENTS", arguments))
    return str(file)


@pytest.mark.parametrize(
    ("settings", "training"),
    [({}, 2), ({"population": {"members": 2, "every": 1, "perturb": {"lr": [1e-4, 1e-3]}}}, 4)],
)
def test_copies_of_play_are_beside_those_of_a_run_that_trains(
    settings: dict[str, Any], training: int, port: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder / "log-{copy}.jsonl"
    run = simulated(folder, {"port": f"{{copy+{port}}}", "log": str(log)}, **settings)
    logs = [Path(str(log).format(copy=copy)) for copy in range(training + 4)]
    before = [file.read_text() for file in logs]
    with ExitStack() as stack:
        for copy in range(training):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", port + copy))
            taken.listen()
        assert main(["play", str(run.path), "--video", "film.webp"]) == 0
    assert Path("film.webp").is_file() and "episode 4: return 8 in 8 steps" in capsys.readouterr().out
    later = [file.read_text().removeprefix(text) for file, text in zip(logs, before, strict=True)]
    assert not any(later[:training]) and all(later[training:])
    lines = [[json.loads(line) for line in text.splitlines()] for text in later[training:]]
    assert [{each["port"] for each in found} for found in lines] == [
        {port + training + number} for number in range(4)
    ]


def test_play_takes_one_copy_where_there_is_room_for_one(
    port: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = simulated(folder, {"port": port}, workers={"slots": 1, "steps": 16})
    assert main(["play", str(run.path)]) == 0
    assert "episode 4: return 8 in 8 steps" in capsys.readouterr().out
    assert rillflow_classic.load(run.path).evaluate().count == 4


def test_play_of_an_episode_without_end_ends_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe(folder, "Room", "{ has_door = false }"), "--dir", "run", "--quiet"]) == 0
    capsys.readouterr()
    for words, count in (([], 4), (["--episodes", "3", "--sample"], 3)):
        assert main(["play", "run", *words]) == 0
        out, err = capsys.readouterr()
        assert out.count("return -50 in 50 steps") == count
        assert f"note: evaluate.episode_limit cut {count} of {count} episodes after 50 steps" in err


def test_play_of_an_episode_with_an_end_says_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe(folder, "Strict", '{ actions = "start" }'), "--dir", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["play", "run"]) == 0 and "note" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{ kind = "bytes", fails = "made" }', "ImportError: no graphics"),
        ('{ kind = "bytes", fails = "step" }', "the window is too small"),
        ('{ kind = "raises at 3" }', "RuntimeError: the display is gone"),
        ('{ kind = "exits" }', "SystemExit: no display"),
    ],
)
def test_a_video_that_fails_is_a_note_and_episodes_are_played(
    arguments: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe(folder, "Display", arguments), "--dir", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["play", "run", "--video", "film.webp"]) == 0
    out, err = capsys.readouterr()
    assert f"note: there is no video of {ODD}:Display: " in err and words in err and "Traceback" not in err
    assert out.count("return 8 in 8 steps") == 4 and not Path("film.webp").exists()
    assert [each.name for each in folder.iterdir() if each.name.startswith("tmp")] == []
    with pytest.raises(FilmError, match="there is no video"):
        rillflow_classic.load("run").film("film.webp")


def test_no_picture_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", recipe(folder, "Display", '{ kind = "none" }'), "--dir", "run", "--quiet"]) == 0
    assert main(["play", "run", "--video", "film.webp"]) == 0
    assert "draws no pictures" in capsys.readouterr().out


def test_the_printed_command_continues_a_run_with_a_failing_picture(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(folder, "Display", '{ kind = "raises at 3" }')
    assert main(["run", path, "--dir", "run"]) == 0
    said = capsys.readouterr().out
    assert "the display is gone" in said
    longer = next(each for each in said.splitlines() if "train longer:" in each)
    assert main(shlex.split(longer.partition(":")[2])[1:]) == 0
    said = capsys.readouterr().out
    assert "the display is gone" in said
    run = rillflow.open_run("run")
    assert run.is_finished and run.evaluations[-1].step == 4
    assert not (run.path / layout.MEDIA).exists()
    assert rillflow_classic.load("run").step == 4
