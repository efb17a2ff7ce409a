"""Runs as `rillflow watch` shows them, written without training: two that differ in rate, and an agent's.

The numbers are made up; only the files are those of a run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rillflow.records.metrics import Histogram, Max, Mean, Metric, Sum
from rillflow.runs.reader import Evaluation, RankSpan, SpanRecord
from rillflow.runs.run_directory import RunDirectory
from tests.unit.written_rollouts import write_rollouts

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='own'>\u202egnp"
"""A text that would run as code, if a page let it, and turns the text after it around."""
PROMPTS = (
    "How many primes are below 30?",
    "What is 17 * 23?",
    "Which day is 100 days after Monday?",
    "Is 221 prime?",
)
ANSWERS = ("10", "391", "Wednesday", "no, 13 * 17")
TOOL = "\n<tool>calculator: "
WORDS = (
    "so",
    "we",
    "count",
    "the",
    "remainder",
    "which",
    "is",
    "then",
    "check",
    "again",
    "hence",
    "it",
    "follows",
)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write_samples(folder: Path, *, steps: int = 300) -> list[Path]:
    """Write the three runs into a folder."""
    return [
        write_sample(folder / "lr-1e-5", steps=steps, rate=1e-5, pace=90, seed=1),
        write_sample(folder / "lr-5e-5", steps=steps, rate=5e-5, pace=40, seed=2),
        write_sample(folder / "agent", steps=min(steps, 60), rate=1e-5, pace=30, seed=3, has_tool=True),
    ]


def write_sample(
    path: Path,
    *,
    steps: int,
    rate: float,
    pace: float,
    seed: int,
    has_tool: bool = False,
    rollouts_every: int = 1,
) -> Path:
    """Write one run whose reward nears 0.9 with a time constant of ``pace`` steps."""
    numbers, clock = random.Random(seed), _Clock()
    agent = {"function": "agent.py:solve"} if has_tool else None
    config = {
        "run": {"seed": seed, "rollouts_every": rollouts_every},
        "task": {"source": "questions.jsonl", "held_out": 200},
        "policy": {"lr": rate, "model": {"path": "Qwen2.5-0.5B-Instruct"}},
        "rollout": {"max_tokens": 64, "agent": agent},
        "algorithm": {"name": "grpo", "steps": steps, "old_logprobs": "sampler" if has_tool else "trainer"},
    }
    with RunDirectory.open(path, config, clock=clock) as run:
        run.log_start(
            {
                "started": "2026-11-26T08:00:00+00:00",
                "command": ["rillflow", "run", "run.toml"],
                "device": "cpu",
                "cores": 4,
            }
        )
        for step in range(1, steps + 1):
            skill = 0.9 - 0.75 * math.exp(-step / pace)
            begun = clock.now
            for span in _spans(step, begun, numbers):
                run.log_span(span)
            clock.now = begun + 2.6
            run.log_metrics(step, "grpo", _metrics(step, skill, numbers, compared=not has_tool))
            if step % rollouts_every == 0:
                write_rollouts(path, step, _rows(step, skill, numbers, has_tool))
            if step % 20 == 0:
                _evaluate(run, step, skill, numbers)
        run.write_json("tokens.json", {"texts": _vocabulary()})
        run.write_json("finished.json", {"steps": steps})
    return path


def _spans(step: int, begun: float, numbers: random.Random) -> Iterator[SpanRecord]:
    stages = (
        ("policy.generate", "sampler", 2, 0.0, 1.1, ()),
        ("reward.score", "sampler", 2, 1.2, 0.3, ("policy.generate",)),
        ("policy.update", "trainer", 2, 1.6, 0.8, ("reward.score",)),
    )
    for stage, pool, count, offset, took, after in stages:
        ranks = [
            RankSpan(
                rank=rank,
                start_s=begun + offset,
                duration_s=took * numbers.uniform(0.7, 1.0),
                rows=16,
                tokens=500,
            )
            for rank in range(count)
        ]
        yield SpanRecord.of_ranks(ranks, count, step=step, stage=stage, pool=pool, after=after)


def _metrics(step: int, skill: float, numbers: random.Random, *, compared: bool) -> dict[str, Metric]:
    def mean(value: float) -> Mean:
        return Mean(total=value * 16, count=16)

    gap = 10 ** numbers.gauss(-6, 0.2) if compared else 0.0
    return {
        "reward/score/mean": mean(min(1.0, max(0.0, skill + numbers.gauss(0, 0.06)))),
        "policy/loss/mean": mean(numbers.gauss(0, 0.01)),
        "policy/entropy/mean": mean(0.2 + 1.1 * math.exp(-step / 120) + numbers.gauss(0, 0.02)),
        "policy/kl/mean": mean(0.0005 * step),
        "train/grad_norm/mean": mean(abs(numbers.gauss(0.5, 0.1)) * (8 if numbers.random() < 0.01 else 1)),
        "train/lr/mean": mean(1e-5),
        "rollout/length/mean": mean(30 - 12 * skill + numbers.gauss(0, 1)),
        "rollout/tokens/sum": Sum(value=480.0 + numbers.randrange(100)),
        "mismatch/logprob_gap/max": Max(value=gap),
        "mismatch/weight/mean": mean(1.0),
        "staleness/versions/histogram": Histogram(edges=(0.0, 1.0), counts=(400, 80, 2)),
        "reward/flat_groups/share": mean(abs(skill - 0.5)),
    }


def _evaluate(run: RunDirectory, step: int, skill: float, numbers: random.Random) -> None:
    correct = round(200 * min(1.0, skill + numbers.gauss(0, 0.02)))
    share = correct / 200
    half = 1.96 * math.sqrt(share * (1 - share) / 200)
    found = Evaluation(correct=correct, count=200, mean_reward=share, interval=(share - half, share + half))
    run.log_evaluation(step, found)


def _rows(step: int, skill: float, numbers: random.Random, has_tool: bool) -> list[dict[str, Any]]:
    vocabulary = {text: place for place, text in enumerate(_vocabulary())}
    rows = []
    for prompt, (question, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        rewards = [float(numbers.random() < skill) for _ in range(4)]
        for sample, reward in enumerate(rewards):
            thought = [f" {numbers.choice(WORDS)}" for _ in range(numbers.randrange(6, 20))]
            hostile = [HOSTILE] if (has_tool and prompt == 3 and sample == 0) else []
            inserted = [TOOL, ANSWERS[prompt], "</tool>\n"] if has_tool else []
            said = [*thought, *hostile]
            last = ["the answer is ", answer if reward else "unclear", "<|end|>"]
            texts = [question, *said, *inserted, *last]
            places = [*range(1, 1 + len(said)), *range(1 + len(said) + len(inserted), len(texts))]
            sampled = [place in places for place in range(len(texts))]
            rows.append(
                {
                    "epoch": (step - 1) // 10,
                    "prompt_id": prompt,
                    "sample": sample,
                    "prompt": question,
                    "columns": {"answer": answer},
                    "tokens": [vocabulary[text] for text in texts],
                    "logprobs": [-numbers.expovariate(1.5) if each else 0.0 for each in sampled],
                    "versions": [
                        max(0, step - 1 - (place % 3 == 0)) if each else -1
                        for place, each in enumerate(sampled)
                    ],
                    "finish": "stop" if numbers.random() < 0.95 else "length",
                    "completion": "".join(text for text, each in zip(texts, sampled, strict=True) if each),
                    "message": "",
                    "outcome": "score",
                    "reward": reward,
                    "advantage": reward - sum(rewards) / 4,
                }
            )
    return rows


def _vocabulary() -> list[str]:
    words = (f" {word}" for word in WORDS)
    return [
        *dict.fromkeys(
            [*PROMPTS, *ANSWERS, *words, HOSTILE, TOOL, "</tool>\n", "the answer is ", "unclear", "<|end|>"]
        )
    ]
