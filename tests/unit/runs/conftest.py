"""A run directory as after a quickstart: a warm start, then reinforcement learning, 60 steps in total."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rillflow.records.metrics import Max, Mean, Metric, Sum
from rillflow.runs.reader import Evaluation, SpanRecord
from rillflow.runs.run_directory import RunDirectory
from tests.unit.written_rollouts import write_rollouts

CONFIG = {
    "run": {"seed": 0, "dir": None},
    "task": {"source": "arithmetic", "digits": 2},
    "policy": {
        "lr": 1e-4,
        "model": {"path": None, "new": {"architecture": "qwen2", "layers": 4, "hidden": 128, "heads": 4}},
    },
    "warm_start": {"steps": 20},
    "algorithm": {"name": "grpo", "steps": 40},
}
START = {
    "started": "2026-11-21T07:03:05+00:00",
    "command": ["/usr/bin/rillflow", "run", "recipes/arithmetic/run.toml"],
    "device": "cpu",
    "cores": 2,
    "platform": "Linux-6.1-x86_64",
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}


class Clock:
    """A clock that only moves on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rows(step: int, skill: float, numbers: random.Random) -> Iterator[dict[str, Any]]:
    """Yield sums and answers that are right with probability ``skill``."""
    for prompt in range(8):
        one, other = numbers.randrange(10, 99), numbers.randrange(10, 99)
        for sample in range(4):
            right = numbers.random() < skill
            answer = str(one + other if right else one + other + numbers.choice([-10, 1, 10, 100]))
            logprobs = [-numbers.expovariate(3.0 if right else 1.0) for _ in answer] + [-0.01]
            yield {
                "epoch": 0,
                "prompt_id": prompt,
                "sample": sample,
                "prompt": f"{one}+{other}=",
                "columns": {"answer": str(one + other)},
                "tokens": [10, 11, 3, 10, 11, 4, *(int(digit) for digit in answer), 12],
                "logprobs": [0.0] * 6 + logprobs,
                "versions": [-1] * 6 + [step - 1] * (len(answer) + 1),
                "finish": "stop",
                "completion": answer,
                "message": "",
                "outcome": "score",
                "reward": 1.0 if right else 0.0,
                "advantage": 0.7 if right else -0.7,
            }


def learning_metrics(step: int, skill: float, numbers: random.Random) -> dict[str, Metric]:
    """Return the metrics of a step of reinforcement learning."""
    noisy = min(1.0, max(0.0, skill + numbers.gauss(0, 0.03)))
    shares = {"score": 0.99, "abstain": 0.0, "timeout": 0.006, "error": 0.004}
    return {
        "reward/score/mean": Mean(total=1024 * noisy, count=1024),
        "policy/loss/mean": Mean(total=numbers.gauss(0, 0.004), count=1),
        "policy/entropy/mean": Mean(total=0.9 * math.exp(-step / 60) + numbers.gauss(0, 0.01), count=1),
        "policy/kl/mean": Mean(total=0.0004 * (step - 20), count=1),
        "policy/clipped/share": Mean(total=abs(numbers.gauss(0.04, 0.01)), count=1),
        "train/grad_norm/mean": Mean(total=abs(numbers.gauss(0.6, 0.1)), count=1),
        "mismatch/logprob_gap/max": Max(value=10 ** numbers.gauss(-6.2, 0.2)),
        "rollout/length/mean": Mean(total=3.1 + numbers.gauss(0, 0.05), count=1),
        "rollout/length/max": Max(value=5.0),
        "rollout/tokens/sum": Sum(value=3200.0),
        "rollout/stopped/share": Mean(total=0.97 + 0.02 * skill, count=1),
        "reward/flat_groups/share": Mean(total=abs(skill - 0.5), count=1),
        **{f"reward/{name}/share": Mean(total=1024 * share, count=1024) for name, share in shares.items()},
    }


def interval(accuracy: float, count: int) -> tuple[float, float]:
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / count)
    return max(0.0, accuracy - half), min(1.0, accuracy + half)


def evaluate(run: RunDirectory, step: int, accuracy: float, count: int = 500) -> None:
    correct = round(accuracy * count)
    found = Evaluation(correct=correct, count=count, mean_reward=accuracy, interval=interval(accuracy, count))
    run.log_evaluation(step, found)


def write_run(path: Path, *, steps: int = 60, final: float = 0.9) -> Path:
    """Write a run of ``steps`` steps, 20 of them a warm start, with a final accuracy of ``final``."""
    numbers, clock = random.Random(7), Clock()
    with RunDirectory.open(path, CONFIG, clock=clock) as run:
        run.log_start(START)
        clock.now = 2.0
        for step in range(1, steps + 1):
            skill = 0.5 + (final - 0.5) * (1 - math.exp(-(step - 20) / 14)) if step > 20 else 0.5
            stages = (
                {"policy.generate": 0.5, "reward.score": 0.08, "policy.update": 0.7}
                if step > 20
                else {"policy.update": 0.1}
            )
            if step == 21:
                clock.now += 0.6
                evaluate(run, 20, 0.5)
            for stage, seconds in stages.items():
                began, took = run.elapsed_s(), seconds * numbers.uniform(0.8, 1.3)
                size = {"rows": 1024, "tokens": 9000}
                run.log_span(SpanRecord(step=step, stage=stage, start_s=began, duration_s=took, **size))
                clock.now += took
            clock.now += 0.02
            if step > 20:
                run.log_metrics(step, "grpo", learning_metrics(step, skill, numbers))
                write_rollouts(run.path, step, rows(step, skill, numbers))
                if step % 20 == 0:
                    evaluate(run, step, skill)
            else:
                loss = 3 * math.exp(-step / 6) + 0.4
                taught = {"supervised/nll/mean": loss, "train/grad_norm/mean": 2 / step}
                run.log_metrics(
                    step, "warm_start", {name: Mean(total=one, count=1) for name, one in taught.items()}
                )
        model = run.checkpoints / f"step-{steps:06d}" / "policy"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        run.write_json("finished.json", {"steps": steps})
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a sample run directory; keywords are those of ``write_run``."""
    names = count()
    return lambda **options: write_run(tmp_path / str(next(names)) / "quickstart", **options)
