"""What critic and reward model have in common: a scalar head, tokens that are the policy's, minibatches."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rillflow.models.language_model import ScalarModel, require_same_tokens
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.roles.share import Share
from rillflow.roles.trained_role import TrainedRole
from rillflow.training.config import PassesConfig, TrainConfig
from rillflow.training.loss import Loss
from rillflow.training.minibatches import minibatches
from rillflow.training.scorer import Scorer


class ScalarRole(TrainedRole[ScalarModel]):
    """A model with a scalar head that scores and is trained.

    Args:
        share: the model, or this rank's part of it.
        tokenizer: the policy's; the two must have the same tokens.
        train: the optimiser's settings of the first phase, and how a batch is cut into micro-batches.
        seed: the run's seed; it decides how rows are cut into minibatches.
        updates: optimiser steps of that phase, for the schedule.
        version: calls of the training endpoint so far.
        name: what errors and files call it; ``called`` where nothing is said.

    Raises:
        ModelError: the policy's tokens are others.
    """

    called: ClassVar[str]
    """The usual name."""

    def __init__(
        self,
        share: Share[ScalarModel],
        *,
        tokenizer: Tokenizer,
        train: TrainConfig,
        seed: int,
        updates: int,
        version: int = 0,
        name: str | None = None,
    ) -> None:
        name = name or self.called
        require_same_tokens(share.model, tokenizer, name)
        super().__init__(share, train=train, seed=seed, updates=updates, version=version, name=name)
        self._scorer = Scorer(share.model.module, train, parallel=share.parallel)
        self._tokenizer = tokenizer

    def _trained(
        self, rows: Batch, loss: Loss, passes: PassesConfig, units: Tensor | None = None
    ) -> dict[str, Metric]:
        """Optimiser steps over rows, those of one unit together."""
        cut = minibatches(
            rows, passes.epochs, passes.minibatches, self._seed, self.version, units, self._share.rows
        )
        metrics = merge_metrics([self.trainer.update(part, loss) for part in cut])
        self.version += 1
        return metrics
