"""Losses over a scalar head: of values (critic) and of preferences (reward and cost model).

    minibatch ── prepare ──> checked fields, loss_weights, loss_denominator (one for all rows), loss_active
    [N] numbers of the head + the part's fields at its loss tokens ── call ──> terms [N] ── sum / denominator

They keep to the protocol of ``train.loss``, with numbers in the place of log probabilities.
Legend: B rows, N loss tokens of one micro-batch, P pairs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.formulas.aggregation import loss_weights
from rillflow.formulas.preference import bradley_terry, preference_accuracy
from rillflow.formulas.value_loss import clipped_value_loss
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean, Metric, Variance
from rillflow.train.config import ValueLossConfig
from rillflow.train.guards import check_finite, loss_tokens
from rillflow.train.learner import Objective
from rillflow.train.loss import LossPart
from rillflow.train.minibatches import prompt_units
from rillflow.train.reading import last_tokens


class ScalarLoss(Objective[Tensor], Protocol):
    """What the trainer of a scalar head asks of a loss."""

    @property
    def back(self) -> int:
        """How many tokens before a loss token the head is read: 1 for values, 0 for scores."""
        ...


class ValueLoss:
    """The clipped value loss, its mean over the loss tokens; see ``formulas.value_loss``.

    term = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    Rows carry ``returns`` (R) and, where the clip is not 0, ``old_values`` (v_old), aligned to the tokens.

    Args:
        config: the clip.
    """

    name = "critic"
    back = 1

    def __init__(self, config: ValueLossConfig) -> None:
        self._clip = config.clip

    def prepare(self, minibatch: Batch) -> Batch:
        """See Objective."""
        names = ["returns", "old_values"] if self._clip else ["returns"]
        rows = minibatch.only("tokens", "loss_mask", *names)
        tokens = loss_tokens(rows)
        check_finite(tokens, *names)
        weights = loss_weights(rows.ragged("loss_mask"), "token_mean")
        if not weights.denominator:
            raise TrainingError(
                f"a minibatch of {len(rows)} rows has no loss token",
                why="there is no state whose value could be learned",
                fix="check that answers are not empty and fit into the context",
            )
        return rows.with_fields(loss_weights=weights.values, **_all_rows(rows, weights.denominator))

    def __call__(self, read: Tensor, part: Batch, /) -> LossPart:
        """See Objective; ``read`` [N] are the values."""
        returns = part.ragged("returns").values.to(read.dtype)
        old = part.ragged("old_values").values.to(read.dtype) if self._clip else read.detach()
        losses = clipped_value_loss(read, old, returns, clip=self._clip)
        errors = (read.detach() - returns).square()
        means = {
            "critic/value/mean": read.detach(),
            "critic/return/mean": returns,
            "critic/squared_error/mean": errors,
            "critic/clipped/share": losses.detach() > errors / 2,
        }
        weights = part.ragged("loss_weights").values.to(read.dtype)
        metrics = {**_means(means), "critic/return/variance": _variance(returns)}
        return LossPart(terms=losses * weights, metrics=metrics)


class PreferenceLoss:
    """The Bradley-Terry loss of pairs, their mean; see ``formulas.preference``.

    The rows of one (epoch, prompt) are a pair: sample 0 is chosen, sample 1 rejected. Each is scored at its
    last token and carries half of the pair's -log sigmoid(s_chosen - s_rejected); a pair is never parted.
    """

    name = "preference"
    back = 0

    def prepare(self, minibatch: Batch) -> Batch:
        """See Objective.

        Raises:
            TrainingError: a row has no partner, or is neither sample 0 nor 1; a row is empty.
        """
        units = prompt_units(minibatch)
        _check_pairs(minibatch, units)
        rows = last_tokens(minibatch)
        weights = rows.ragged("loss_mask")
        return rows.with_fields(
            loss_weights=weights.with_values(weights.values.double() / 2),
            loss_units=units,
            **_all_rows(rows, len(rows) / 2),
        )

    def __call__(self, read: Tensor, part: Batch, /) -> LossPart:
        """See Objective; ``read`` [N] are the scores, one a row."""
        order = torch.argsort(part.dense("loss_units") * 2 + part.ids[:, 2])
        chosen, rejected = read[order].view(-1, 2).unbind(1)
        losses = bradley_terry(chosen, rejected).repeat_interleave(2)[torch.argsort(order)]
        weights = part.ragged("loss_weights").values.to(read.dtype)
        means = {
            "preference/accuracy/mean": preference_accuracy(chosen, rejected),
            "preference/margin/mean": (chosen - rejected).detach(),
        }
        return LossPart(terms=losses * weights, metrics=_means(means))


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


def _all_rows(rows: Batch, denominator: float) -> dict[str, Tensor]:
    """One denominator for all rows, every one of which has a gradient."""
    return {
        "loss_denominator": torch.full((len(rows),), denominator, dtype=torch.float64),
        "loss_active": torch.ones(len(rows), dtype=torch.bool),
    }


def _means(means: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Means of values [N] or [P], fetched from the device at once."""
    totals = torch.stack([values.sum(dtype=torch.float64) for values in means.values()]).tolist()
    return {
        name: Mean(total=total, count=float(values.numel()))
        for (name, values), total in zip(means.items(), totals, strict=True)
    }


def _variance(values: Tensor) -> Variance:
    """Of values [N], one at least."""
    wide = values.detach().double()
    mean = wide.mean()
    squares, middle = torch.stack([(wide - mean).square().sum(), mean]).tolist()
    return Variance(squares=squares, mean=middle, count=float(values.numel()))
