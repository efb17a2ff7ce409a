"""The summary: correct text, and commands that can be pasted."""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Max, Mean, Min
from rillflow.runs import layout
from rillflow.runs.outcome import OutcomeKind
from rillflow.runs.reader import Evaluation, EvaluationRecord
from rillflow.runs.run_directory import RunDirectory
from rillflow.runs.summary import render_text, summarise, verdict
from rillflow.runs.trend import trend_of
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
    (run / layout.REPORT).touch()
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
    assert "  it fell:         try policy.lr = 3e-5, a third of 1e-4" in text.splitlines()
    assert "--set policy.lr=3e-5" in text


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
    assert f"a third of 1e-4\n{'':19}rillflow run {kept} --set policy.lr=3e-5 --dir a-lr" in text


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
    assert "launch the recipe with policy.lr=3e-5, run.dir=a-lr" in text
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


def run_of(
    folder: Path, rewards: list[float], looks: tuple[float, float] | None = (0.5, 0.52), **policy: object
) -> Path:
    """Write a finished run with these mean rewards of steps of 256 answers, and two greedy evaluations."""
    config = {
        "policy": {"lr": 1e-4, "warmup_steps": 0, **policy},
        "rollout": {"temperature": 1.0},
        "evaluate": {"temperature": 0.0},
        "algorithm": {"name": "grpo", "steps": len(rewards)},
    }
    with RunDirectory.open(folder, config) as run:
        run.log_start({"command": ["rillflow", "run", "run.toml"]})
        for step, reward in enumerate(rewards, 1):
            equal = reward in (0.0, 1.0)
            metrics = {
                "reward/score/mean": Mean(total=256 * reward, count=256),
                "reward/score/share": Mean(total=256, count=256),
                "reward/score/min": Min(value=reward if equal else 0.0),
                "reward/score/max": Max(value=reward if equal else 1.0),
                "rollout/length/mean": Mean(total=256 * 4, count=256),
            }
            run.log_metrics(step, "grpo", metrics)
        for step, value in zip((0, len(rewards)), looks or (), strict=False):
            half = 0.04
            run.log_evaluation(
                step,
                Evaluation(
                    correct=round(500 * value),
                    count=500,
                    mean_reward=value,
                    interval=(max(0.0, value - half), min(1.0, value + half)),
                ),
            )
        run.write_json("finished.json", {})
    return folder


def noisy(*levels: float, steps: int = 60) -> list[float]:
    """Return rewards that go straight from level to level, with the noise of a step."""
    numbers = random.Random(3)
    parts = np.interp(np.linspace(0, len(levels) - 1, steps), range(len(levels)), levels)
    return [min(0.99, max(0.01, level + numbers.gauss(0, 0.03))) for level in parts.tolist()]


def test_a_training_reward_that_tripled_is_no_chance(tmp_path: Path) -> None:
    """The greedy score began at its best, as in a task where length pays: 0.994 -> 1.000."""
    summary = summarise(run_of(tmp_path / "run", noisy(0.31, 0.97), (0.98, 0.994)))
    text = render_text(summary)
    assert summary.outcome.kind is OutcomeKind.ROSE
    lines = [line for line in text.splitlines() if line.startswith("Training reward")]
    assert len(lines) == 1
    first, _, last, *rest = lines[0].removeprefix("Training reward    ").split(" ", 3)
    assert float(first) == pytest.approx(0.34, abs=0.03) and float(last) == pytest.approx(0.94, abs=0.03)
    assert rest == ["(means of the first and last 6 steps of 60, sampled at temperature 1)"]
    assert "steps 0 and 60, 500 problems, greedy, 95% intervals. It rose by 0.014" in text
    assert "The training reward rose clearly, the held-out score did not; it began near its best." in text
    assert "evaluate.temperature = 1 measures what training raises" in text
    assert "policy.lr" not in text


