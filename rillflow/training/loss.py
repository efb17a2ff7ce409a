"""Losses: a function of loss tokens made into terms that any partition adds up alike.

    minibatch ── prepare ──> checked fields, loss_weights, loss_denominator (one for all rows), loss_active
    what the model says [N], the part's fields at its loss tokens ── function ──> losses x weights: terms [N]

The function is of ``formulas.losses`` or of one's own: its parameters name what it reads. It sees loss tokens
alone, laid end to end, and knows neither modules nor micro-batches.
Legend: B rows, N loss tokens of one micro-batch, P pairs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rillflow.cluster.ranks import Ranks
from rillflow.errors import TrainingError, nearest
from rillflow.formulas.aggregation import Aggregation, loss_weights
from rillflow.formulas.config import PolicyLossConfig, ValueLossConfig
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.losses import TokenLosses, cross_entropy, policy_loss, preference_loss, value_loss
from rillflow.formulas.ratios import m2po_limit
from rillflow.graph.loss import LossSection, LossTerm, field_parameters
from rillflow.parallel.packed import last_tokens
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric, Variance, histogram_of
from rillflow.records.ragged import Ragged
from rillflow.training.guards import BEHIND, ROUTES, check_finite, loss_tokens
from rillflow.training.minibatches import prompt_units

LENGTHS = "row_lengths"
"""The parameter for how many loss tokens each row has."""
SAMPLED = "sampler_logprobs"
"""The field of rows that a policy sampled; the guards need it, as ``BEHIND``, beside what a loss reads."""
LOG_RATIOS = (-2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.01, -0.001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""The edges of histograms of log ratios, in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossPart:
    """One micro-batch's share of a loss."""

    terms: Tensor
    """[N] weighted losses; their sum over all parts, divided by the denominator, is the loss."""
    metrics: Mapping[str, Metric]
    """Measurements of these tokens."""


class TokenLoss:
    """A loss of each loss token, aggregated.

    Args:
        function: the losses [N] of tokens, or ``TokenLosses``.
        says: what the model says, of the function's parameters.
        name: the area of its metrics.
        options: arguments that are no fields.
        also: fields for parameters that have a default.
        aggregation: how tokens add up to one loss.
        constant: the divisor of a row, for the constant aggregation.
        resting: a field whose rows of nothing but 0 have no gradient; empty where every row may have one.

    Example:
        TokenLoss(cross_entropy, says=("logprobs", "likeliest"), name="supervised")
    """

    back = 1
    """How many tokens before a loss token the module is read."""
    where_there: tuple[str, ...] = ()
    """Fields of tokens for parameters that have a default, where rows have them."""

    def __init__(
        self,
        function: Callable[..., Tensor | TokenLosses],
        *,
        says: Collection[str],
        name: str,
        options: Mapping[str, Any] | None = None,
        also: tuple[str, ...] = (),
        aggregation: Aggregation = "token_mean",
        constant: int = 0,
        resting: str = "",
    ) -> None:
        self.name, self.function = name, function
        self.options = dict(options or {})
        self.reads = (*field_parameters(function, self.options), *also)
        """Fields, and what the model says."""
        self.says, self.is_scalar, self._resting = says, "values" in says, resting
        self._aggregation, self._constant = aggregation, constant

    def prepare(self, minibatch: Batch) -> Batch:
        """The fields the loss reads, checked, with three more.

        ``loss_weights`` of the tokens; ``loss_denominator`` [B], the same number in every row;
        ``loss_active`` [B] bool, False where a row's terms have no gradient and it is only measured.

        Raises:
            NotFiniteError: a number is not finite.
            TrainingError: the rows lack a field that the function reads, or there is no loss token.
        """
        there = minibatch.fields
        old = {f"old_{name}" for name in self.says} - there.keys()
        names = [each for each in self.reads if each not in {*self.says, *old, LENGTHS}]
        names += [each for each in (SAMPLED, BEHIND) if each in there and each not in names]
        missing = [each for each in names if each not in there]
        if missing:
            raise TrainingError(
                f"the loss {self.function.__name__} reads the field {missing[0]!r}, which no row has",
                why=f"rows have {', '.join(there)}; the model says {', '.join(self.says)}",
                fix=nearest(missing[0], {*there, *self.says, LENGTHS}),
            )
        routed = () if self.is_scalar else ROUTES & there.keys()
        rows = minibatch.only("tokens", "loss_mask", *names, *routed)
        check_finite(loss_tokens(rows), *names)
        every = torch.ones(len(rows), dtype=torch.bool)
        active = _not_zero(rows, self._resting) if self._resting else every
        weights = loss_weights(rows.ragged("loss_mask"), self._aggregation, self._constant)
        if not weights.denominator:
            raise TrainingError(
                f"a minibatch of {len(rows)} rows has no loss token",
                why="there is nothing to learn from prompts alone",
                fix="check that answers are not empty and fit into the context",
            )
        return _prepared(rows, weights.values, weights.denominator, active)

    def __call__(self, read: TokenLogprobs | Tensor, part: Batch, /) -> LossPart:
        """The terms of one part: ``read`` is what the model says of the N tokens, ``part`` their fields."""
        says = vars(read) if isinstance(read, TokenLogprobs) else {"values": read}
        weights = part.ragged("loss_weights")
        dtype = says[next(iter(says))].dtype
        known: dict[str, Tensor] = {**says, LENGTHS: weights.lengths}
        for name in self.reads:
            if name not in known:
                field = part.fields.get(name)
                known[name] = says[name[4:]].detach() if field is None else _of_tokens(field, weights, dtype)
        given = {name: known[name] for name in self.reads}
        given |= {name: part.ragged(name).values for name in self.where_there if name in part.fields}
        found = _checked(self.function(**given, **self.options), self.function, len(weights.values))
        return LossPart(terms=found.losses * weights.values.to(dtype), metrics=_measured(found))


