"""Guards: refuse numbers that must not be trained on, and name their row and token."""

from __future__ import annotations

import torch
from torch import Tensor

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.records.ragged import Ragged

FIRST_RATIO, FIRST_GAP = "mismatch/first_ratio/max", "mismatch/first_gap/mean"
"""Metrics of the contract on-policy-ratio: the largest |ratio - 1|, or the mean |log ratio|."""
LARGEST_GAP, ROW_GAP = "mismatch/first_gap/max", "mismatch/first_row_gap/max"
"""The largest |log ratio| of a token, and the largest mean of a row."""
BEHIND = "versions_behind"
"""Field with the number of versions that each token is behind, present when some may be."""
ROUTES = {"routes"}
"""Field with the tokens' experts, present when the model must replay the routing."""
_ENOUGH, _ENOUGH_IN_ROW = 100, 16
"""Minimum tokens for a meaningful mean, of a micro-batch and of a row."""
ROW_FACTOR = 5
"""A row's mean difference may be this many times the tolerance."""


def loss_tokens(batch: Batch) -> Batch:
    """Return the batch with ragged fields reduced to the loss tokens, plus their ``places`` in the rows.

    Every ragged field of the batch must be aligned to ``tokens``.

    Raises:
        TrainingError: a row's first token is a loss token.
    """
    mask = batch.ragged("loss_mask")
    index = mask.values.nonzero().squeeze(1)
    lengths: Tensor = mask.sums()
    places = mask.positions[index]
    if places.numel() and int(places.min()) == 0:
        row = int(mask.row_of[index[places == 0][0]])
        raise TrainingError(
            f"the first token of row ({batch.row_id(row)}) is a loss token",
            why="a token is predicted from the tokens before it, and the first has none",
            fix="start every row with at least one prompt token",
        )
    cut = {
        name: Ragged(values=field.values[index], lengths=lengths) if isinstance(field, Ragged) else field
        for name, field in batch.fields.items()
    }
    return Batch(ids=batch.ids, fields={**cut, "places": Ragged(values=places, lengths=lengths)})


def describe_token(tokens: Batch, index: int) -> str:
    """Return a description of token ``index`` [N] of a ``loss_tokens`` batch."""
    places = tokens.ragged("places")
    row = tokens.row_id(int(places.row_of[index]))
    token = int(tokens.ragged("tokens").values[index])
    return f"token {int(places.values[index])} (id {token}) of row ({row})"


def check_finite(tokens: Batch, *names: str) -> None:
    """Refuse fields of a ``loss_tokens`` batch, dense or ragged, that contain NaN or infinity.

    Raises:
        NotFiniteError: it names the field, the value, and the first row and token with it.
    """
    for name in names:
        field = tokens.field(name)
        values = field.values if isinstance(field, Ragged) else field
        finite = torch.isfinite(values)
        if bool(finite.all()):
            continue
        index = int((~finite).nonzero()[0])
        if isinstance(field, Ragged):
            where = describe_token(tokens, index)
        else:
            where = f"row ({tokens.row_id(index)})"
        raise NotFiniteError(
            f"{name} is {float(values[index])} at {where}",
            why="an update needs finite numbers; the weights are unchanged",
            fix="inspect that row: the value was computed before the update",
        )


def check_freshness(rows: Batch, version: int, bound: int | None) -> Tensor:
    """Refuse tokens that are older than the bound.

    Contract bounded-staleness: version - bound <= the version of every loss token.

    Args:
        rows: sampled rows with ``versions``; rows without this field have no age.
        version: version of the weights to be trained.
        bound: maximum versions that a token may be behind; None for any, if no loss weights old tokens.

    Returns:
        [N] int64 how many versions each sampled token is behind.

    Raises:
        TrainingError: it names the oldest token's row.
    """
    if "versions" not in rows.fields:
        return torch.zeros(0, dtype=torch.int64)
    versions = rows.ragged("versions")
    sampled = rows.ragged("loss_mask").values & (versions.values >= 0)
    behind: Tensor = version - versions.values[sampled]
    if bound is not None and len(behind) and int(behind.max()) > bound:
        oldest = int(versions.row_of[sampled][behind.argmax()])
        raise TrainingError(
            f"row ({rows.row_id(oldest)}) has a token of version {version - int(behind.max())}, and the "
            f"weights to train have version {version}",
            why=f"the token is {int(behind.max())} versions behind, and schedule.freshness is {bound}",
            fix="sample after flow.publish, or raise schedule.freshness",
        )
    return behind


