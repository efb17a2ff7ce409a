"""Schedules: a run that is continued learns, by the schedule of its new length."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import rillflow
from rillflow.cli.main import main
from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.summary import render_text, summarise
from rillflow_classic.algorithms.ppo import ClassicPPOConfig
from rillflow_classic.algorithms.two_trainers import TwoTrainersConfig
from rillflow_classic.schedule import adjustable, spent, stretched, with_schedules

TOML = """
kind = "classic"
[environment]
id = "PointNavigation-v0"
run = "inline"
[network]
hidden = [8]
[algorithm]
name = "ppo"
steps = 4
anneal_updates = 4
[workers]
slots = 2
steps = 16
[evaluate]
episodes = 0
video = false
[run]
checkpoint_every = 2
keep_checkpoints = 9
threads = 1
"""
ANNEAL, STEPS = "algorithm.anneal_updates", "algorithm.steps"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe whose rate reaches 0 with its last step; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    return file


def weights(run: str, step: int) -> dict[str, Any]:
    file = Path(run) / layout.CHECKPOINTS / f"step-{step:06d}" / "policy.safetensors"
    return {name: each.tolist() for name, each in load_file(file).items() if name.startswith("network/")}


def test_the_printed_command_continues_a_finished_run_that_then_learns(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(recipe), "--dir", "run"]) == 0
    longer = next(each for each in capsys.readouterr().out.splitlines() if "train longer:" in each)
    assert main(shlex.split(longer.partition(":")[2])[1:]) == 0
    said = capsys.readouterr().out
    assert "anneal_updates = 4 was given for 4 steps" in said and "falls over 8 updates" in said
    assert "learning rate is 0" not in said
    assert weights("run", 4) != weights("run", 6) != weights("run", 8)


def test_the_rate_is_that_of_the_new_length_also_after_a_stop(recipe: Path) -> None:
    """Continued in two starts, or in one with the anneal of the new length written out: the same weights."""
    for name in ("part", "written"):
        rillflow.train(recipe, dir=name, quiet=True)

    def stop(result: Any) -> None:
        if result.step == 6:
            result.run.stop()

    rillflow.train(recipe, dir="part", quiet=True, settings={STEPS: 8}, callbacks=[stop])
    rillflow.train(recipe, dir="part", quiet=True, settings={STEPS: 8})
    rillflow.train(recipe, dir="written", quiet=True, settings={STEPS: 8, ANNEAL: 8})
    assert weights("part", 8) == weights("written", 8)
    rillflow.train(recipe, dir="part", quiet=True, settings={STEPS: 10})
    rillflow.train(recipe, dir="written", quiet=True, settings={STEPS: 10, ANNEAL: 8})
    assert weights("part", 10) == weights("written", 10)


def test_steps_that_change_no_weight_are_noted(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "--dir", "run", "--set", f"{STEPS}=6"]) == 0
    said = capsys.readouterr().out
    assert said.count("the learning rate is 0 from here on") == 1
    assert "step 4: " in said and "--set algorithm.anneal_updates=6" in said
    assert weights("run", 4) == weights("run", 6)


def test_a_resume_cannot_undo_steps(recipe: Path) -> None:
    rillflow.train(recipe, dir="run", quiet=True)
    with pytest.raises(RunDirectoryError, match="has already made 4"):
        rillflow.train(recipe, dir="run", quiet=True, settings={STEPS: 3})
    assert rillflow.open_run("run").is_finished and "Next" in render_text(summarise(Path("run")))


def change(key: str, old: int, new: int) -> dict[str, Any]:
    return {"key": key, "old": old, "new": new}


@pytest.mark.parametrize(
    ("changes", "given", "steps", "updates"),
    [
        ([[]], 40, 4, None),
        ([[], [change(STEPS, 4, 8)]], 40, 8, 80),
        ([[], [change(STEPS, 4, 8)], [change(STEPS, 8, 16)]], 40, 16, 160),
        ([[], [change(STEPS, 4, 8), change(ANNEAL, 40, 50)]], 50, 8, None),
        ([[], [change(STEPS, 4, 8), change(ANNEAL, 40, 50)], [change(STEPS, 8, 16)]], 50, 16, 100),
        ([[], [change(STEPS, 4, 2)]], 40, 2, 20),
        ([[], [change(STEPS, 4, 8)]], 0, 8, None),
    ],
)
def test_the_updates_follow_the_length_since_they_were_set(
    changes: list[list[dict[str, Any]]], given: int, steps: int, updates: int | None
) -> None:
    starts: Any = [{"changes": each} if each else {} for each in changes]
    found = stretched(ClassicPPOConfig(anneal_updates=given), starts, steps)
    assert [each.updates for each in found] == ([] if updates is None else [updates])


def test_each_of_two_trainers_has_its_schedule() -> None:
    settings = TwoTrainersConfig(ppo=ClassicPPOConfig(anneal_updates=4))
    found = stretched(settings, [{"changes": [change(STEPS, 4, 8)]}], 8)
    followed = with_schedules(settings, found)
    assert (followed.ppo.anneal_updates, followed.dqn.anneal_updates) == (8, 0)
    assert followed.dqn == settings.dqn and settings.ppo.anneal_updates == 4
    assert "algorithm.ppo.anneal_updates=5" in spent(settings, {"ppo": 4, "dqn": 9}, 4, 5)
    assert spent(settings, {"ppo": 3, "dqn": 9}, 4, 5) == spent(settings, {"ppo": 4, "dqn": 9}, 5, 5) == ""
    keys = set(adjustable(settings, ("clip",)))
    assert {"algorithm.ppo.lr", "algorithm.dqn.epsilon_last", "algorithm.dqn.anneal_updates"} <= keys
    assert not {"algorithm.ppo.clip", "algorithm.ppo.epochs", "algorithm.dqn.double"} & keys
