"""Unpaired: the loss of single good or bad answers, relative to the policy's overall divergence.

    rows of one (epoch, prompt): sample 0 the answer, sample 1 another prompt's answer, if there is one

        samples 1 of the minibatch ─ present log probabilities ─ settled ─> divergence, one for all rows
        samples 0 ─ log probabilities [N] ─ summed by row ─> formulas.unpaired_loss [B]

Legend: B rows, N loss tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.formulas.config import UnpairedLossConfig
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.preferences import AnswerTotals, unpaired_loss
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.training.guards import check_finite, loss_tokens
from rillflow.training.terms import LossPart, checked_losses, measured, prepared, require_fields
from rillflow.workers.collectives import Ranks


class UnpairedLoss:
    """Mean loss of single answers over a policy's log probabilities: KTO.

    Any partition adds up as (sum over answers, number of answers). The divergence is computed over the whole
    minibatch of all ranks, with the weights before the step.

    Args:
        config: its scale and weights.
    """

    name = "answers"
    model_outputs = ("logprobs", "entropy", "likeliest")
    back = 1
    is_scalar = False

    def __init__(self, config: UnpairedLossConfig) -> None:
        self.config, self.reads, self.function = config, config.reads, unpaired_loss
        self.options: dict[str, Any] = {}

    def prepare(self, minibatch: Batch) -> Batch:
        """Prepare as ``TokenLoss.prepare``, for sample 0 only: other prompts' answers are not trained on.

        Raises:
            NotFiniteError: a reference total is not finite.
            TrainingError: an answer has no loss token, or rows lack a field.
        """
        require_fields(self.function, self.reads, minibatch.fields)
        check_finite(loss_tokens(minibatch.only("tokens", "loss_mask", *self.reads)), *self.reads)
        own = (minibatch.ids[:, 2] == 0).nonzero().squeeze(1)
        rows = minibatch.only("tokens", "loss_mask", *self.reads).select(own)
        mask = rows.ragged("loss_mask")
        lengths = mask.sums()
        silent = (lengths == 0).nonzero()
        if len(silent) or not len(rows):
            where = f"row ({rows.row_id(int(silent[0]))})" if len(silent) else "a minibatch"
            raise TrainingError(
                f"{where} has no loss token",
                why="sample 0 of a prompt is the labelled answer, and it has no token",
                fix="remove rows with an empty answer",
            )
        weights = mask.with_values(mask.values.double() / mask.expand(lengths))
        return prepared(rows, weights, len(rows))

    def settled(
        self, rows: Batch | None, minibatch: Batch, score: Callable[[Batch], Ragged], ranks: Ranks
    ) -> Batch | None:
        """Add ``divergence`` [B] to the rows: max(0, mean of log pi - log ref) over other prompts' answers.

        Every rank calls it.

        Args:
            rows: this rank's prepared part; None if it has none.
            minibatch: the same part before ``prepare``.
            score: returns the present log probabilities of the loss tokens.
            ranks: the ranks with the other parts.
        """
        others = minibatch.select((minibatch.ids[:, 2] > 0).nonzero().squeeze(1))
        said = score(others.only("tokens", "loss_mask"))
        moved = said.with_values(said.values.double()).sums()
        if len(others):
            moved = moved - others.dense("reference_totals").double()
        sums = torch.tensor([float(moved.sum()), float(len(others))], dtype=torch.float64)
        ranks.sum_([sums])
        mean = max(0.0, float(sums[0]) / max(1.0, float(sums[1])))
        return rows and rows.with_fields(divergence=torch.full((len(rows),), mean, dtype=torch.float64))

    def __call__(self, read: TokenLogprobs, part: Batch, /) -> LossPart:
        """Return the terms of one part: each of a row's N tokens has its share of the row's loss."""
        tokens = part.ragged("tokens")
        totals = tokens.with_values(read.logprobs.double()).sums()
        answers = AnswerTotals(totals, tokens.lengths, part.dense("reference_totals").double())
        is_good, divergence = part.dense("label").bool(), part.dense("divergence").double()
        found = unpaired_loss(answers, is_good, divergence, config=self.config)
        found = checked_losses(found, unpaired_loss, len(totals))
        spread: Tensor = tokens.expand(found.losses) * part.ragged("loss_weights").values
        return LossPart(terms=spread, metrics=measured(found))
