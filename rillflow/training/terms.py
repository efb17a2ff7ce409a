"""Terms: the interface of every loss to the trainer, and metrics of a loss's values.

    rows ─ prepared ─> the same with loss_weights, loss_denominator, loss_active
    result of a loss function ─ checked_losses ─> TokenLosses ─ measured ─> metrics

Legend: B rows, N loss tokens, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import TrainingError, nearest
from rillflow.formulas.losses import TokenLosses
from rillflow.records.batch import Batch
from rillflow.records.metrics import LargestShare, Max, Mean, Metric, Variance, histogram_of
from rillflow.records.ragged import Ragged

SAMPLED = "sampler_logprobs"
"""Field of rows that a policy sampled; the guards need it and ``BEHIND`` besides the loss's own fields."""
LOG_RATIOS = (-2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.01, -0.001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Bin edges for histograms of log ratios, in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossPart:
    """One micro-batch's part of a loss."""

    terms: Tensor
    """[N] weighted losses; their sum over all parts, divided by the denominator, is the loss."""
    metrics: Mapping[str, Metric]
    """Metrics of these tokens."""


def prepared(rows: Batch, weights: Ragged, denominator: float, active: Tensor | None = None) -> Batch:
    """Return the rows with one denominator; only the ``active`` ones, or all, have a gradient."""
    each = torch.full((len(rows),), denominator, dtype=torch.float64)
    active = torch.ones(len(rows), dtype=torch.bool) if active is None else active
    return rows.with_fields(loss_weights=weights, loss_denominator=each, loss_active=active)


def require_fields(
    function: Callable[..., Any],
    names: Collection[str],
    there: Collection[str],
    model_outputs: Collection[str] = (),
) -> None:
    """Refuse rows that lack a field which the loss reads."""
    missing = [each for each in names if each not in there]
    if missing:
        known = f"; the model outputs {', '.join(model_outputs)}" if model_outputs else ""
        raise TrainingError(
            f"the loss {function.__name__} reads the field {missing[0]!r}, which no row has",
            why=f"rows have {', '.join(there)}{known}",
            fix=nearest(missing[0], {*there, *model_outputs}),
        )


def checked_losses(found: Any, function: Callable[..., Any], count: int) -> TokenLosses:
    """Return a loss function's result as ``TokenLosses``, after checking that it has ``count`` losses."""
    losses = found if isinstance(found, TokenLosses) else TokenLosses(losses=found)
    made = losses.losses
    if not isinstance(made, Tensor) or made.shape != (count,):
        what = f"shape {list(made.shape)}" if isinstance(made, Tensor) else repr(made)
        raise TrainingError(
            f"the loss {function.__name__} returned {what}",
            why=f"it must return one loss per token or pair, here {count}",
            fix="return a tensor [N] of losses, not their mean, or TokenLosses",
        )
    return losses


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
