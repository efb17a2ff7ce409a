"""The panel: functions, a reward model and a judge score the same rows, and their weighted sum is the reward.

    rollouts ─┬─ function ─┐
              ├─ model ────┼─ weights ─> rewards, and what each said
              └─ judge ────┘

As of several functions: who abstains is left out of a row's sum, and an error of one is the row's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.weighted import summed
from rillflow.roles.reward import OUTCOMES, SCORE_FIELDS, reward_metrics, scored_rows
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import GROUPS


class PanelMember(Protocol):
    """What scores rows: the reward role, a reward model, a judge."""

    def score(self, rollouts: Batch, /) -> Batch:
        """The fields of a score."""


class Panel:
    """Several scorers as one.

    Args:
        members: what scores, by name.
        weights: what each counts.
    """

    def __init__(self, members: Mapping[str, PanelMember], weights: Mapping[str, float]) -> None:
        self._members, self._weights = members, weights

    @endpoint(
        GROUPS,
        reads=("tokens", "loss_mask", "columns"),
        writes=(*SCORE_FIELDS, "parts"),
        measures=reward_metrics,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout: the fields of ``Reward.score``, and ``parts``, what each member said.

        Raises:
            RewardError: a member cannot go on.
        """
        found = {name: member.score(rollouts) for name, member in self._members.items()}
        said = {name: scores_of(scores) for name, scores in found.items()}
        rows = [
            summed({name: (self._weights[name], each[row]) for name, each in said.items()})
            for row in range(len(rollouts))
        ]
        texts = next(iter(found.values())).ragged("completion").to_text()
        parts = Ragged.from_text([json.dumps(dict(row.parts)) if row.parts else "" for row in rows])
        return scored_rows(rollouts, texts, rows).with_fields(parts=parts)


def scores_of(scores: Batch) -> list[Score]:
    """The scores of rows, of the fields that a scorer returns."""
    values, outcomes = scores.dense("rewards").tolist(), scores.dense("outcome").tolist()
    messages = scores.ragged("message").to_text()
    return [
        Score(
            outcome=OUTCOMES[outcome],
            value=value if OUTCOMES[outcome] is Outcome.SCORE else None,
            message=message,
        )
        for value, outcome, message in zip(values, outcomes, messages, strict=True)
    ]
