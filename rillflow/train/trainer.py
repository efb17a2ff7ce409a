"""Trainer: one optimiser step a minibatch, whatever the loss.

    minibatch ─ prepare ─> rows ─ micro_batches ─> part ─ forward ─> [N] ─ loss ─> terms
                                                    └ guards: finite? on-policy?     │ sum / denominator
                     weights <─ Optimizer.step <─ gradients, added up <─ backward <──┘

Rows whose terms have no gradient (groups of equal rewards) are measured and not trained on: no backward
pass. Where no row has one, the weights stay and the step is counted. Any error leaves weights, moments
and step count as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from rillflow.errors import TrainingError
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean, Metric, merge_metrics
from rillflow.records.ragged import Ragged
from rillflow.train.config import TrainConfig
from rillflow.train.guards import check_ratio, describe_token, loss_tokens
from rillflow.train.loss import Loss
from rillflow.train.optimizer import Optimizer, TrainerState
from rillflow.train.recompute import Recompute
from rillflow.train.scorer import Scorer, micro_batches


class Trainer:
    """Trains a module and scores with it.

    Args:
        module: a causal language model with Rillflow's attention; its parameters are changed in place.
        config: the optimiser, and how a minibatch is cut.
        total_steps: optimiser steps of the whole phase, for the schedule.

    Example:
        trainer = Trainer(module, TrainConfig(lr=1e-4), total_steps=100)
        metrics = trainer.update(rows, SupervisedLoss())
    """

    def __init__(self, module: nn.Module, config: TrainConfig, *, total_steps: int) -> None:
        self._config = config
        self._scorer = Scorer(module, config)
        self._optimizer = Optimizer(module, config, total_steps=total_steps)
        self._recompute: AbstractContextManager[None] = (
            Recompute(module) if config.gradient_checkpointing else nullcontext()
        )

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged:
        """Log probabilities of the loss tokens, 0 elsewhere; see ``Scorer.logprobs``."""
        return self._scorer.logprobs(batch, temperature)

    def update(
        self, minibatch: Batch, loss: Loss, temperature: float = 1.0, *, ratio_tolerance: float | None = None
    ) -> dict[str, Metric]:
        """Make one optimiser step.

        Args:
            minibatch: rows with the fields the loss reads.
            loss: what is minimised.
            temperature: the one the tokens were sampled at.
            ratio_tolerance: where the rows are on-policy, how far trainer and sampler may differ.

        Returns:
            The loss's metrics, ``{loss.name}/loss/mean``, ``train/grad_norm/mean`` and ``train/lr/mean``.

        Raises:
            TrainingError: a number is not finite, a row is not on-policy, or there is no loss token;
                nothing was changed.
        """
        rows = loss.prepare(minibatch)
        lr, total, metrics = self._optimizer.lr, 0.0, []
        try:
            for part in self._parts(rows):
                share, measured = self._accumulate(part, loss, temperature, ratio_tolerance)
                total += share
                metrics.append(measured)
            norm = self._optimizer.step()
        finally:
            self._optimizer.discard()
        return {
            **merge_metrics(metrics),
            f"{loss.name}/loss/mean": Mean(total=total, count=1),
            "train/grad_norm/mean": Mean(total=norm, count=1),
            "train/lr/mean": Mean(total=lr, count=1),
        }

    def state(self) -> TrainerState:
        """What a resumed trainer needs besides the weights."""
        return self._optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go on from a state, bit for bit; see ``Optimizer.load_state``."""
        self._optimizer.load_state(tensors, counters)

    def _parts(self, rows: Batch) -> Iterator[Batch]:
        """Micro-batches with loss tokens; rows that have a gradient and rows that have none come apart."""
        active = rows.dense("loss_active")
        for kind in (True, False):
            alike = rows.select((active == kind).nonzero().squeeze(1))
            for index in micro_batches(alike, self._config.tokens_per_micro_batch):
                part = alike.select(index)
                if bool(part.ragged("loss_mask").values.any()):
                    yield part

    def _accumulate(
        self, part: Batch, loss: Loss, temperature: float, ratio_tolerance: float | None
    ) -> tuple[float, Mapping[str, Metric]]:
        """Add one micro-batch's gradient, if it has any; return its share of the loss and its metrics."""
        tokens = loss_tokens(part).to(self._scorer.device)
        learns = bool(part.dense("loss_active")[0])
        with self._recompute, torch.set_grad_enabled(learns):
            model = self._scorer.forward(part, temperature)
            if ratio_tolerance is not None:
                check_ratio(tokens, model.logprobs, ratio_tolerance)
            found = loss(model, tokens)
            share = found.terms.sum() / float(part.dense("loss_denominator")[0])
            value = float(share.detach())
            if not math.isfinite(value):
                raise _not_finite(tokens, found.terms.detach(), model.logprobs.detach(), value)
            if learns:
                share.backward()  # type: ignore[no-untyped-call]
        self._optimizer.collect()
        return value, found.metrics


def _not_finite(tokens: Batch, terms: Tensor, logprobs: Tensor, value: float) -> TrainingError:
    odd = (~torch.isfinite(terms)).nonzero()
    where = "the sum of finite terms overflows"
    if len(odd):
        index = int(odd[0])
        cost, logprob = float(terms[index]), float(logprobs[index])
        where = f"{describe_token(tokens, index)} costs {cost}, its log probability is {logprob}"
    return TrainingError(
        f"the loss is {value}: {where}",
        why="the step was not applied; the weights are unchanged",
        fix="look for weights that are not finite, or extreme log ratios in the metrics before this step",
    )
