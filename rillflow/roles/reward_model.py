"""The reward model: a score for every rollout, learned from pairs of answers; and, by another name, a cost.

    rollouts ─ score ─> rewards (or costs), with the fields of the reward role
    pairs ─ prefer ─> metrics                                     chosen above rejected

A rollout is scored at its last token, prompt and answer read as the policy's tokens.
"""

from __future__ import annotations

import torch

from rillflow.errors import RewardError
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.records.rollout import completions
from rillflow.rewards.outcome import Outcome, Score
from rillflow.roles.reward import SCORE_FIELDS, scored_rows
from rillflow.roles.scalar_role import ScalarRole
from rillflow.train.config import PassesConfig
from rillflow.train.minibatches import minibatches, prompt_units
from rillflow.train.scalar_loss import PreferenceLoss
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import THREE_D, TRAIN_PAIRS

COST_FIELDS = ("costs", *SCORE_FIELDS[1:])
"""What a cost adds to a row."""


class RewardModel(ScalarRole):
    """A model with a scalar head that scores rollouts and is trained on pairs."""

    called = "reward model"
    field = "rewards"
    """What the scores are called."""

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=SCORE_FIELDS)
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout.

        Returns:
            The fields of ``Reward.score``; every row is valid.

        Raises:
            RewardError: a score is not finite.
            TrainingError: a row is empty.
        """
        return self._scored(rollouts)

    @endpoint(TRAIN_PAIRS, reads=("tokens",))
    def prefer(self, pairs: Batch, passes: PassesConfig) -> dict[str, Metric]:
        """Optimiser steps that raise the chosen answers' scores above the rejected ones'.

        Args:
            pairs: two rows a pair, one after the other, as ``tasks.prompts.answered_batch`` makes them.
                For costs the chosen answer is the one that costs more.
            passes: how often the pairs are gone through, and in how many steps.

        Raises:
            TrainingError: a row has no partner, or a number is not finite.
        """
        cut = minibatches(
            pairs,
            passes.epochs,
            passes.minibatches,
            self._seed,
            self.version,
            prompt_units(pairs),
            self._share.rows,
        )
        metrics = merge_metrics([self.trainer.update(part, PreferenceLoss()) for part in cut])
        self.version += 1
        return metrics

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


class CostModel(RewardModel):
    """A reward model whose scores are ``costs``: more is worse."""

    called = "cost model"
    field = "costs"

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=COST_FIELDS)
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout: as ``RewardModel.score``, the scores called ``costs``."""
        return self._scored(rollouts)
