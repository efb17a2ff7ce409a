"""Trainer: optimiser steps over log probabilities, and the log probabilities themselves.

minibatch ─ aim ─ Learner.step ─> part ─ Scorer.forward ─> log p [N] ─ on-policy? ─ loss ─> terms
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rillflow.cluster.ranks import Ranks
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.records.ragged import Ragged
from rillflow.train.config import TrainConfig
from rillflow.train.guards import check_gap, check_ratio
from rillflow.train.learner import Aim, Learner
from rillflow.train.loss import Loss
from rillflow.train.reading import Reading
from rillflow.train.scorer import Scorer


class Trainer(Learner):
    """Trains a module and scores with it.

    Args:
        module: a causal language model with Rillflow's attention; its parameters are changed in place.
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
        self._scorer = Scorer(module, config, parallel=parallel)

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged:
        """Log probabilities of the loss tokens, 0 elsewhere; see ``Scorer.logprobs``."""
        return self._scorer.logprobs(batch, temperature)

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
    ) -> Aim[TokenLogprobs]:
        """A loss over log probabilities, for a ``step``.

        Args:
            minibatch: rows with the fields the loss reads.
            loss: what is minimised.
            temperature: the one the tokens were sampled at.
            ratio_tolerance: where the rows are on-policy, how far trainer and sampler may differ at a token.
            gap_tolerance: where they are and rounding is rough, how far they may differ in the mean.
            weight: what its gradient counts beside that of another aim.
        """
        forward = _Logprobs(self._scorer, temperature, ratio_tolerance, gap_tolerance)
        return Aim(rows=minibatch, loss=loss, forward=forward, weight=weight)


@dataclass(frozen=True, eq=False)
class _Logprobs:
    """The forward pass of a language model; see Forward."""

    scorer: Scorer
    temperature: float
    ratio_tolerance: float | None
    gap_tolerance: float | None

    def __call__(self, part: Batch, tokens: Batch) -> TokenLogprobs:
        return self._checked(tokens, self.scorer.forward(part, self.temperature))

    def lay_out(self, part: Batch) -> Reading:
        return self.scorer.lay_out(part)

    def read(self, part: Batch, tokens: Batch, output: Tensor) -> TokenLogprobs:
        return self._checked(tokens, self.scorer.read(part, output, self.temperature))

    def _checked(self, tokens: Batch, model: TokenLogprobs) -> TokenLogprobs:
        if self.ratio_tolerance is not None:
            check_ratio(tokens, model.logprobs, self.ratio_tolerance)
        if self.gap_tolerance is not None:
            check_gap(tokens, model.logprobs, self.gap_tolerance)
        return model

    def describe(self, read: TokenLogprobs, index: int) -> str:
        return f"its log probability is {float(read.logprobs[index].detach())}"