def check_ratio(tokens: Batch, logprobs: Tensor, tolerance: float) -> dict[str, Metric]:
    """Refuse a batch that was not sampled by the policy about to be trained.

    Contract on-policy-ratio: |exp(trainer - sampler) - 1| <= tolerance for every loss token of the present
    version; tokens of older versions are not checked.

    Args:
        tokens: a ``loss_tokens`` batch with ``sampler_logprobs``.
        logprobs: [N] the trainer's log probabilities.
        tolerance: the largest deviation.

    Returns:
        The largest deviation, by the metric's name; empty if no token has the present version.

    Raises:
        TrainingError: it names the worst token, its row and both log probabilities.
    """
    places, gaps = _gaps(tokens, logprobs)
    if not len(gaps):
        return {}
    deviation = torch.expm1(gaps).abs()
    worst = int(deviation.argmax())
    if float(deviation[worst]) > tolerance:  # a NaN is reported by the loss
        at = int(places[worst])
        own, sampled = float(logprobs[at].detach()), float(tokens.ragged("sampler_logprobs").values[at])
        raise TrainingError(
            f"the first minibatch is not on-policy: at {describe_token(tokens, at)} the trainer's "
            f"log probability is {own:.7g} and the sampler's {sampled:.7g}",
            why=f"their ratio differs from 1 by {float(deviation[worst]):.3g}, more than {tolerance:g}: "
            "the sampler used other weights, another temperature or other arithmetic",
            fix="raise ratio_tolerance only if the arithmetic is meant to differ",
        )
    return {FIRST_RATIO: Max(value=float(deviation[worst]))}


def check_gap(tokens: Batch, logprobs: Tensor, tolerance: float) -> dict[str, Metric]:
    """Refuse a bfloat16 batch that is not on-policy, by mean differences of log probabilities.

    Contract on-policy-ratio for bfloat16: mean |trainer - sampler| <= tolerance over all tokens, and
    <= ``ROW_FACTOR`` x tolerance over each row. A single token may differ much, for example when rounding
    sends it to another expert, so no token is refused alone. For the same reason, a batch of fewer than 100
    tokens is filled up to 100 with tokens of difference 0, and a row up to 16. Tokens of older versions are
    not checked.

    Args:
        tokens: a ``loss_tokens`` batch with ``sampler_logprobs``.
        logprobs: [N] the trainer's log probabilities.
        tolerance: the largest mean.

    Returns:
        The mean, the largest difference, and the largest mean of a row, by the metrics' names; empty if no
        token has the present version.

    Raises:
        TrainingError: it names the mean, and the worst token or row.
    """
    places, gaps = _gaps(tokens, logprobs)
    if not len(gaps):
        return {}
    gaps = gaps.abs()
    mean = float(gaps.sum()) / max(len(gaps), _ENOUGH)
    worst = int(gaps.argmax())
    largest = float(gaps[worst])
    fix = "raise gap_tolerance only if the arithmetic is meant to differ"
    if not mean <= tolerance:
        raise TrainingError(
            f"the first minibatch is not on-policy: log probabilities of trainer and sampler differ by "
            f"{mean:.3g} on average, and by {largest:.3g} at {describe_token(tokens, int(places[worst]))}",
            why=f"that is more than {tolerance:g}, and rounding to bfloat16 causes about 0.01: "
            "the sampler used other weights, another temperature or other arithmetic",
            fix=fix,
        )
    row_means = _row_means(tokens.ragged("places").row_of[places], gaps, len(tokens))
    row = int(row_means.argmax())
    row_gap = float(row_means[row])
    if not row_gap <= ROW_FACTOR * tolerance:
        raise TrainingError(
            f"row ({tokens.row_id(row)}) of the first minibatch is not on-policy: log probabilities of "
            f"trainer and sampler differ by {row_gap:.3g} on average in it, and by {mean:.3g} in all rows",
            why=f"that is more than {ROW_FACTOR} x gap_tolerance ({ROW_FACTOR * tolerance:g}), and rounding "
            "affects all rows alike: the sampler computed this row from other keys or values",
            fix=fix,
        )
    return {
        FIRST_GAP: Mean(total=float(gaps.sum()), count=len(gaps)),
        LARGEST_GAP: Max(value=largest),
        ROW_GAP: Max(value=row_gap),
    }


def _row_means(rows: Tensor, gaps: Tensor, count: int) -> Tensor:
    """Return [count] each row's mean of its gaps, where short rows count as ``_ENOUGH_IN_ROW`` tokens.

    Args:
        rows: [M] index of each gap's row.
        gaps: [M].
        count: number of rows.
    """
    sums = gaps.new_zeros(count).index_add_(0, rows.to(gaps.device), gaps)
    return sums / rows.bincount(minlength=count).clamp(min=_ENOUGH_IN_ROW).to(gaps.device)


def _gaps(tokens: Batch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return [M] indices of tokens that the present weights sampled, and their trainer - sampler."""
    gaps = logprobs.detach() - tokens.ragged("sampler_logprobs").values
    behind = tokens.ragged(BEHIND).values if BEHIND in tokens.fields else torch.zeros(len(gaps))
    places = (behind == 0).nonzero().squeeze(1)
    return places, gaps[places]
