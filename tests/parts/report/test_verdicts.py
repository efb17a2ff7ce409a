"""The report says what the summary says about the run's outcome."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.records.metrics import Mean
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow_parts.report.write import write_report
from tests.unit.runs.test_summary import noisy, run_of

MakeRun = Callable[..., Path]


def test_the_report_marks_a_chance_neither_good_nor_bad(tmp_path: Path) -> None:
    for name, rewards, looks, mark in (
        ("chance", noisy(0.4, 0.4), (0.5, 0.52), '<p class="hint">It rose by 0.020'),
        ("rise", noisy(0.4, 0.7), (0.5, 0.7), '<p class="good">It rose by 0.200'),
        ("greedy", noisy(0.31, 0.97), (0.98, 0.994), '<p class="good">The training reward rose clearly'),
        ("collapse", noisy(0.43, 0.4, 0.02), (0.5, 0.1), '<p class="bad">It fell by 0.400'),
    ):
        run = run_of(tmp_path / name, rewards, looks)
        write_report(run)
        page = (run / "report.html").read_text()
        assert mark in page, name
        assert "Training reward 0." in page and "last 6 steps" in page


def test_graded_rewards_are_no_accuracy(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step, mean in ((0, 1.25), (5, 1.5)):
            found = Evaluation(count=20, mean_reward=mean, is_accuracy=False, interval=(mean - 1, mean + 1))
            run.log_evaluation(step, found)
    page = write_report(tmp_path / "run").read_text()
    assert "Held-out mean reward on 20 problems" in page and "accuracy" not in page.casefold()


def test_missing_rollout_files_are_told(make_run: MakeRun) -> None:
    run = make_run()
    for step in (21, 25):
        (run / "rollouts" / f"step-{step:06d}-0001-of-0001.safetensors").unlink()
    assert "the rollout files of 2 steps are missing" in write_report(run).read_text()


def test_a_run_without_any_reward_has_a_report(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in (0, 8):
            run.log_evaluation(step, Evaluation(count=20, mean_reward=math.nan, is_accuracy=False))
        for step in range(1, 9):
            metrics = {"reward/score/mean": Mean(total=0.0, count=0)}
            run.log_metrics(step, "grpo", metrics | {"reward/score/share": Mean(total=0.0, count=8)})
    assert "One of the two evaluations has no reward." in write_report(tmp_path / "run").read_text()


def test_a_path_that_is_no_run_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
