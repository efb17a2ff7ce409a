"""Contract crash-equivalence: a run that is stopped at any step and resumed equals an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from tests.flows.conftest import RECIPE
from tests.flows.held import ended_in_the_middle, write_scores
from tests.flows.warm import Command

TIMES = {"run/step_seconds/mean"}


def words(recipe: Path, run: Path, *more: str) -> list[str]:
    return ["run", str(recipe), "--set", f"run.dir={run}", *more]


def command(recipe: Path, run: Path, *more: str) -> list[str]:
    """Return the command of a new process: to be killed, or without any state of this one."""
    return [sys.executable, "-m", "rillflow.cli.main", *words(recipe, run, *more)]


def numbers(run: Path) -> list[tuple[int, str, dict[str, object]]]:
    """Return every step's metrics without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["phase"], {k: v for k, v in line["metrics"].items() if k not in TIMES})
        for line in lines
    ]


def evaluations(run: Path) -> list[dict[str, object]]:
    """Return every evaluation without its time."""
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time_s"} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "policy" / "model.safetensors")


def rollouts(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "rollouts").iterdir()}


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    file = run / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run made no step in two minutes"
        time.sleep(0.02)


HELD_IN_CALL = 5
"""Call in an evaluation or a step of the algorithm, after at least four finished steps."""


def rewarded(recipe: Path) -> Path:
    """Write the recipe with a reward that can be held."""
    recipe.write_text(f"{RECIPE}[reward]\nfunction = 'scores.py:reward'\ntimeout_s = 100\nsandbox = false\n")
    write_scores(recipe.parent)
    return recipe


@pytest.fixture
def recipe(recipe: Path) -> Path:
    return rewarded(recipe)


@pytest.fixture(scope="module")
def shared_recipe(shared_recipe: Path) -> Path:
    return rewarded(shared_recipe)


@pytest.fixture(scope="module")
def whole(shared_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed run; tests only read it."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert main(words(shared_recipe, run, "--quiet")) == 0
    return run


def assert_same_run(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    assert rollouts(one) == rollouts(other)
    assert evaluations(one) == evaluations(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.slow
def test_a_run_interrupted_in_the_warm_start_resumes_bit_for_bit(
    recipe: Path, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "interrupted"
    process = subprocess.Popen(
        command(recipe, run), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_steps(run, 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert_resumes(recipe, run, whole, errors)


def test_an_interrupted_run_resumes_bit_for_bit(recipe: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "interrupted"
    errors = ended_in_the_middle(recipe, run, HELD_IN_CALL, signal.SIGINT)
    assert "grpo" in {phase for _, phase, _ in numbers(run)}
    assert_resumes(recipe, run, whole, errors)


def assert_resumes(recipe: Path, run: Path, whole: Path, errors: str) -> None:
    assert "run the same command" in errors
    assert len(numbers(run)) < 12
    assert main(words(recipe, run, "--quiet")) == 0
    assert_same_run(whole, run)


def test_crash_equivalence_of_a_run_that_was_killed(recipe: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "killed"
    often = ("--set", "run.checkpoint_every=2")
    ended_in_the_middle(recipe, run, HELD_IN_CALL, signal.SIGKILL, more=("--quiet", *often))
    assert 8 <= len(numbers(run)) < 12
    again = Command(words(recipe, run, "--quiet", *often), tmp_path / "again.txt")
    assert again.wait(200) == 0, again.said
    assert_same_run(whole, run)


def test_narrow_moments_resume_bit_for_bit_and_offload_changes_no_bit(recipe: Path, tmp_path: Path) -> None:
    given = ("policy.optimizer_dtype=bfloat16", "policy.model.dtype=bfloat16", "algorithm.loss.kl=0.1")
    given += ("algorithm.minibatches=2", "evaluate.problems=1", "warm_start.steps=1")
    parts = {"whole": [(2,)], "parted": [(1, "policy.offload=all"), (2,)]}
    for name, starts in parts.items():
        for steps, *more in starts:
            settings = (*given, *more, f"algorithm.steps={steps}")
            sets = [word for setting in settings for word in ("--set", setting)]
            assert main(words(recipe, tmp_path / name, "--quiet", *sets)) == 0
    moved = "train/moved_bytes/mean"
    parted = numbers(tmp_path / "parted")
    assert [bool(metrics.pop(moved, 0)) for _, _, metrics in parted] == [True] * (len(parted) - 1) + [False]
    assert parted == numbers(tmp_path / "whole")
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parted")
    assert all(torch.equal(first[name], second[name]) for name in first)
    newest = max((tmp_path / "whole" / "checkpoints").glob("step-*"))
    stored = load_file(next((newest / "policy.optimizer").glob("*.safetensors")))
    assert {t.dtype for name, t in stored.items() if name.startswith("exp_avg")} == {torch.bfloat16}


def test_a_signal_in_the_last_step_stops_nothing(recipe: Path, tmp_path: Path) -> None:
    """No step is left: the run is finished, and the command says so."""
    grpo = ALGORITHMS["grpo"]

    def step(flow: Any, prompts: Any, config: Any) -> Any:
        report = grpo.step(flow, prompts, config)
        if isinstance(flow, Flow) and flow.journal.supply:  # not only a trace
            os.kill(os.getpid(), signal.SIGINT)
        return report

    run = tmp_path / "run"
    settings = ("algorithm.steps=1", "warm_start.steps=1", "evaluate.problems=1")
    more = [word for setting in settings for word in ("--set", setting)]
    algorithm = replace(grpo, step=step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "grpo", algorithm)
        assert main(words(recipe, run, "--quiet", *more)) == 0
    assert len(numbers(run)) == 2 and (run / "finished.json").exists()


def test_a_finished_run_is_left_alone(
    shared_recipe: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    assert main(words(shared_recipe, whole)) == 0
    assert "finished" in "".join(capsys.readouterr())
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_another_config_in_the_same_directory_is_refused(
    shared_recipe: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(shared_recipe, whole, "--set", "algorithm.samples_per_prompt=2")) == 2
    assert "algorithm.samples_per_prompt: 4 -> 2" in capsys.readouterr().err
