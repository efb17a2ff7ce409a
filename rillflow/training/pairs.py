"""Pairs: losses over a chosen and a rejected answer to one prompt.

    rows of one (epoch, prompt) ─ prepare ─> loss_units, is_rejected: a pair is never split
    PairLoss         scores at last tokens [2P] ─ by pair ─> function(chosen, rejected) [P]
    PolicyPairLoss   log probabilities [N] ─ summed by row ─ by pair ─> formulas.pair_loss [P]

Legend: B rows, N loss tokens of one micro-batch, P pairs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.formulas.config import PairLossConfig
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.losses import TokenLosses, preference_loss
from rillflow.formulas.preferences import AnswerTotals, pair_loss
from rillflow.graph.loss import field_parameters
from rillflow.records.batch import Batch
from rillflow.sharding.packed_rows import last_tokens
from rillflow.training.guards import BEHIND, ROUTES, check_finite, loss_tokens
from rillflow.training.minibatches import prompt_units
from rillflow.training.terms import SAMPLED, LossPart, checked_losses, measured, prepared, require_fields


class PairLoss:
    """Mean loss of pairs, from the scores of the chosen and the rejected answers.

    The rows of one (epoch, prompt) are a pair: sample 0 is chosen, sample 1 rejected. Each is scored at its
    last token and has half of the pair's loss; a pair is never split.

    Args:
        function: returns the losses [P] of ``chosen`` and ``rejected`` [P], or ``TokenLosses``; its other
            parameters without a default are dense fields, taken from a pair's chosen row.
        options: further arguments.
    """

    name = "preference"
    model_outputs = ("chosen", "rejected")
    back = 0
    is_scalar = True

    def __init__(
        self,
        function: Callable[..., Tensor | TokenLosses] = preference_loss,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.function, self.options = function, dict(options or {})
        self._fields = [
            name for name in field_parameters(function, self.options) if name not in self.model_outputs
        ]

    def prepare(self, minibatch: Batch) -> Batch:
        """Prepare as ``TokenLoss.prepare``; add ``loss_units`` [B] int64, whose equal rows stay in one part.

        Raises:
            TrainingError: a row has no partner, or is neither sample 0 nor 1; a row is empty.
        """
        pairs = _paired(minibatch)
        rows = last_tokens(minibatch)
        halves = rows.ragged("loss_mask").with_values(rows.ragged("loss_mask").values.double() / 2)
        rows = rows.with_fields(**{name: minibatch.dense(name) for name in self._fields})
        check_finite(rows, *self._fields)
        return prepared(rows, halves, len(rows) / 2).with_fields(**pairs)

    def __call__(self, read: Tensor, part: Batch, /) -> LossPart:
        """Return the terms of one part: ``read`` [2P] are the scores, one per row."""
        order = _by_pair(part)
        chosen, rejected = read[order].view(-1, 2).unbind(1)
        known = {name: part.dense(name).to(read)[order].view(-1, 2)[:, 0] for name in self._fields}
        found = self.function(chosen=chosen, rejected=rejected, **known, **self.options)
        found = checked_losses(found, self.function, len(chosen))
        losses = found.losses.repeat_interleave(2)[torch.argsort(order)]
        weights = part.ragged("loss_weights").values.to(read.dtype)
        return LossPart(terms=losses * weights, metrics=measured(found))


class PolicyPairLoss:
    """Mean loss of pairs over the policy's log probabilities: DPO and related losses.

    The rows of one (epoch, prompt) are a pair: sample 0 is chosen, sample 1 rejected. If rows have the field
    ``preferred`` [B] bool, it marks the chosen one instead. A row's total is the sum over its loss tokens.
    Any partition adds up as (sum over pairs, number of pairs); a pair is never split, so that its two answers
    share their prompt in one pass.

    Args:
        config: the kind of loss and its options.
    """

    name = "pairs"
    model_outputs = ("logprobs", "entropy", "likeliest")
    back = 1
    is_scalar = False

    def __init__(self, config: PairLossConfig) -> None:
        self.config, self.reads, self.function = config, config.reads, pair_loss
        self.options: dict[str, Any] = {}

    def prepare(self, minibatch: Batch) -> Batch:
        """Prepare as ``PairLoss.prepare``, for log probabilities, with reference totals if they are read.

        Raises:
            NotFiniteError: a reference total is not finite.
            TrainingError: a row has no partner or no loss token, or the reference totals are missing.
        """
        pairs, there = _paired(minibatch), minibatch.fields
        require_fields(self.function, self.reads, there)
        guarded = [name for name in (SAMPLED, BEHIND, *ROUTES) if name in there]
        rows = minibatch.only("tokens", "loss_mask", *self.reads, *guarded)
        check_finite(loss_tokens(rows), *self.reads)
        mask = rows.ragged("loss_mask")
        lengths = mask.sums()
        silent = (lengths == 0).nonzero()
        if len(silent):
            raise TrainingError(
                f"row ({rows.row_id(int(silent[0]))}) has no loss token",
                why="a pair compares two answers, and this one has no token",
                fix="remove pairs with an empty answer",
            )
        weights = mask.with_values(mask.values.double() / (2 * mask.expand(lengths)))
        return prepared(rows, weights, len(rows) / 2).with_fields(**pairs)

    def __call__(self, read: TokenLogprobs, part: Batch, /) -> LossPart:
        """Return the terms of one part: each of a row's N tokens has its share of half the pair's loss."""
        tokens, order = part.ragged("tokens"), _by_pair(part)
        totals = tokens.with_values(read.logprobs.double()).sums()
        columns = [totals, tokens.lengths, *(part.dense(name).double() for name in self.reads)]
        both = zip(*(each[order].view(-1, 2).unbind(1) for each in columns), strict=True)
        chosen, rejected = (AnswerTotals(*each) for each in both)
        found = checked_losses(pair_loss(chosen, rejected, config=self.config), pair_loss, len(totals) // 2)
        losses = found.losses.repeat_interleave(2)[torch.argsort(order)]
        return LossPart(
            terms=tokens.expand(losses) * part.ragged("loss_weights").values, metrics=measured(found)
        )


def _paired(rows: Batch) -> dict[str, Tensor]:
    """Return ``loss_units`` [B] int64 and ``is_rejected`` [B] bool for rows that form pairs."""
    units = prompt_units(rows)
    preferred = rows.fields.get("preferred")
    if isinstance(preferred, Tensor):
        places = (~preferred.bool()).long()
        _check_pairs(rows, units, places, "the preferred answer is chosen, the other one rejected")
    else:
        places = rows.ids[:, 2]
        _check_pairs(rows, units, places, "sample 0 is the chosen answer and sample 1 the rejected one")
    return {"loss_units": units, "is_rejected": places == 1}


def _by_pair(part: Batch) -> Tensor:
    """Return [2P] row indices, pair after pair, the chosen row first."""
    return torch.argsort(part.dense("loss_units") * 2 + part.dense("is_rejected").long())


def _check_pairs(rows: Batch, units: Tensor, samples: Tensor, rule: str) -> None:
    """Refuse rows that are not one chosen (0) and one rejected (1) answer per prompt."""
    if not len(rows):
        raise TrainingError("a minibatch of 0 rows has no pair", why="an update needs at least one pair")
    odd = ((samples != 0) & (samples != 1)).nonzero()
    if len(odd):
        raise TrainingError(
            f"row ({rows.row_id(int(odd[0]))}) belongs to no pair",
            why=rule,
            fix="make pairs with tasks.prompts.answered_batch",
        )
    count = torch.zeros(int(units.max()) + 1, 2, dtype=torch.int64)
    count.index_put_((units, samples), torch.ones_like(samples), accumulate=True)
    alone = (count[units] != 1).any(1).nonzero()
    if len(alone):
        row = int(alone[0])
        chosen, rejected = count[units[row]].tolist()
        raise TrainingError(
            f"row ({rows.row_id(row)}) has no partner",
            why=f"its prompt has {chosen} chosen and {rejected} rejected answers here, not one of each",
            fix="keep both rows of a pair in one batch, and give each pair its own prompt number",
        )
