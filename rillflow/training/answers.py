"""Answers: losses of whole answers, and of several answers to one prompt.

    rows of one (epoch, prompt) ─ prepare ─> loss_units, answer_place: a unit is never split
    AnswerLoss   log probabilities [N] ─ summed by row ─ by unit ─> AnswerLossConfig.losses [U]
    PairLoss     scores at last tokens [2U] ─ by unit ─> function(chosen, rejected) [U]

A unit's loss is shared equally by its answers, and by the loss tokens of each. Any partition adds up as (sum
over units, number of units).

Legend: B rows, N loss tokens of one micro-batch, U units in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.losses import TokenLosses, preference_loss
from rillflow.formulas.preferences import AnswerLossConfig, AnswerTotals
from rillflow.graph.loss import field_parameters
from rillflow.records.batch import Batch
from rillflow.sharding.packed_rows import last_tokens
from rillflow.training.guards import BEHIND, ROUTES, check_finite, loss_tokens
from rillflow.training.minibatches import prompt_units
from rillflow.training.terms import (
    SAMPLED,
    Loss,
    LossPart,
    Score,
    checked_losses,
    measured,
    prepared,
    require_fields,
)
from rillflow.workers.collectives import Ranks


class AnswerLoss(Loss):
    """Mean loss of units of answers over a policy's log probabilities: DPO, KTO and related losses.

    The rows of one (epoch, prompt) are a unit: sample k is the answer at place k. If rows of pairs have the
    field ``preferred`` [B] bool, it marks the chosen one instead. A row's total is the sum over its loss
    tokens. A unit is never split, so that its answers share their prompt in one pass.

    Args:
        config: the section that stands for the loss.
    """

    model_outputs = ("logprobs", "entropy", "likeliest")

    def __init__(self, config: AnswerLossConfig, max_tokens: int = 0) -> None:
        del max_tokens
        self.name, self.reads, self.rows_together = config.area, config.reads, config.rows_together
        self.source, self._config = config, config

    def prepare(self, minibatch: Batch) -> Batch:
        """See Loss; rows that only measure the divergence are left out.

        Raises:
            TrainingError: an answer of a unit is missing, or has no loss token.
        """
        there, unit = minibatch.fields, self._config.unit
        require_fields(self._config, self.reads, there)
        guarded = [name for name in (SAMPLED, BEHIND, "preferred", *ROUTES) if name in there]
        rows = minibatch.only("tokens", "loss_mask", *self.reads, *guarded)
        check_finite(loss_tokens(rows), *self.reads)
        if self._config.has_divergence:
            rows = rows.select((rows.ids[:, 2] < unit).nonzero().squeeze(1))
        units = _units(rows, unit) if unit > 1 else {}
        mask = rows.ragged("loss_mask")
        lengths = mask.sums()
        silent = (lengths == 0).nonzero()
        if len(silent) or not len(rows):
            where = f"row ({rows.row_id(int(silent[0]))})" if len(silent) else "a minibatch"
            raise TrainingError(
                f"{where} has no loss token",
                why="the loss is over whole answers, and this answer has no token",
                fix="remove rows with an empty answer",
            )
        weights = mask.with_values(mask.values.double() / (unit * mask.expand(lengths)))
        return prepared(rows, weights, len(rows) / unit).with_fields(**units)

    def settled(self, rows: Batch | None, minibatch: Batch, score: Score, ranks: Ranks) -> Batch | None:
        """Add ``divergence`` [B], if the section has one; see ``AnswerLossConfig`` and Loss."""
        if not self._config.has_divergence:
            return rows
        others = minibatch.select((minibatch.ids[:, 2] >= self._config.unit).nonzero().squeeze(1))
        said = score(others.only("tokens", "loss_mask"))
        moved = said.with_values(said.values.double()).sums()
        if len(others):
            moved = moved - others.dense("reference_totals").double()
        sums = torch.tensor([float(moved.sum()), float(len(others))], dtype=torch.float64)
        ranks.sum_([sums])
        mean = max(0.0, float(sums[0]) / max(1.0, float(sums[1])))
        return rows and rows.with_fields(divergence=torch.full((len(rows),), mean, dtype=torch.float64))

    def __call__(self, read: TokenLogprobs, part: Batch, /) -> LossPart:
        """See Loss; each of a row's N tokens has its share of the row's share of the unit's loss."""
        tokens, unit = part.ragged("tokens"), self._config.unit
        totals, lengths = tokens.with_values(read.logprobs.double()).sums(), tokens.lengths
        names = (*self.reads, *(["divergence"] if self._config.has_divergence else []))
        fields = {name: part.dense(name) for name in names}
        order = _by_unit(part, unit) if unit > 1 else None
        if order is not None:
            totals, lengths = totals[order], lengths[order]
            fields = {name: each[order] for name, each in fields.items()}
        reference = fields.get("reference_totals")
        answers = AnswerTotals(totals, lengths, None if reference is None else reference.double())
        found = checked_losses(self._config.losses(answers, fields), self._config, len(totals) // unit)
        spread = tokens.expand(_spread(found.losses, order, unit)) * part.ragged("loss_weights").values
        return LossPart(terms=spread, metrics=measured(found))


class PairLoss(Loss):
    """Mean loss of pairs, from the scores of the chosen and the rejected answers.

    The rows of one (epoch, prompt) are a pair: sample 0 is chosen, sample 1 rejected. Each is scored at its
    last token.

    Args:
        function: returns the losses [U] of ``chosen`` and ``rejected`` [U], or ``TokenLosses``; its other
            parameters without a default are dense fields, taken from a pair's chosen row.
        options: further arguments.
    """

    name = "preference"
    model_outputs = ("chosen", "rejected")
    back = 0
    is_scalar = True
    rows_together = 2

    def __init__(
        self,
        function: Callable[..., Tensor | TokenLosses] = preference_loss,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.source, self._function, self.options = function, function, dict(options or {})
        self.reads = field_parameters(function, self.options)
        self._fields = [name for name in self.reads if name not in self.model_outputs]

    def prepare(self, minibatch: Batch) -> Batch:
        """See Loss.

        Raises:
            TrainingError: a row has no partner, or is neither sample 0 nor 1; a row is empty.
        """
        pairs = _units(minibatch, 2)
        rows = last_tokens(minibatch)
        halves = rows.ragged("loss_mask").with_values(rows.ragged("loss_mask").values.double() / 2)
        rows = rows.with_fields(**{name: minibatch.dense(name) for name in self._fields})
        check_finite(rows, *self._fields)
        return prepared(rows, halves, len(rows) / 2).with_fields(**pairs)

    def __call__(self, read: Tensor, part: Batch, /) -> LossPart:
        """See Loss; ``read`` [2U] are the scores, one per row."""
        order = _by_unit(part, 2)
        chosen, rejected = read[order].view(-1, 2).unbind(1)
        known = {name: part.dense(name).to(read)[order].view(-1, 2)[:, 0] for name in self._fields}
        found = self._function(chosen=chosen, rejected=rejected, **known, **self.options)
        found = checked_losses(found, self._function, len(chosen))
        weights = part.ragged("loss_weights").values.to(read.dtype)
        return LossPart(terms=_spread(found.losses, order, 2) * weights, metrics=measured(found))


def _by_unit(part: Batch, unit: int) -> Tensor:
    """Return [B] row indices, unit after unit, by place."""
    return torch.argsort(part.dense("loss_units") * unit + part.dense("answer_place"))


def _spread(losses: Tensor, order: Tensor | None, unit: int) -> Tensor:
    """Return [B] the loss of each row's unit."""
    return losses if order is None else losses.repeat_interleave(unit)[torch.argsort(order)]


def _units(rows: Batch, unit: int) -> dict[str, Tensor]:
    """Return ``loss_units`` and ``answer_place``, both [B] int64, for rows that form units."""
    units, preferred = prompt_units(rows), rows.fields.get("preferred")
    if isinstance(preferred, Tensor) and unit == 2:
        places = (~preferred.bool()).long()
        _check_units(rows, units, places, unit, "the preferred answer is chosen, the other one rejected")
        return {"loss_units": units, "answer_place": places}
    rule = "sample 0 is the chosen answer and sample 1 the rejected one"
    if unit != 2:
        rule = f"its answers are the samples 0 to {unit - 1}"
    _check_units(rows, units, rows.ids[:, 2], unit, rule)
    return {"loss_units": units, "answer_place": rows.ids[:, 2]}


def _check_units(rows: Batch, units: Tensor, places: Tensor, unit: int, rule: str) -> None:
    """Refuse rows that are not one answer at every place of each prompt."""
    word = "pair" if unit == 2 else f"list of {unit} answers"
    if not len(rows):
        raise TrainingError(f"a minibatch of 0 rows has no {word}", why="an update needs at least one")
    odd = ((places < 0) | (places >= unit)).nonzero()
    if len(odd):
        raise TrainingError(
            f"row ({rows.row_id(int(odd[0]))}) belongs to no {word}",
            why=rule,
            fix="make such rows with tasks.prompts.answered_batch",
        )
    count = torch.zeros(int(units.max()) + 1, unit, dtype=torch.int64)
    count.index_put_((units, places), torch.ones_like(places), accumulate=True)
    alone = (count[units] != 1).any(1).nonzero()
    if len(alone):
        row = int(alone[0])
        names = ("chosen", "rejected") if unit == 2 else [f"sample {place}" for place in range(unit)]
        found = zip(count[units[row]].tolist(), names, strict=True)
        raise TrainingError(
            f"row ({rows.row_id(row)}) has no partner",
            why=f"its prompt has {' and '.join(f'{each} {name}' for each, name in found)} answers here, "
            "not one of each",
            fix=f"keep all rows of a {word} in one batch, and give each {word} its own prompt number",
        )
