"""The summary: correct text, and commands that can be pasted."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Mean
from rillflow.runs.reader import Evaluation, EvaluationRecord
from rillflow.runs.report.write import write_report
from rillflow.runs.run_directory import RunDirectory
from rillflow.runs.summary import render_text, summarise, verdict
from tests.unit.written_rollouts import write_rollouts

MakeRun = Callable[..., Path]


def score(accuracy: float, half: float | None) -> EvaluationRecord:
    interval = None if half is None else (accuracy - half, accuracy + half)
    return EvaluationRecord(
        step=0,
        correct=round(1000 * accuracy),
        count=1000,
        interval=interval,
        mean_reward=0.0,
    )


def graded(mean_reward: float, half: float | None) -> EvaluationRecord:
    interval = None if half is None else (mean_reward - half, mean_reward + half)
    return EvaluationRecord(
        step=0,
        correct=None,
        count=1,
        interval=interval,
        mean_reward=mean_reward,
        is_accuracy=False,
    )


def test_a_finished_run_is_told_in_full(make_run: MakeRun) -> None:
    run = make_run()
    write_report(run)
    text = render_text(summarise(run))
    assert text.splitlines()[:2] == [
        "Held-out accuracy  0.500 [0.456, 0.544] -> 0.878 [0.848, 0.906]",
        "                   steps 20 and 60, 500 problems, 95% intervals. "
        "It rose by 0.378; the intervals do not overlap.",
    ]
    for line in (
        "Steps              warm_start 20 in 4.4 s, grpo 40 in 55 s",
        f"Model              {run}/checkpoints/step-000060/policy",
        f"Report             {run}/report.html",
        f"Rollouts           {run}/rollouts (40 steps)",
        f"  look inside:     open {run}/report.html in a browser",
        f"  train longer:    rillflow run recipes/arithmetic/run.toml --set algorithm.steps=80 --dir {run}",
    ):
        assert line in text.splitlines(), line
    assert f"rillflow ask {run} " in text
    assert "did not rise" not in text


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (score(0.5, 0.04), score(0.9, 0.03), "It rose by 0.400; the intervals do not overlap."),
        (
            score(0.5, 0.04),
            score(0.53, 0.04),
            "It rose by 0.030, but the intervals overlap: this may be chance.",
        ),
        (score(0.5, 0.04), score(0.3, 0.04), "It fell by 0.200; the intervals do not overlap."),
        (score(0.5, 0.04), score(0.5, 0.04), "It did not change."),
        (
            score(0.5, None),
            score(0.6, None),
            "It rose by 0.100; without both intervals, this may be chance.",
        ),
        (graded(0.1, 0.02), graded(0.2, 0.02), "It rose by 0.100; the intervals do not overlap."),
        (
            graded(4.0, 0.5),
            graded(3.5, 0.5),
            "It fell by 0.500, but the intervals overlap: this may be chance.",
        ),
        (graded(math.nan, None), graded(0.5, 0.1), "One of the two evaluations has no reward."),
    ],
)
def test_chance_is_called_chance(before: EvaluationRecord, after: EvaluationRecord, words: str) -> None:
    assert verdict(before, after) == words


def test_a_run_that_did_not_rise_says_so_and_what_to_look_at(make_run: MakeRun) -> None:
    text = render_text(summarise(make_run(final=0.3)))
    assert "It fell by" in text
    assert "it did not rise: read the worst samples" in text
    assert "--set policy.lr=NUMBER" in text


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("run.toml --plan plan.toml", "run.toml --plan plan.toml"),
        ("--plan plan.toml run.toml", "run.toml --plan plan.toml"),
        ("--plan=plan.toml run.toml --dir a --fresh --quiet", "run.toml --plan plan.toml"),
        (
            "--set policy.lr=1e-5 run.toml --cluster c.toml --lengths runs/a --set=algorithm.steps=9",
            "run.toml --set policy.lr=1e-5 --cluster c.toml --lengths runs/a",
        ),
        ("--dir other.toml recipe --debug", "recipe"),
        ("'my run.toml' --plan 'my plan.toml'", "'my run.toml' --plan 'my plan.toml'"),
    ],
)
def test_the_next_command_is_placed_as_the_last_one(make_run: MakeRun, words: str, kept: str) -> None:
    command = ("rillflow", "run", *shlex.split(words))
    summary = replace(summarise(make_run(final=0.3)), command=command, run="a")
    text = render_text(summary)
    assert f"train longer:    rillflow run {kept} --set algorithm.steps=80 --dir a" in text
    assert f"try another learning rate: rillflow run {kept} --set policy.lr=NUMBER --dir a-lr" in text


def test_the_next_command_of_an_algorithm_of_ones_own_is_its_file(make_run: MakeRun) -> None:
    command = ("python", "my own.py", "run", "run.toml", "--set", "policy.lr=1e-5", "--dir", "a")
    summary = replace(summarise(make_run(final=0.3)), command=command, run="a")
    again = "python 'my own.py' run run.toml --set policy.lr=1e-5 --set"
    assert f"train longer:    {again} algorithm.steps=80 --dir a" in render_text(summary)
    stopped = render_text(replace(summary, is_finished=False))
    assert "resume:          python 'my own.py' run run.toml --set policy.lr=1e-5 --dir a" in stopped


def test_where_a_program_launched_no_command_is_made_up(make_run: MakeRun) -> None:
    summary = replace(summarise(make_run(final=0.3)), command=(), run="a")
    text = render_text(summary)
    assert "train longer:    launch the recipe with algorithm.steps=80, run.dir=a" in text
    assert "try another learning rate: launch the recipe with policy.lr=NUMBER, run.dir=a-lr" in text
    assert "rillflow run" not in text
    assert "resume:          launch the same recipe" in render_text(replace(summary, is_finished=False))


def test_graded_rewards_are_no_accuracy(make_run: MakeRun, tmp_path: Path) -> None:
    """Rewards of 0 to 6: the summary shows the mean with its interval, and a share only if requested."""
    looks = [(0, 1.25, 3, (0.9, 1.6)), (5, 1.5, 7, (1.1, 1.9))]
    for success in (None, 2.0):
        run = tmp_path / f"success-{success}"
        with RunDirectory.open(run, {"evaluate": {"success": success}}) as opened:
            for step, mean, correct, interval in looks:
                opened.log_evaluation(
                    step,
                    Evaluation(
                        count=20,
                        mean_reward=mean,
                        is_accuracy=False,
                        interval=interval,
                        correct=None if success is None else correct,
                    ),
                )
        text = render_text(summarise(run))
        assert "Held-out mean reward  1.250 [0.900, 1.600] -> 1.500 [1.100, 1.900]" in text
        assert "It rose by 0.250, but the intervals overlap" in text
        assert "accuracy" not in text
        assert ("Reward >= 2        0.150 -> 0.350 (share of the answers)" in text) is (success is not None)
        write_report(run)
        page = (run / "report.html").read_text()
        assert "Held-out mean reward on 20 problems" in page and "accuracy" not in page.casefold()


def test_one_look_with_a_graded_reward_makes_all_of_them_graded(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_evaluation(0, Evaluation(correct=0, count=20, mean_reward=0.0, interval=(0.0, 0.161)))
        run.log_evaluation(5, Evaluation(count=20, mean_reward=0.4, is_accuracy=False, interval=(0.3, 0.5)))
    text = render_text(summarise(tmp_path / "run"))
    assert "Held-out mean reward  0.000 [0.000, 0.161] -> 0.400 [0.300, 0.500]" in text


def test_what_should_not_be_overlooked_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert "Warning" not in render_text(summarise(run))
    for step in (21, 25):
        (run / "rollouts" / f"step-{step:06d}-0001-of-0001.safetensors").unlink()
    told = "the rollout files of 2 steps are missing"
    assert f"Warning            {told}: 21, 25" in render_text(summarise(run))
    write_report(run)
    assert told in (run / "report.html").read_text()
    with RunDirectory.open(tmp_path / "silent", {}) as silent:
        for step in range(1, 9):
            silent.log_metrics(step, "grpo", {"reward/score/share": Mean(total=0.0, count=8)})
    text = render_text(summarise(tmp_path / "silent"))
    assert "Warning            no answer has a reward in steps 1 to 8" in text


def test_a_stopped_run_names_the_command_that_goes_on(make_run: MakeRun) -> None:
    run = make_run(steps=30)
    (run / "finished.json").unlink()
    text = render_text(summarise(run))
    assert "resume:          rillflow run recipes/arithmetic/run.toml" in text
    assert "evaluated once" in text
    assert "train longer" not in text


def test_a_run_without_anything_has_a_summary(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", {}).close()
    summary = summarise(tmp_path / "run")
    assert "Nothing was evaluated" in render_text(summary) and "none yet" in render_text(summary)
    assert summary.before is None and summary.checkpoint is None


def test_what_is_pasted_is_quoted(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "my run", {}) as run:
        policy = run.checkpoints / "step-000007" / "policy"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text("{}")
        (run.checkpoints / ".step-000009.draft" / "policy").mkdir(parents=True)
        row = {
            "epoch": 0,
            "prompt_id": 0,
            "sample": 0,
            "finish": "stop",
            "prompt": "what's $(rm -rf ~)?\nnow",
        }
        write_rollouts(run.path, 1, [row])
        run.write_json("finished.json", {})
    summary = summarise(tmp_path / "my run")
    assert summary.checkpoint == str(policy)
    quoted = "'what'\"'\"'s $(rm -rf ~)?\nnow'"
    assert f"rillflow ask '{tmp_path}/my run' {quoted}" in render_text(summary)


def test_the_newest_checkpoint_is_found_by_number(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in ("step-999999", "step-1000000"):
            (run.checkpoints / step / "policy").mkdir(parents=True)
            (run.checkpoints / step / "policy" / "config.json").write_text("{}")
    assert summarise(tmp_path / "run").checkpoint == str(
        tmp_path / "run" / "checkpoints" / "step-1000000" / "policy"
    )


def test_an_adapter_is_the_run_s_model(make_run: MakeRun) -> None:
    run = make_run()
    for step in (40, 60):
        model = run / f"checkpoints/step-{step:06d}/policy"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").unlink(missing_ok=True)
        (model / "adapter_config.json").write_text("{}")
    summary = summarise(run)
    assert summary.checkpoint == str(run / "checkpoints/step-000060/policy")
    assert f"Model              {summary.checkpoint}" in render_text(summary)
    assert f"rillflow ask {run}" in render_text(summary)


def test_a_model_that_an_agent_asks_is_served(tmp_path: Path) -> None:
    config = {"rollout": {"agent": {"function": "agent.py:play"}}}
    with RunDirectory.open(tmp_path / "run", config) as run:
        model = run.checkpoints / "step-000001" / "policy"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        run.write_json("finished.json", {})
    said = render_text(summarise(tmp_path / "run"))
    assert f"rillflow serve {tmp_path}/run, and point the agent at the address" in said
    assert "rillflow ask" not in said


def test_the_summary_is_json(make_run: MakeRun) -> None:
    run = make_run()
    summary = summarise(run)
    with RunDirectory.open(run, json.loads((run / "config.json").read_text())) as reopened:
        reopened.write_json("summary.json", summary.as_json())
    kept = json.loads((run / "summary.json").read_text())
    assert kept["after"]["correct"] == 439 and kept["phases"][1] == {
        "name": "grpo",
        "steps": 40,
        "seconds": pytest.approx(summary.phases[1].seconds),
    }


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        summarise(tmp_path)
