"""Trainer: optimiser steps over what a module says, and what it says.

minibatch ─ aim ─ Learner.step ─> part ─ Reader ─> log p or numbers [N] ─ on-policy? ─ loss ─> terms
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rillflow.cluster.ranks import Ranks
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.records.ragged import Ragged
from rillflow.train.config import TrainConfig
from rillflow.train.learner import Aim, Learner
from rillflow.train.loss import Loss
from rillflow.train.scorer import LogprobReader, Reader, ScalarReader, Scorer


class Trainer(Learner):
    """Trains a module and scores with it.

    Args:
        module: a causal language model, or a decoder with a scalar head, with Rillflow's attention; its
            parameters are changed in place.
        config: the optimiser, and how a minibatch is cut.
        total_steps: optimiser steps of the whole phase, for the schedule.
        ranks: those that hold the other parts of every minibatch.
        parallel: where the module is a rank's part of one, that part; ``ranks`` is then its dp.

    Example:
        trainer = Trainer(module, TrainConfig(lr=1e-4), total_steps=100)
        metrics = trainer.update(rows, SupervisedLoss())
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        *,
        total_steps: int,
        ranks: Ranks | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__(module, config, total_steps=total_steps, ranks=ranks, parallel=parallel)
        self.scorer = Scorer(module, config, parallel=parallel)

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged:
        """Log probabilities of the loss tokens, 0 elsewhere; see ``Scorer.logprobs``."""
        return self.scorer.logprobs(batch, temperature)

    def update(
        self, minibatch: Batch, loss: Loss, temperature: float = 1.0, *, ratio_tolerance: float | None = None
    ) -> dict[str, Metric]:
        """Make one optimiser step: ``step`` of the one aim that ``aim`` makes.

        Returns:
            See ``Learner.step``.

        Raises:
            TrainingError: a number is not finite, a row is not on-policy, or there is no loss token;
                nothing was changed.
        """
        return self.step(self.aim(minibatch, loss, temperature, ratio_tolerance=ratio_tolerance))

    def aim(
        self,
        minibatch: Batch,
        loss: Loss,
        temperature: float = 1.0,
        *,
        ratio_tolerance: float | None = None,
        gap_tolerance: float | None = None,
        weight: float = 1.0,
    ) -> Aim:
        """A loss over what the module says, for a ``step``.

        Args:
            minibatch: rows with the fields the loss reads.
            loss: what is minimised.
            temperature: the one the tokens were sampled at.
            ratio_tolerance: where the rows are on-policy, how far trainer and sampler may differ at a token.
            gap_tolerance: where they are and rounding is rough, how far they may differ in the mean.
            weight: what its gradient counts beside that of another aim.
        """
        reader: Reader[Any] = LogprobReader(
            temperature=temperature, ratio_tolerance=ratio_tolerance, gap_tolerance=gap_tolerance
        )
        if loss.is_scalar:
            reader = ScalarReader(back=loss.back)
        return Aim(rows=minibatch, loss=loss, reader=reader, weight=weight)
