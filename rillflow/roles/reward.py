"""The reward: a function of prompt, answer and columns; every row gets one of four outcomes.

    rollouts ─ decode ─> texts ─ killable children ─> score | abstain | timeout | error

Only a score counts: a row without one leaves its group's baseline and gets advantage 0, never a
silent reward of 0.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from rillflow.errors import RewardError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers

OUTCOMES = tuple(Outcome)


class Reward:
    """A reward function behind its workers.

    Args:
        workers: the children that call the function.
        tokenizer: turns sampled tokens into the text that is scored.
        max_failures: share of rows with a time-out or an error above which the run stops.
    """

    endpoints: tuple[str, ...] = ("score",)

    def __init__(self, workers: RewardWorkers, tokenizer: Tokenizer, *, max_failures: float) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._max_failures = max_failures

    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout.

        Returns:
            Fields ``rewards`` [B] float32 (0 where not valid), ``valid`` [B] bool, ``outcome`` [B] int8
            (index into OUTCOMES), ``groups`` [B] int64 (rows of one prompt share a number), and the
            texts ``completion`` and ``message``.

        Raises:
            RewardError: more than ``max_failures`` of the rows timed out or failed.
        """
        texts = [self._tokenizer.decode(tokens.tolist()) for tokens in completions(rollouts).rows()]
        scores = self._call(texts, rollouts.ragged("columns").to_text())
        self._stop_if_broken(rollouts, scores)
        values = torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32)
        return Batch(
            ids=rollouts.ids,
            fields={
                "rewards": values,
                "valid": torch.tensor([score.outcome is Outcome.SCORE for score in scores]),
                "outcome": torch.tensor(
                    [OUTCOMES.index(score.outcome) for score in scores], dtype=torch.int8
                ),
                "groups": torch.unique(rollouts.ids[:, :2], dim=0, return_inverse=True)[1],
                "completion": Ragged.from_text(texts),
                "message": Ragged.from_text([score.message for score in scores]),
            },
        )

    def _call(self, texts: list[str], columns: list[str]) -> list[Score]:
        rows: list[dict[str, Any]] = [json.loads(text) for text in columns]
        prompts = [row.pop("prompt") for row in rows]
        answers: list[Any] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = list(rows[0]) if rows else []
        return self._workers.score(prompts, answers, {name: [row[name] for row in rows] for name in names})

    def _stop_if_broken(self, rollouts: Batch, scores: list[Score]) -> None:
        bad = [
            index for index, score in enumerate(scores) if score.outcome in (Outcome.TIMEOUT, Outcome.ERROR)
        ]
        if len(bad) > self._max_failures * len(scores):
            first = scores[bad[0]]
            raise RewardError(
                f"the reward failed on {len(bad)} of {len(scores)} rows; "
                f"the first, row ({rollouts.row_id(bad[0])}): {first.outcome}: {first.message}",
                why=f"more than reward.max_failures = {self._max_failures:g} of a step's rows",
                fix="mend the function, or raise reward.max_failures or reward.timeout_s",
            )
