"""Losses: turn a function of loss tokens into terms whose sum is the same for every partition.

    minibatch ── prepare ──> checked fields, loss_weights, loss_denominator (one for all rows), loss_active
    the model's outputs [N], the part's fields at its loss tokens ── function ──> losses x weights: terms [N]

The function is from ``formulas.losses`` or the user's own; its parameters name its inputs. It receives only
loss tokens, laid end to end, and knows neither modules nor micro-batches. Losses of whole answers:
``training.answers``.

Legend: B rows, N loss tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.formulas.config import PolicyLossConfig, ValueLossConfig
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.losses import (
    Aggregation,
    TokenLosses,
    cross_entropy,
    loss_weights,
    m2po_limit,
    policy_loss,
    value_loss,
)
from rillflow.graph.loss import LossSection, LossTerm, field_parameters
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.training.answers import AnswerLoss, PairLoss
from rillflow.training.guards import BEHIND, ROUTES, check_finite, loss_tokens
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

LENGTHS = "row_lengths"
"""Parameter name for the number of loss tokens of each row."""


class TokenLoss(Loss):
    """A loss of each loss token, aggregated.

    Args:
        function: returns the losses [N] of tokens, or ``TokenLosses``.
        model_outputs: the model's outputs that the function may read.
        name: the area of its metrics.
        options: arguments that are not fields.
        optional_fields: fields for parameters that have a default.
        aggregation: how token losses are combined to one loss.
        constant: divisor of a row, for the constant aggregation.
        resting: a field; rows in which it is 0 everywhere have no gradient. Empty if every row may have one.

    Example:
        TokenLoss(cross_entropy, model_outputs=("logprobs", "likeliest"), name="supervised")
    """

    where_there: tuple[str, ...] = ()
    """Token fields for parameters with a default, used if the rows have them."""

    def __init__(
        self,
        function: Callable[..., Tensor | TokenLosses],
        *,
        model_outputs: Collection[str],
        name: str,
        options: Mapping[str, Any] | None = None,
        optional_fields: tuple[str, ...] = (),
        aggregation: Aggregation = "token_mean",
        constant: int = 0,
        resting: str = "",
    ) -> None:
        self.name, self.source, self._function = name, function, function
        self.options = dict(options or {})
        self.reads = (*field_parameters(function, self.options), *optional_fields)
        self.model_outputs, self.is_scalar, self._resting = model_outputs, "values" in model_outputs, resting
        self._aggregation, self._constant = aggregation, constant

    def prepare(self, minibatch: Batch) -> Batch:
        """See Loss."""
        there = minibatch.fields
        old = {f"old_{name}" for name in self.model_outputs} - there.keys()
        names = [each for each in self.reads if each not in {*self.model_outputs, *old, LENGTHS}]
        names += [each for each in (SAMPLED, BEHIND) if each in there and each not in names]
        require_fields(self._function, names, there, [*self.model_outputs, LENGTHS])
        routed = () if self.is_scalar else ROUTES & there.keys()
        rows = minibatch.only("tokens", "loss_mask", *names, *routed)
        check_finite(loss_tokens(rows), *names)
        active = _not_zero(rows, self._resting) if self._resting else None
        weights = loss_weights(rows.ragged("loss_mask"), self._aggregation, self._constant)
        if not weights.denominator:
            raise TrainingError(
                f"a minibatch of {len(rows)} rows has no loss token",
                why="there is nothing to learn from prompts alone",
                fix="check that answers are not empty and fit into the context",
            )
        return prepared(rows, weights.values, weights.denominator, active)

    def __call__(self, read: TokenLogprobs | Tensor, part: Batch, /) -> LossPart:
        """See Loss."""
        model_outputs = vars(read) if isinstance(read, TokenLogprobs) else {"values": read}
        weights = part.ragged("loss_weights")
        dtype = model_outputs[next(iter(model_outputs))].dtype
        known: dict[str, Tensor] = {**model_outputs, LENGTHS: weights.lengths}
        for name in self.reads:
            if name not in known:
                field = part.fields.get(name)
                known[name] = (
                    model_outputs[name[4:]].detach() if field is None else _of_tokens(field, weights, dtype)
                )
        given = {name: known[name] for name in self.reads}
        given |= {name: part.ragged(name).values for name in self.where_there if name in part.fields}
        made = self._function(**given, **self.options)
        found = checked_losses(made, self._function, len(weights.values))
        return LossPart(
            terms=found.losses * weights.values.to(dtype), metrics=measured(found, weights.values)
        )


class SupervisedLoss(TokenLoss):
    """Mean cross entropy of the loss tokens."""

    name = "supervised"

    def __init__(self) -> None:
        super().__init__(cross_entropy, model_outputs=("logprobs", "likeliest"), name=self.name)


class PolicyLoss(TokenLoss):
    """The clipped policy loss with its optional terms, from a recipe's section.

    Args:
        config: the loss family's options.
        max_tokens: longest answer, the default of the constant aggregation.
    """

    name = "policy"
    where_there = (BEHIND, "is_kept")

    def __init__(self, config: PolicyLossConfig, max_tokens: int = 0) -> None:
        self.second_moment = config.bounds[1] if config.correction == "m2po" else None
        near = config.kl_paid == "loss"
        super().__init__(
            policy_loss,
            model_outputs=("logprobs", "entropy"),
            name=self.name,
            options={"config": config},
            optional_fields=("reference_logprobs",) if near else (),
            aggregation=config.aggregation,
            constant=config.constant or max_tokens,
            resting="" if near or config.entropy else "advantages",
        )
        self.source = config

    def settled(self, rows: Batch | None, minibatch: Batch, score: Score, ranks: Ranks) -> Batch | None:
        """Add ``is_kept``, m2po's selection of tokens over the whole minibatch; see Loss.

        Without ``old_logprobs``, the old policy is the present one, and every token is kept.
        """
        del minibatch, score
        if self.second_moment is None:
            return rows
        own = moved = torch.zeros(0, dtype=torch.float64)
        if rows is not None:
            mu = rows.ragged(SAMPLED).values
            moved = (
                rows.ragged("old_logprobs").values - mu if "old_logprobs" in rows.fields else 0 * mu
            ).double()
            own = moved[rows.ragged("loss_mask").values]
        limit = m2po_limit(torch.cat(ranks.gather(own)), bound=self.second_moment)
        return rows and rows.with_fields(is_kept=rows.ragged(SAMPLED).with_values(moved.square() < limit))


class ValueLoss(TokenLoss):
    """The mean clipped value loss over the loss tokens, from a recipe's section.

    Args:
        config: the clip; with 0, ``old_values`` are not read.
    """

    name = "critic"

    def __init__(self, config: ValueLossConfig, max_tokens: int = 0) -> None:
        del max_tokens
        also = ("old_values",) if config.clip else ()
        super().__init__(
            value_loss,
            model_outputs=("values",),
            name=self.name,
            options={"clip": config.clip},
            optional_fields=also,
        )
        self.source = config


KINDS: Mapping[str, Callable[[Any, int], Loss]] = {
    "policy": PolicyLoss,
    "values": ValueLoss,
    "answers": AnswerLoss,
}
"""Kinds of loss that a section may stand for, by the section's ``loss_kind``."""


