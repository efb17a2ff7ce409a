"""The panel: functions, a reward model and a judge score the same rows; their weighted sum is the reward.

    rollouts ─┬─ function ─┐
              ├─ model ────┼─ weights ─> rewards, and each member's score
              └─ judge ────┘

As with several functions, a member that abstains is left out of a row's sum; a member's error is the row's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import summed
from rillflow.roles.judge import Judge
from rillflow.roles.reward import OUTCOMES, SCORE_FIELDS, Reward, parts_of, reward_metrics, scored_rows
from rillflow.roles.scalar_roles import RewardModel
from rillflow.roles.setting import RoleSetting
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import GROUPS

PanelMember = Reward | RewardModel | Judge
"""A scorer of rows."""
_MEMBERS: Mapping[str, type[PanelMember]] = {"function": Reward, "model": RewardModel, "judge": Judge}


class Panel:
    """One score from several scorers.

    Args:
        members: scorers by name.
        weights: weight of each scorer.
    """

    def __init__(self, members: Mapping[str, PanelMember], weights: Mapping[str, float]) -> None:
        self._members, self._weights = members, weights

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make the members that the recipe weighs."""
        weights = setting.limits.weights
        assert weights is not None, "a recipe without weights has no panel"
        judge = setting.judge
        remote = {} if judge is None else {"judge": Reward.make(replace(setting, functions=[judge]))}
        members = {name: remote[name] if name in remote else _MEMBERS[name].make(setting) for name in weights}
        return cls(members, weights)

    @endpoint(
        GROUPS,
        reads=("tokens", "loss_mask", "columns"),
        writes=(*SCORE_FIELDS, "parts"),
        measures=reward_metrics,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout: the fields of ``Reward.score``, and ``parts``, the score of each member.

        Raises:
            RewardError: a member fails.
        """
        found = {name: member.score(rollouts) for name, member in self._members.items()}
        said = {name: scores_of(scores) for name, scores in found.items()}
        rows = [
            summed({name: (self._weights[name], each[row]) for name, each in said.items()})
            for row in range(len(rollouts))
        ]
        texts = next(iter(found.values())).ragged("completion").to_text()
        inner = [
            {name: score for each in said.values() for name, score in each[row].parts.items()}
            for row in range(len(rows))
        ]
        merged = [{**more, **row.parts} if row.parts else {} for more, row in zip(inner, rows, strict=True)]
        parts = Ragged.from_text([json.dumps(each) if each else "" for each in merged])
        scores = scored_rows(rollouts, texts, rows).with_fields(parts=parts)
        logs = [each.ragged("logged") for each in found.values() if "logged" in each.fields]
        return scores.with_fields(logged=logs[0]) if logs else scores  # one member is a function at most


def scores_of(scores: Batch) -> list[Score]:
    """Return the scores of rows from the fields that a scorer returns."""
    values, outcomes = scores.dense("rewards").tolist(), scores.dense("outcome").tolist()
    messages, parts = scores.ragged("message").to_text(), parts_of(scores)
    return [
        Score(
            outcome=OUTCOMES[outcome],
            value=value if OUTCOMES[outcome] is Outcome.SCORE else None,
            message=message,
            parts=part,
        )
        for value, outcome, message, part in zip(
            values, outcomes, messages, parts or [{}] * len(values), strict=True
        )
    ]
