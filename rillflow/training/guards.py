"""Guards: numbers that must not be trained on are refused by the name of their row and token."""

from __future__ import annotations

import torch
from torch import Tensor

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.records.ragged import Ragged

FIRST_RATIO, FIRST_GAP = "mismatch/first_ratio/max", "mismatch/first_gap/mean"
"""What the contract on-policy-ratio measured: the largest |ratio - 1|, or the mean |log ratio|."""
BEHIND = "versions_behind"
"""The field that says how many versions old a token is, where some may be."""
ROUTES = {"routes"}
"""The field that says which experts tokens took, where the rows' own model is to take these again."""
_ENOUGH = 100
"""Tokens over which a mean says something."""


def loss_tokens(batch: Batch) -> Batch:
    """The batch with its ragged fields cut down to the loss tokens, and their ``places`` in their rows added.

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
            why="a token is predicted from those before it, and there is none",
            fix="begin every row with at least one prompt token",
        )
    cut = {
        name: Ragged(values=field.values[index], lengths=lengths) if isinstance(field, Ragged) else field
        for name, field in batch.fields.items()
    }
    return Batch(ids=batch.ids, fields={**cut, "places": Ragged(values=places, lengths=lengths)})


def describe_token(tokens: Batch, index: int) -> str:
    """Which token entry ``index`` [N] of a ``loss_tokens`` batch is."""
    places = tokens.ragged("places")
    row = tokens.row_id(int(places.row_of[index]))
    token = int(tokens.ragged("tokens").values[index])
    return f"token {int(places.values[index])} (id {token}) of row ({row})"


def check_finite(tokens: Batch, *names: str) -> None:
    """Refuse fields of a ``loss_tokens`` batch, dense or ragged, that hold NaN or infinity.

    Raises:
        NotFiniteError: it names the field, the value, and the first row and token that has it.
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
            why="no step can be made with a number that is not finite; the weights are unchanged",
            fix="look at that row: what made the number came before the update",
        )


def check_freshness(rows: Batch, version: int, bound: int | None) -> Tensor:
    """Refuse tokens that are older than the bound.

    Contract bounded-staleness: version - bound <= the version of every loss token.

    Args:
        rows: rows, sampled ones with ``versions``; others have no age.
        version: of the weights that are to be trained.
        bound: the versions that a token may be behind; None: any, where a loss weighs none of theirs.

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
            f"weights that are to be trained have version {version}",
            why=f"that is {int(behind.max())} behind, and algorithm.freshness is {bound}",
            fix="sample after flow.publish, or raise algorithm.freshness",
        )
    return behind


def check_ratio(tokens: Batch, logprobs: Tensor, tolerance: float) -> dict[str, Metric]:
    """Refuse a batch that was not sampled by the policy that is about to be trained.

    Contract on-policy-ratio: |exp(trainer - sampler) - 1| <= tolerance for every loss token of the present
    version; tokens of older ones are not looked at.

    Args:
        tokens: a ``loss_tokens`` batch with ``sampler_logprobs``.
        logprobs: [N] the trainer's.
        tolerance: the largest deviation.

    Returns:
        The largest deviation, by the metric's name; nothing where there is no such token.

    Raises:
        TrainingError: it names the worst token, its row and both log probabilities.
    """
    places, gaps = _gaps(tokens, logprobs)
    if not len(gaps):
        return {}
    deviation = torch.expm1(gaps).abs()
    worst = int(deviation.argmax())
    if float(deviation[worst]) > tolerance:  # one that is NaN is the loss's to name
        at = int(places[worst])
        own, sampled = float(logprobs[at].detach()), float(tokens.ragged("sampler_logprobs").values[at])
        raise TrainingError(
            f"the first minibatch is not on-policy: at {describe_token(tokens, at)} the trainer's "
            f"log probability is {own:.7g} and the sampler's {sampled:.7g}",
            why=f"their ratio differs from 1 by {float(deviation[worst]):.3g}, more than {tolerance:g}: "
            "the sampler ran other weights, another temperature or other arithmetic",
            fix="raise ratio_tolerance only if the arithmetic is meant to differ",
        )
    return {FIRST_RATIO: Max(value=float(deviation[worst]))}


def check_gap(tokens: Batch, logprobs: Tensor, tolerance: float) -> dict[str, Metric]:
    """The contract on-policy-ratio where rounding is rough: the mean of |trainer - sampler| <= tolerance.

    A single token may be far off, such as where rounding sends it to another expert. For the same reason
    fewer than 100 tokens are judged as if as many as there lack agreed. Older versions' tokens are left out.

    Args:
        tokens: a ``loss_tokens`` batch with ``sampler_logprobs``.
        logprobs: [N] the trainer's.
        tolerance: the largest mean.

    Returns:
        The mean, by the metric's name; nothing where there is no such token.

    Raises:
        TrainingError: it names the mean, and the worst token with its row.
    """
    places, gaps = _gaps(tokens, logprobs)
    mean = float(gaps.abs().sum()) / max(len(gaps), _ENOUGH)
    if not mean <= tolerance:
        worst = int(gaps.abs().argmax())
        raise TrainingError(
            f"the first minibatch is not on-policy: log probabilities of trainer and sampler are {mean:.3g} "
            f"apart in the mean, and {abs(float(gaps[worst])):.3g} at "
            f"{describe_token(tokens, int(places[worst]))}",
            why=f"that is more than {tolerance:g}, and rounding to bfloat16 leaves about 0.01: "
            "the sampler ran other weights, another temperature or other arithmetic",
            fix="raise gap_tolerance only if the arithmetic is meant to differ",
        )
    return {FIRST_GAP: Mean(total=float(gaps.abs().sum()), count=len(gaps))} if len(gaps) else {}


def _gaps(tokens: Batch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """[M] which of a ``loss_tokens`` batch the present weights sampled, and their trainer - sampler."""
    gaps = logprobs.detach() - tokens.ragged("sampler_logprobs").values
    behind = tokens.ragged(BEHIND).values if BEHIND in tokens.fields else torch.zeros(len(gaps))
    places = (behind == 0).nonzero().squeeze(1)
    return places, gaps[places]
