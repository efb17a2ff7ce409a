"""Written run: a long run directory without a training, for what reads run directories.

    words ─ pool of questions and answers ─ a step: prompts, samples, rewards ─┬─ rollouts/step-N, columns
                                                                              └─ RunDirectory: metrics, spans

The files are as a run writes them, but without waiting for the disk. The reward rises with the steps, and one
answer in a thousand has the word ``zeppelin``, which is nowhere else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from rillflow.records.metrics import Histogram, Max, Mean, Metric, Min, Sum
from rillflow.runs import layout
from rillflow.runs.json_lines import encode
from rillflow.runs.reader import Evaluation, RankSpan, SpanRecord
from rillflow.runs.run_directory import RunDirectory

Array = npt.NDArray[Any]
TEXT = (
    "we first add the two numbers then carry one to next column so that sum is equal answer check again wait "
    "let me see because therefore total minus times divided by remainder zero hundred thousand half both"
)
WORDS = TEXT.split()
RARE = "zeppelin"
SAMPLES = 8
PROMPTS, ANSWERS = 20_000, 30_000
STAGES = {
    "policy.generate": (),
    "policy.logprobs": ("policy.generate",),
    "reward.score": ("policy.generate",),
    "controller.group_advantages": ("reward.score",),
    "policy.update": ("policy.generate", "policy.logprobs", "controller.group_advantages"),
    "policy.publish": (),
}
NAMES = (
    *("policy/ratio/mean", "policy/clipped/share", "policy/clipped_low/share", "policy/clipped_high/share"),
    *("policy/advantage/mean", "mismatch/kl/mean", "policy/kl/mean", "policy/entropy/mean"),
    *("policy/clamped/share", "policy/loss/mean", "train/grad_norm/mean", "train/lr/mean"),
    *("reward/flat_groups/share", "rollout/stopped/share", "staleness/kl/mean"),
)
"""Further metrics of a step, with values of no meaning."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts of different lengths, as bytes and as tokens."""

    data: Array
    """[N] bytes of all texts."""
    ends: Array
    """[texts + 1] bounds of each text."""
    tokens: Array
    """[T] tokens of all texts."""
    token_ends: Array
    """[texts + 1] bounds of each text's tokens."""

    @staticmethod
    def of(texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> Texts:
        """Return some texts with their tokens."""
        encoded = [text.encode() for text in texts]
        return Texts(
            data=np.frombuffer(b"".join(encoded), dtype=np.uint8),
            ends=np.cumsum([0, *map(len, encoded)]),
            tokens=np.concatenate([np.array(each, dtype=np.int32) for each in tokens]),
            token_ends=np.cumsum([0, *map(len, tokens)]),
        )


def taken(values: Array, ends: Array, chosen: Array) -> tuple[Array, Array]:
    """Return the values of the chosen rows, and the length of each."""
    starts, lengths = ends[:-1][chosen], np.diff(ends)[chosen]
    moves = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return values[np.arange(lengths.sum()) + moves], lengths


class Written:
    """A run directory that is written step by step.

    Args:
        path: the directory.
        steps: number of steps that the config names.
        rows: rows of each step; 0 writes no rollouts.
    """

    def __init__(self, path: Path, steps: int, rows: int) -> None:
        self._path, self._rows, self._steps = path, rows, steps
        self._random = np.random.default_rng(0)
        self._time_s = 0.0
        config: dict[str, Any] = {"algorithm": {"name": "grpo", "steps": steps}, "run": {"seed": 0}}
        self.run = RunDirectory.open(path, config, clock=lambda: self._time_s)
        self.run.log_start(
            {"started": "2026-01-01T00:00:00+00:00", "command": ["rillflow", "run", "big.toml"]}
        )
        if rows:
            self._make_pool()

    def _make_pool(self) -> None:
        texts = [f" {word}" for word in WORDS] + [str(digit) for digit in range(10)] + [f" {RARE}", "?", "="]
        (self._path / layout.TOKENS).write_bytes(encode({"texts": texts}))
        (self._path / layout.ROLLOUTS).mkdir(exist_ok=True)
        first_digit = len(WORDS)

        def tokens(count: int) -> list[int]:
            words = self._random.integers(0, first_digit, count).tolist()
            digits = self._random.integers(first_digit, first_digit + 10, 3).tolist()
            return [*words, *digits]

        asked = [tokens(8) for _ in range(PROMPTS)]
        answered = [tokens(int(count)) for count in self._random.integers(8, 30, ANSWERS)]
        for answer in answered[::1000]:
            answer.insert(len(answer) // 2, first_digit + 10)
        spelled = [["".join(texts[token] for token in each) for each in lists] for lists in (asked, answered)]
        self._asked = Texts.of([json.dumps({"prompt": text, "answer": 0}) for text in spelled[0]], asked)
        self._answered = Texts.of(spelled[1], answered)

    def step(self, step: int) -> None:
        """Write one step."""
        reward = 0.1 + 0.8 * (1 - math.exp(-step / (0.3 * self._steps)))
        if self._rows:
            self._write_rows(step, reward)
        self._write_spans(step)
        self.run.log_metrics(step, "grpo", self._metrics(step, reward))
        if step % max(1, self._steps // 20) == 0:
            correct = round(500 * reward)
            self.run.log_evaluation(step, Evaluation(correct=correct, count=500, mean_reward=correct / 500))

    def _write_rows(self, step: int, reward: float) -> None:
        groups = max(1, self._rows // SAMPLES)
        prompts = np.repeat(self._random.choice(PROMPTS, groups, replace=False), SAMPLES)
        count = len(prompts)
        answers = self._random.integers(0, ANSWERS, count)
        asked, asked_lengths = taken(self._asked.tokens, self._asked.token_ends, prompts)
        said, said_lengths = taken(self._answered.tokens, self._answered.token_ends, answers)
        lengths = asked_lengths + said_lengths
        is_said = np.zeros(lengths.sum(), dtype=bool)
        ends = np.cumsum(lengths)
        is_said[np.repeat(ends - np.cumsum(said_lengths), said_lengths) + np.arange(said_lengths.sum())] = (
            True
        )
        tokens = np.empty(len(is_said), dtype=np.int32)
        tokens[~is_said], tokens[is_said] = asked, said
        logprobs = np.where(is_said, -self._random.exponential(0.3, len(is_said)), 0).astype(np.float32)
        columns, column_lengths = taken(self._asked.data, self._asked.ends, prompts)
        texts, text_lengths = taken(self._answered.data, self._answered.ends, answers)
        rewards = (self._random.random(count) < reward).astype(np.float64)
        found = {
            "ids": np.stack([np.full(count, step // 100), prompts, np.tile(np.arange(SAMPLES), groups)], 1),
            "rewards:": rewards,
            "valid:": np.ones(count, dtype=bool),
            "advantages:": rewards - reward,
        }
        ragged = {
            "tokens": (tokens, lengths),
            "sampler_logprobs": (logprobs, lengths),
            "versions": (np.where(is_said, step - 1, -1).astype(np.int32), lengths),
            "columns": (columns, column_lengths),
            "completion": (texts, text_lengths),
            "finish": (np.frombuffer(b"stop" * count, dtype=np.uint8), np.full(count, 4)),
            "outcome": (np.frombuffer(b"score" * count, dtype=np.uint8), np.full(count, 5)),
        }
        found |= {f"{name}:values": values for name, (values, _) in ragged.items()}
        found |= {f"{name}:lengths": sizes.astype(np.int64) for name, (_, sizes) in ragged.items()}
        file = layout.rollout_file(self._path, step, 1, 1)
        temporary = file.with_name(f".{file.name}.tmp")
        temporary.write_bytes(save(found))
        temporary.replace(file)

    def _write_spans(self, step: int) -> None:
        for stage, after in STAGES.items():
            took_s = 0.05 + 0.2 * float(self._random.random()) * (stage != "policy.publish")
            each = RankSpan(rank=0, start_s=self._time_s, duration_s=took_s, rows=self._rows, tokens=20_000)
            self._time_s += took_s
            given = {"step": step, "stage": stage, "pool": "main", "after": after}
            self.run.log_span(SpanRecord.of_ranks([each], 1, **given))  # type: ignore[arg-type]

    def _metrics(self, step: int, reward: float) -> dict[str, Metric]:
        noise = self._random.normal(0, 0.05, len(NAMES)).tolist()
        found: dict[str, Metric] = {
            "reward/score/mean": Mean(total=(reward + noise[0]) * self._rows, count=self._rows or 1),
            "reward/score/max": Max(value=1.0),
            "reward/score/min": Min(value=0.0),
            "rollout/length/mean": Mean(total=20 + step / 1000 + 10 * noise[1], count=1),
            "rollout/tokens/sum": Sum(value=20_000.0),
            "mismatch/logprob_gap/max": Max(value=abs(noise[2]) * 1e-5),
            "run/step_seconds/mean": Mean(total=1.0 + noise[3], count=1),
            "mismatch/log_ratio/histogram": Histogram(
                edges=(-1.0, -0.1, 0.1, 1.0), counts=(1, 50, step % 100, 50, 1)
            ),
        }
        shares = {"score": 1.0, "abstain": 0.0, "timeout": 0.0, "error": 0.0}
        found |= {f"reward/{name}/share": Mean(total=share, count=1) for name, share in shares.items()}
        means = zip(NAMES, noise, strict=True)
        return found | {name: Mean(total=abs(value) * 1613, count=1613) for name, value in means}


def write_run(path: Path, steps: int, rows: int) -> None:
    """Write a whole run and finish it; ``rows`` of each step, as whole groups of SAMPLES."""
    written = Written(path, steps, rows)
    with written.run:
        for step in range(1, steps + 1):
            written.step(step)
        written.run.write_json(layout.FINISHED, {"steps": steps})