def test_an_evaluation_that_samples_is_not_called_greedy(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", noisy(0.31, 0.97), (0.5, 0.52))
    config = json.loads((run / "config.json").read_text())
    config["evaluate"]["temperature"] = 0.8
    (run / "config.json").write_text(json.dumps(config))
    text = render_text(summarise(run))
    assert "500 problems, sampled at temperature 0.8, 95% intervals" in text
    assert "greedy" not in text and "evaluate.temperature = 1" not in text
    assert "The training reward rose clearly, the held-out score did not." in text


def test_a_collapse_names_a_lower_rate_and_a_warm_up(tmp_path: Path) -> None:
    """0.734 -> 0.014 at the end, and no reward at all in the last steps."""
    summary = summarise(run_of(tmp_path / "run", [*noisy(0.43, 0.4, 0.05), 0.0, 0.0, 0.0], (0.734, 0.014)))
    text = render_text(summary)
    assert summary.outcome.kind is OutcomeKind.COLLAPSED
    assert "Warning            the policy collapsed: the training reward fell from 0.4" in text
    tries = "policy.lr = 3e-5, a third of 1e-4, and policy.warmup_steps = 10 (now 0)"
    assert f"Try {tries}" in text and f"  it collapsed:    try {tries}" in text
    again = f"rillflow run run.toml --set policy.lr=3e-5 --set policy.warmup_steps=10 --dir {tmp_path}/run-lr"
    assert again in text
    (uniform,) = [each for each in summary.warnings if each.startswith("every reward is 0 in steps 61 to 63")]
    assert "the policy collapsed: lower policy.lr" in uniform


def test_a_step_that_destroys_is_told_even_if_the_policy_recovers(tmp_path: Path) -> None:
    """Rewards as after a first step at four times the rate that the task stands: 0.430, 0.084, ... 0.533."""
    rewards = [0.430, 0.084, 0.092, *noisy(0.12, 0.533, steps=27)]
    text = render_text(summary := summarise(run_of(tmp_path / "run", rewards, (0.734, 0.75), lr=4e-4)))
    assert summary.outcome.kind is not OutcomeKind.COLLAPSED and summary.outcome.is_destroyed
    assert (
        "a few steps destroyed most of the policy: the training reward fell from 0.430 at step 1 to " in text
    )
    assert "most of it in one step; it came back to 0.5" in text
    assert "policy.lr = 1.3e-4, a third of 4e-4, and policy.warmup_steps = 10 (now 0)" in text
    assert "Training reward    0.430 -> 0.5" in text, "the start is the level before the loss"
    assert "(means of the steps before the loss, and of the last 3 steps of 30" in text
    warm = summarise(run_of(tmp_path / "warm", rewards, (0.734, 0.75), lr=4e-4, warmup_steps=12))
    assert "warmup_steps" not in render_text(warm), "it warms up already"


@pytest.mark.parametrize(
    ("rewards", "looks", "advice"),
    [
        (noisy(0.4, 0.4), (0.50, 0.52), "then train longer, or try policy.lr = 3e-4, three times 1e-4"),
        (noisy(0.4, 0.39), (0.50, 0.48), "then try policy.lr = 3e-5, a third of 1e-4"),
        (noisy(0.6, 0.45), (0.50, 0.35), "try policy.lr = 3e-5, a third of 1e-4"),
        (noisy(0.985, 0.985), (0.99, 0.99), "the reward is near its best: try harder prompts"),
    ],
)
def test_advice_has_a_direction_and_a_number(
    tmp_path: Path, rewards: list[float], looks: tuple[float, float], advice: str
) -> None:
    text = render_text(summarise(run_of(tmp_path / "run", rewards, looks)))
    assert advice in text and "NUMBER" not in text


def test_rewards_that_never_differ_are_nothing_to_learn(tmp_path: Path) -> None:
    summary = summarise(run_of(tmp_path / "run", [0.0] * 30, (0.0, 0.0)))
    assert summary.outcome.kind is OutcomeKind.NO_SIGNAL
    assert "  nothing to learn: every reward is 0 in nearly every step" in render_text(summary)
    assert "policy.lr" not in render_text(summary), "no rate helps"


def test_noise_alone_is_no_rise_and_no_loss() -> None:
    """Of 200 flat series, few cross the limit of a rise, and none has a loss beyond 6."""
    numbers = random.Random(0)
    kinds = list[tuple[bool, bool]]()
    for _ in range(200):
        values = [max(0.0, numbers.gauss(0.1, 0.04)) for _ in range(40)]
        trend = trend_of(range(40), values, name="training reward", floor=0.0, top=1.0, answers=64)
        assert trend is not None
        kinds.append((trend.is_clear_rise or trend.is_clear_fall, trend.largest is not None))
    assert sum(moved for moved, _ in kinds) <= 6 and not any(lost for _, lost in kinds)


def test_a_loss_that_explodes_is_a_collapse_and_one_that_falls_is_none() -> None:
    numbers = random.Random(0)
    falling = [2 * math.exp(-step / 10) + 0.4 + numbers.gauss(0, 0.03) for step in range(60)]
    trend = trend_of(range(60), falling, name="training loss", is_loss=True)
    assert trend is not None and trend.is_clear_rise and trend.largest is None and trend.last < trend.first
    burst = trend_of(
        range(63), [*falling[:30], 5.0, 4.0, 3.0, *falling[30:]], name="training loss", is_loss=True
    )
    assert burst is not None and burst.largest is not None and burst.largest.has_recovered
    assert burst.largest.lowest == pytest.approx(4.5) and not burst.has_collapsed
    broken = trend_of(range(60), [*falling[:40], *[8.0 + each for each in range(20)]], name="x", is_loss=True)
    assert broken is not None and broken.has_collapsed


def test_a_run_without_any_reward_has_a_summary(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in (0, 8):
            run.log_evaluation(step, Evaluation(count=20, mean_reward=math.nan, is_accuracy=False))
        for step in range(1, 9):
            metrics = {"reward/score/mean": Mean(total=0.0, count=0)}
            run.log_metrics(step, "grpo", metrics | {"reward/score/share": Mean(total=0.0, count=8)})
    summary = summarise(tmp_path / "run")
    assert summary.outcome.kind is OutcomeKind.NO_SIGNAL
    assert "no answer had a reward: read the reward's messages" in summary.outcome.advice[0].text
