"""The reward: a function of prompt, answer and columns; every row gets one of four outcomes.

    rollouts ─ decode ─> texts ─ killable children ─> score | abstain | timeout | error

Only a score counts: a row without one leaves its group's baseline and gets advantage 0, never a
silent reward of 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rillflow.errors import RewardError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric, Min, Sum, mean_of
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.rewards.outcome import FAILED, Outcome, Score
from rillflow.rewards.workers import WeightedWorkers
from rillflow.roles.sampler import GroupId
from rillflow.roles.setting import RoleSetting
from rillflow.training.minibatches import prompt_units
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import DP


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Result of letting groups be scored for some time."""

    complete: Sequence[GroupId]
    """Groups that were scored since the last call and can be collected."""
    waiting: int
    """Groups that are not complete."""


OUTCOMES = tuple(Outcome)
SCORE_FIELDS = ("rewards", "valid", "outcome", "completion", "message")
"""Fields that a score adds to a row."""
COST_FIELDS = ("costs", *SCORE_FIELDS[1:])
"""Fields that a cost adds to a row."""


def reward_metrics(scores: Batch) -> dict[str, Metric]:
    """Return metrics of scores, of the other outcomes, and of groups whose rewards are all equal."""
    valid = scores.dense("valid")
    rewards = scores.dense("rewards")[valid].double()
    groups = prompt_units(scores)[valid]
    metrics: dict[str, Metric] = {
        "reward/score/mean": mean_of(rewards),
        "reward/flat_groups/share": mean_of(_flat(groups, rewards)),
    }
    if len(rewards):
        metrics["reward/score/max"] = Max(value=float(rewards.max()))
        metrics["reward/score/min"] = Min(value=float(rewards.min()))
    for index, outcome in enumerate(OUTCOMES):
        metrics[f"reward/{outcome}/share"] = mean_of((scores.dense("outcome") == index).double())
    parts = parts_of(scores)
    for name in sorted({name for each in parts for name in each}):
        said = [each[name] for each in parts if name in each]
        metrics[f"rewards/{name}/mean"] = Mean(total=sum(said), count=len(said))
    return metrics


def parts_of(scores: Batch) -> list[dict[str, float]]:
    """Return each row's scores by function; empty if only one function scores."""
    texts = scores.ragged("parts").to_text() if "parts" in scores.fields else []
    return [json.loads(text or "{}") for text in texts]


def cost_metrics(scores: Batch) -> dict[str, Metric]:
    """Return metrics of the costs, and the share of rows that have one."""
    valid = scores.dense("valid")
    costs = scores.dense("costs")[valid].double()
    metrics: dict[str, Metric] = {
        "cost/value/mean": mean_of(costs),
        "cost/valid/share": mean_of(valid.double()),
        "cost/none/sum": Sum(value=float(not len(costs))),
    }
    if len(costs):
        metrics["cost/value/max"] = Max(value=float(costs.max()))
    return metrics


def _flat(groups: Tensor, rewards: Tensor) -> Tensor:
    """Return [G] float64: 1 for a group whose rewards are all equal, else 0."""
    names, index = torch.unique(groups, return_inverse=True)
    none = rewards.new_zeros(len(names))
    low, high = (none.scatter_reduce(0, index, rewards, to, include_self=False) for to in ("amin", "amax"))
    return (low == high).double()