def loss_of(term: LossTerm, model_outputs: Collection[str], name: str, max_tokens: int = 0) -> Loss:
    """Return the loss for a step's term: a recipe's section, or a function.

    Args:
        term: the requested loss.
        model_outputs: the model's outputs.
        name: the area of a function's metrics, if it has none.
        max_tokens: longest answer.

    Raises:
        TrainingError: the section is for another kind of model.
    """
    section = term.loss
    if isinstance(section, LossSection):
        kind = section.loss_kind
        loss = (KINDS[kind] if isinstance(kind, str) else kind)(section, max_tokens)
        if set(loss.model_outputs) - set(model_outputs):
            raise TrainingError(
                f"{name} cannot use the loss {section!r:.60}",
                why=f"its model outputs {', '.join(model_outputs)}, not {', '.join(loss.model_outputs)}",
            )
        return loss
    if set(model_outputs) == set(PairLoss.model_outputs):
        return PairLoss(section, term.options)
    return TokenLoss(section, model_outputs=model_outputs, name=term.name or name, options=term.options)


def are_sampled(rows: Batch) -> bool:
    """Return whether a policy sampled these rows; loss tokens of demonstrations have no version."""
    if "versions" not in rows.fields:
        return SAMPLED in rows.fields
    return bool((rows.ragged("versions").values[rows.ragged("loss_mask").values] >= 0).any())


def _not_zero(rows: Batch, name: str) -> Tensor:
    """Return [B] bool, true if the field is not 0 at some loss token of the row."""
    field = rows.field(name)
    if not isinstance(field, Ragged):
        return field != 0
    teaches = (field.values != 0) & rows.ragged("loss_mask").values
    return field.with_values(teaches).sums() > 0


def _of_tokens(field: Tensor | Ragged, rows: Ragged, dtype: torch.dtype) -> Tensor:
    """Return [N] a field at the loss tokens; a field of rows is repeated for each of their tokens."""
    values: Tensor = field.values if isinstance(field, Ragged) else rows.expand(field)
    return values.to(dtype) if values.is_floating_point() else values
