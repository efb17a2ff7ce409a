"""Terms: the protocol of a kind of loss, the interface of every loss to the trainer.

    rows ─ Loss.prepare ─> the same with loss_weights, loss_denominator, loss_active
         ─ Loss.settled ─> and fields that depend on the whole minibatch
    a part of them, the model's outputs ─ Loss ─> LossPart: terms [N], metrics

    result of a loss function ─ checked_losses ─> TokenLosses ─ measured ─> metrics

Legend: B rows, N loss tokens, P pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rillflow.errors import TrainingError, nearest
from rillflow.formulas.losses import TokenLosses
from rillflow.graph.loss import LossSection
from rillflow.records.batch import Batch
from rillflow.records.metrics import LargestShare, Max, Mean, Metric, Variance, histogram_of
from rillflow.records.ragged import Ragged
from rillflow.training.minibatches import prompt_units
from rillflow.workers.collectives import Ranks

Score: TypeAlias = Callable[[Batch], Ragged]
"""Function that returns the present log probabilities of rows' loss tokens."""
SAMPLED = "sampler_logprobs"
"""Field of rows that a policy sampled; the guards need it and ``BEHIND`` besides the loss's own fields."""
_PLAIN = (int, float, str)
"""Types of the options that a replay needs; it gets tensors from the rows."""
LOG_RATIOS = (-2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.01, -0.001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Bin edges for histograms of log ratios, in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossPart:
    """One micro-batch's part of a loss."""

    terms: Tensor
    """[N] weighted losses; their sum over all parts, divided by the denominator, is the loss."""
    metrics: Mapping[str, Metric]
    """Metrics of these tokens."""


class Loss(ABC):
    """A kind of loss: what it reads, how its rows are prepared, and its terms.

    A section that stands for a loss is passed to ``__init__`` with the longest answer in tokens.
    """

    name: str
    """Area of its metrics."""
    model_outputs: Collection[str]
    """The model's outputs that it may read."""
    reads: tuple[str, ...]
    """Names of fields and of the model's outputs that it reads."""
    source: Callable[..., Any] | LossSection
    """Function that it minimises, or the section that stands for it."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the function that are not fields."""
    back = 1
    """Number of tokens before a loss token at which the module's output is read."""
    is_scalar = False
    """Whether it reads a scalar head, not log probabilities."""
    rows_together = 1
    """Number of rows of one (epoch, prompt) that are never separated."""

    @abstractmethod
    def prepare(self, minibatch: Batch) -> Batch:
        """Return the loss's fields, checked, and three more.

        ``loss_weights`` of the tokens; ``loss_denominator`` [B], the same number in every row;
        ``loss_active`` [B] bool, False if a row's terms have no gradient and are only measured. A loss of
        several rows adds ``loss_units`` [B] int64, whose equal rows stay in one part.

        Raises:
            NotFiniteError: a number is not finite.
            TrainingError: the rows lack a field that the loss reads, or there is no loss token.
        """

    @abstractmethod
    def __call__(self, read: Any, part: Batch, /) -> LossPart:
        """Return the terms of one part: ``read`` has the outputs at N tokens, ``part`` their fields."""

    def settled(self, rows: Batch | None, minibatch: Batch, score: Score, ranks: Ranks) -> Batch | None:
        """Return the rows with fields that depend on the whole minibatch; every rank calls it.

        Args:
            rows: this rank's prepared part of the minibatch; None if it has none.
            minibatch: the same part before ``prepare``.
            score: scores rows by the present weights.
            ranks: the ranks with the other parts.
        """
        del minibatch, score, ranks
        return rows

    def units(self, rows: Batch) -> Tensor | None:
        """Return [B] int64, equal for rows that stay in one minibatch; None if any row may be alone."""
        return prompt_units(rows) if self.rows_together > 1 else None

    def about(self) -> dict[str, Any]:
        """Return the facts that a replay needs to make the loss again, as JSON."""
        made: Any = self.source
        options = {name: value for name, value in self.options.items() if isinstance(value, _PLAIN)}
        if isinstance(self.source, LossSection):
            made, options = type(self.source), self.source.model_dump(mode="json")
        return {
            "loss": self.name,
            "model_outputs": [*self.model_outputs],
            "is_scalar": self.is_scalar,
            "source": f"{made.__module__}:{made.__qualname__}",
            "options": options,
        }


def prepared(rows: Batch, weights: Ragged, denominator: float, active: Tensor | None = None) -> Batch:
    """Return the rows with one denominator; only the ``active`` ones, or all, have a gradient."""
    each = torch.full((len(rows),), denominator, dtype=torch.float64)
    active = torch.ones(len(rows), dtype=torch.bool) if active is None else active
    return rows.with_fields(loss_weights=weights, loss_denominator=each, loss_active=active)


def require_fields(
    source: Callable[..., Any] | LossSection,
    names: Collection[str],
    there: Collection[str],
    model_outputs: Collection[str] = (),
) -> None:
    """Refuse rows that lack a field which the loss reads."""
    missing = [each for each in names if each not in there]
    if missing:
        known = f"; the model outputs {', '.join(model_outputs)}" if model_outputs else ""
        raise TrainingError(
            f"the loss {_called(source)} reads the field {missing[0]!r}, which no row has",
            why=f"rows have {', '.join(there)}{known}",
            fix=nearest(missing[0], {*there, *model_outputs}),
        )


def checked_losses(found: Any, source: Callable[..., Any] | LossSection, count: int) -> TokenLosses:
    """Return a loss's result as ``TokenLosses``, after checking that it has ``count`` losses."""
    losses = found if isinstance(found, TokenLosses) else TokenLosses(losses=found)
    made = losses.losses
    if not isinstance(made, Tensor) or made.shape != (count,):
        what = f"shape {list(made.shape)}" if isinstance(made, Tensor) else repr(made)
        raise TrainingError(
            f"the loss {_called(source)} returned {what}",
            why=f"it must return one loss per token or unit of answers, here {count}",
            fix="return a tensor [N] of losses, not their mean, or TokenLosses",
        )
    return losses


def _called(source: Callable[..., Any] | LossSection) -> str:
    return type(source).__name__ if isinstance(source, LossSection) else source.__name__


def measured(found: TokenLosses, weights: Tensor | None = None) -> dict[str, Metric]:
    """Return metrics of [N] or [P] values, with one transfer from the device; ``weights`` are the losses'."""
    asked = {name: _asked(name, values.detach(), weights) for name, values in found.metrics.items()}
    wanted = [number for _, numbers in asked.values() for number in numbers]
    fetched = iter(torch.stack(wanted).tolist() if wanted else ())
    return {name: make(*islice(fetched, len(numbers))) for name, (make, numbers) in asked.items()}


def _asked(
    name: str, values: Tensor, weights: Tensor | None
) -> tuple[Callable[..., Metric], tuple[Tensor, ...]]:
    """Return a function that makes a metric, and its arguments [] computed from values [N] with N >= 1."""
    wide, count = values.double(), float(values.numel())
    match name.rpartition("/")[2]:
        case "histogram":
            return lambda: histogram_of(values, LOG_RATIOS), ()
        case "max":
            return lambda most: Max(value=most), (wide.max(),)
        case "largest_share":
            wide = wide if weights is None else wide * weights
            return lambda most, total: LargestShare(most=most, total=total), (wide.max(), wide.sum())
        case "variance":
            squares = (wide - wide.mean()).square().sum()
            return lambda about, mean: Variance(squares=about, mean=mean, count=count), (squares, wide.mean())
    return lambda total: Mean(total=total, count=count), (wide.sum(),)