class Reward:
    """A reward function and the workers that call it.

    Args:
        workers: the children that call the function.
        tokenizer: turns sampled tokens into the text that is scored.
        max_failures: share of rows with a timeout or an error above which the run stops.
    """

    field = "rewards"
    """Name of the scores' field."""

    def __init__(self, workers: WeightedWorkers, tokenizer: Tokenizer, *, max_failures: float) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._max_failures = max_failures

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make the role; its functions run in child processes that end with the rank."""
        workers = setting.site.stack.enter_context(WeightedWorkers(setting.functions, setting.limits))
        return cls(workers, setting.tokenizer, max_failures=setting.limits.max_failures)

    @endpoint(
        DP,
        reads=("tokens", "loss_mask", "columns"),
        writes=SCORE_FIELDS,
        measures=reward_metrics,
        by_groups=True,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout.

        Returns:
            Fields ``rewards`` [B] float32 (0 where not valid), ``valid`` [B] bool, ``outcome`` [B] int8
            (index into OUTCOMES), and the texts ``completion`` and ``message``.

        Raises:
            RewardError: more than ``max_failures`` of the rows timed out or failed.
        """
        texts = [self._tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
        scores = self._call(texts, rollouts.ragged("columns").to_text())
        self._stop_if_broken(rollouts, scores)
        found = scored_rows(rollouts, texts, scores, self.field)
        parts = [json.dumps(score.parts) if score.parts else "" for score in scores]
        return found.with_fields(parts=Ragged.from_text(parts)) if self.field == "rewards" else found

    def advance(self, rows: Batch | None, given_up: Sequence[GroupId], wait_s: float) -> Scored:
        raise NotImplementedError

    def collect(self, groups: Sequence[GroupId]) -> Batch:
        raise NotImplementedError

    def _call(self, texts: list[str], columns: list[str]) -> list[Score]:
        """Return the score of every row; a row whose agent failed is not sent to the functions."""
        rows: list[dict[str, Any]] = [json.loads(text) for text in columns]
        kept = [place for place, row in enumerate(rows) if FAILED not in row]
        prompts = [rows[place].pop("prompt") for place in kept]
        answers: list[Any] = [
            texts[place] if isinstance(prompt, str) else [{"role": "assistant", "content": texts[place]}]
            for place, prompt in zip(kept, prompts, strict=True)
        ]
        names = list(rows[kept[0]]) if kept else []
        more = {name: [rows[place][name] for place in kept] for name in names}
        found = iter(self._workers.score(prompts, answers, more))
        return [
            Score(outcome=Outcome(row[FAILED][0]), message=row[FAILED][1]) if FAILED in row else next(found)
            for row in rows
        ]

    def _stop_if_broken(self, rollouts: Batch, scores: list[Score]) -> None:
        bad = [
            index for index, score in enumerate(scores) if score.outcome in (Outcome.TIMEOUT, Outcome.ERROR)
        ]
        if len(bad) > self._max_failures * len(scores):
            first = scores[bad[0]]
            raise RewardError(
                f"the reward failed on {len(bad)} of {len(scores)} rows; "
                f"the first, row ({rollouts.row_id(bad[0])}): {first.outcome}: {first.message}",
                why=f"the share is above reward.max_failures = {self._max_failures:g}",
                fix="fix the function, or raise reward.max_failures or reward.timeout_s",
            )


class Cost(Reward):
    """A reward function whose scores are called ``costs``: higher is worse."""

    field = "costs"

    @endpoint(DP, reads=("tokens", "loss_mask", "columns"), writes=COST_FIELDS, measures=cost_metrics)
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout; see Reward, with ``costs`` for ``rewards``."""
        return super().score(rollouts)


def require_readable(name: str, why: Sequence[str]) -> None:
    """Refuse rows if a model can read none; ``why`` has each row's reason, empty if it is readable.

    Raises:
        RewardError: there are rows, and the model can read none.
    """
    if why and all(why):
        raise RewardError(
            f"the {name} can read none of {len(why)} rows; the first: {why[0]}",
            why="rows without a score cannot be trained on",
            fix=f"choose a {name} whose tokeniser and context hold the policy's rows",
        )


def scored_rows(
    rollouts: Batch, texts: Sequence[str], scores: Sequence[Score], name: str = "rewards"
) -> Batch:
    """Return the fields of ``Reward.score``, the first of them called ``name``.

    Args:
        rollouts: B rows.
        texts: their answers.
        scores: their outcomes.
        name: name of the values' field.
    """
    return Batch(
        ids=rollouts.ids,
        fields={
            name: torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32),
            "valid": torch.tensor([score.outcome is Outcome.SCORE for score in scores], dtype=torch.bool),
            "outcome": torch.tensor([OUTCOMES.index(score.outcome) for score in scores], dtype=torch.int8),
            "completion": Ragged.from_text(texts),
            "message": Ragged.from_text([score.message for score in scores]),
        },
    )
