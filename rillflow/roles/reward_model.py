"""The reward model: a score for every rollout, learned from pairs of answers; and, by another name, a cost.

    rollouts ─ score ─> rewards (or costs), with the fields of the reward role
    pairs ─ update ─> metrics                                     chosen above rejected

A rollout is scored at its last token, prompt and answer read as the policy's tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from rillflow.errors import RewardError
from rillflow.graph.loss import only_term
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.records.rollout import completions
from rillflow.rewards.outcome import Outcome, Score
from rillflow.roles.reward import COST_FIELDS, SCORE_FIELDS, cost_metrics, reward_metrics, scored_rows
from rillflow.roles.scalar_role import ScalarRole
from rillflow.training.config import PassesConfig
from rillflow.training.loss import PairLoss, loss_of
from rillflow.training.minibatches import prompt_units
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import THREE_D, TRAIN_PAIRS


class RewardModel(ScalarRole):
    """A model with a scalar head that scores rollouts and is trained on pairs."""

    called = "reward model"
    field = "rewards"
    """What the scores are called."""

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=SCORE_FIELDS, measures=reward_metrics)
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout.

        Returns:
            The fields of ``Reward.score``; every row is valid.

        Raises:
            RewardError: a score is not finite.
            TrainingError: a row is empty.
        """
        return self._scored(rollouts)

    @endpoint(TRAIN_PAIRS, reads=("tokens",), says=("chosen", "rejected"))
    def update(self, /, pairs: Batch, loss: Any, passes: PassesConfig, **options: Any) -> dict[str, Metric]:
        """Optimiser steps over pairs of answers, one better than the other.

        Args:
            pairs: two rows a pair, one after the other, as ``tasks.prompts.answered_batch`` makes them.
                For costs the chosen answer is the one that costs more.
            loss: a function of the scores ``chosen`` and ``rejected`` [P], as ``formulas.preference_loss``.
            passes: how often the pairs are gone through, and in how many steps.
            options: further arguments of the loss.

        Raises:
            TrainingError: a row has no partner, or a number is not finite.
        """
        term = only_term(f"{self._name}.update", loss, options)
        return self._trained(pairs, loss_of(term, PairLoss.says, self._name), passes, prompt_units(pairs))

    def _scored(self, rollouts: Batch) -> Batch:
        values = self._scorer.scores(rollouts)
        odd = (~torch.isfinite(values)).nonzero()
        if len(odd):
            row = int(odd[0])
            raise RewardError(
                f"the model's score of row ({rollouts.row_id(row)}) is {float(values[row])}",
                why=f"nothing can be learned from such {self.field}",
                fix="look for weights that are not finite",
            )
        texts = [self._tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
        scores = [Score(outcome=Outcome.SCORE, value=value) for value in values.tolist()]
        return scored_rows(rollouts, texts, scores, self.field)


class SafetyCostModel(RewardModel):
    """A reward model whose scores are ``costs``: more is worse."""

    called = "cost model"
    field = "costs"

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=COST_FIELDS, measures=cost_metrics)
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout: as ``RewardModel.score``, the scores called ``costs``."""
        return self._scored(rollouts)