class SupervisedLoss(TokenLoss):
    """Cross entropy of the loss tokens, their mean."""

    name = "supervised"

    def __init__(self) -> None:
        super().__init__(cross_entropy, says=("logprobs", "likeliest"), name=self.name)


class PolicyLoss(TokenLoss):
    """The clipped policy loss with its companions, as a recipe's section has it.

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
            says=("logprobs", "entropy"),
            name=self.name,
            options={"config": config},
            also=("reference_logprobs",) if near else (),
            aggregation=config.aggregation,
            constant=config.constant or max_tokens,
            resting="" if near or config.entropy else "advantages",
        )


class ValueLoss(TokenLoss):
    """The clipped value loss, its mean over the loss tokens, as a recipe's section has it.

    Args:
        config: the clip; where it is 0, ``old_values`` are not read.
    """

    name = "critic"

    def __init__(self, config: ValueLossConfig) -> None:
        also = ("old_values",) if config.clip else ()
        super().__init__(
            value_loss, says=("values",), name=self.name, options={"clip": config.clip}, also=also
        )


class PairLoss:
    """A loss of pairs, their mean: of the scores of the better answers and of the others.

    The rows of one (epoch, prompt) are a pair: sample 0 is chosen, sample 1 rejected. Each is scored at its
    last token and carries half of the pair's loss; a pair is never parted.

    Args:
        function: the losses [P] of ``chosen`` and ``rejected`` [P], or ``TokenLosses``; its other parameters
            without a default are dense fields of the rows, of which a pair has its chosen row's.
        options: further arguments.
    """

    name = "preference"
    says = ("chosen", "rejected")
    back = 0
    is_scalar = True

    def __init__(
        self,
        function: Callable[..., Tensor | TokenLosses] = preference_loss,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.function, self.options = function, dict(options or {})
        self._fields = [name for name in field_parameters(function, self.options) if name not in self.says]

    def prepare(self, minibatch: Batch) -> Batch:
        """As ``TokenLoss.prepare``, and ``loss_units`` [B] int64: rows that share a number come in one part.

        Raises:
            TrainingError: a row has no partner, or is neither sample 0 nor 1; a row is empty.
        """
        units = prompt_units(minibatch)
        _check_pairs(minibatch, units)
        rows = last_tokens(minibatch)
        halves = rows.ragged("loss_mask").with_values(rows.ragged("loss_mask").values.double() / 2)
        active = torch.ones(len(rows), dtype=torch.bool)
        rows = rows.with_fields(**{name: minibatch.dense(name) for name in self._fields})
        check_finite(rows, *self._fields)
        return _prepared(rows, halves, len(rows) / 2, active).with_fields(loss_units=units)

    def __call__(self, read: Tensor, part: Batch, /) -> LossPart:
        """The terms of one part: ``read`` [2P] are the scores, one a row."""
        order = torch.argsort(part.dense("loss_units") * 2 + part.ids[:, 2])
        chosen, rejected = read[order].view(-1, 2).unbind(1)
        known = {name: part.dense(name).to(read)[order].view(-1, 2)[:, 0] for name in self._fields}
        found = self.function(chosen=chosen, rejected=rejected, **known, **self.options)
        found = _checked(found, self.function, len(chosen))
        losses = found.losses.repeat_interleave(2)[torch.argsort(order)]
        weights = part.ragged("loss_weights").values.to(read.dtype)
        return LossPart(terms=losses * weights, metrics=_measured(found))


Loss = TokenLoss | PairLoss
"""What a trainer minimises."""


def loss_of(term: LossTerm, says: Collection[str], name: str, max_tokens: int = 0) -> Loss:
    """The loss that a step asked for: a recipe's section, or a function.

    Args:
        term: what was asked for.
        says: what the model says.
        name: the area of a function's metrics, if it was given none.
        max_tokens: longest answer.

    Raises:
        TrainingError: the section is of another kind of model.
    """
    match term.loss:
        case PolicyLossConfig() if "logprobs" in says:
            return PolicyLoss(term.loss, max_tokens)
        case ValueLossConfig() if "values" in says:
            return ValueLoss(term.loss)
        case LossSection():
            raise TrainingError(f"{name} is given {term.loss!r:.60}", why=f"its model says {', '.join(says)}")
    if says == PairLoss.says:
        return PairLoss(term.loss, term.options)
    return TokenLoss(term.loss, says=says, name=term.name or name, options=term.options)


def settled(loss: Loss, rows: Batch | None, ranks: Ranks) -> Batch | None:
    """The rows with what takes a whole minibatch to say: the tokens that m2po keeps; every rank calls it.

    Where nobody made ``old_logprobs``, the old policy is the present one, and nothing is left out.

    Args:
        loss: what is minimised.
        rows: this rank's part of the minibatch, prepared; None where it has none.
        ranks: those that have the other parts.
    """
    if not isinstance(loss, PolicyLoss) or loss.second_moment is None:
        return rows
    own = moved = torch.zeros(0, dtype=torch.float64)
    if rows is not None:
        mu = rows.ragged(SAMPLED).values
        moved = (
            rows.ragged("old_logprobs").values - mu if "old_logprobs" in rows.fields else 0 * mu
        ).double()
        own = moved[rows.ragged("loss_mask").values]
    limit = m2po_limit(torch.cat(ranks.gather(own)), bound=loss.second_moment)
    return rows and rows.with_fields(is_kept=rows.ragged(SAMPLED).with_values(moved.square() < limit))


def are_sampled(rows: Batch) -> bool:
    """Whether a policy sampled these rows; demonstrations have loss tokens of no version."""
    if "versions" not in rows.fields:
        return SAMPLED in rows.fields
    return bool((rows.ragged("versions").values[rows.ragged("loss_mask").values] >= 0).any())


def about(loss: Loss) -> dict[str, Any]:
    """What a replay needs to know of a loss, as JSON."""
    plain = {name: value for name, value in loss.options.items() if isinstance(value, int | float | str)}
    where = f"{loss.function.__module__}:{loss.function.__qualname__}"
    return {"loss": loss.name, "says": [*loss.says], "function": where, "options": plain}


def _not_zero(rows: Batch, name: str) -> Tensor:
    """[B] bool, True where the field is other than 0 at a loss token of the row."""
    field = rows.field(name)
    if not isinstance(field, Ragged):
        return field != 0
    teaches = (field.values != 0) & rows.ragged("loss_mask").values
    return field.with_values(teaches).sums() > 0


def _of_tokens(field: Tensor | Ragged, rows: Ragged, dtype: torch.dtype) -> Tensor:
    """[N] a field of the loss tokens, or of their rows and the same for all tokens of one."""
    values: Tensor = field.values if isinstance(field, Ragged) else rows.expand(field)
    return values.to(dtype) if values.is_floating_point() else values


def _prepared(rows: Batch, weights: Ragged, denominator: float, active: Tensor) -> Batch:
    """The rows with one denominator for all."""
    each = torch.full((len(rows),), denominator, dtype=torch.float64)
    return rows.with_fields(loss_weights=weights, loss_denominator=each, loss_active=active)


def _checked(found: Any, function: Callable[..., Any], count: int) -> TokenLosses:
    """What a loss returned: as many numbers as it was to judge."""
    losses = found if isinstance(found, TokenLosses) else TokenLosses(losses=found)
    made = losses.losses
    if not isinstance(made, Tensor) or made.shape != (count,):
        what = f"shape {list(made.shape)}" if isinstance(made, Tensor) else repr(made)
        raise TrainingError(
            f"the loss {function.__name__} returned {what}",
            why=f"there is one loss a token or pair, and there are {count}",
            fix="return a tensor [N], not its mean, or TokenLosses",
        )
    return losses


def _check_pairs(rows: Batch, units: Tensor) -> None:
    """Refuse rows that do not come as sample 0 and sample 1 of their prompt."""
    samples = rows.ids[:, 2]
    if not len(rows):
        raise TrainingError("a minibatch of 0 rows has no pair", why="there is nothing to learn from")
    odd = ((samples != 0) & (samples != 1)).nonzero()
    if len(odd):
        raise TrainingError(
            f"row ({rows.row_id(int(odd[0]))}) belongs to no pair",
            why="sample 0 is the chosen answer and sample 1 the rejected one",
            fix="make pairs with tasks.prompts.answered_batch",
        )
    count = torch.zeros(int(units.max()) + 1, 2, dtype=torch.int64)
    count.index_put_((units, samples), torch.ones_like(samples), accumulate=True)
    alone = (count[units] != 1).any(1).nonzero()
    if len(alone):
        row = int(alone[0])
        chosen, rejected = count[units[row]].tolist()
        raise TrainingError(
            f"row ({rows.row_id(row)}) is not one of a pair",
            why=f"its prompt has {chosen} chosen and {rejected} rejected answers here, not one of each",
            fix="keep the two rows of a pair in one batch, and each pair under a prompt number of its own",
        )


def _measured(found: TokenLosses) -> dict[str, Metric]:
    """Metrics of [N] or [P] values, fetched from the device at once."""
    asked = {name: _asked(name, values.detach()) for name, values in found.metrics.items()}
    wanted = [number for _, numbers in asked.values() for number in numbers]
    fetched = iter(torch.stack(wanted).tolist() if wanted else ())
    return {name: make(*islice(fetched, len(numbers))) for name, (make, numbers) in asked.items()}


def _asked(name: str, values: Tensor) -> tuple[Callable[..., Metric], tuple[Tensor, ...]]:
    """What makes a metric of values [N], one at least, and the numbers [] that it makes the metric of."""
    wide, count = values.double(), float(values.numel())
    match name.rpartition("/")[2]:
        case "histogram":
            return lambda: histogram_of(values, LOG_RATIOS), ()
        case "max":
            return lambda most: Max(value=most), (wide.max(),)
        case "variance":
            squares = (wide - wide.mean()).square().sum()
            return lambda about, mean: Variance(squares=about, mean=mean, count=count), (squares, wide.mean())
    return lambda total: Mean(total=total, count=count), (wide.sum(),)
