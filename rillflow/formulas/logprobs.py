"""Log probabilities of given tokens and the entropy of their distributions, without copies of the logits.

    logits [N, V] ── a chunk of rows at a time, in float32 or wider ──> log p(token), entropy, likeliest? [N]

The backward pass needs only the logits themselves and two numbers per row; it makes the one [N, V] gradient
and fills it chunk by chunk. If even one [N, V] is too large, logits are made one vocabulary slice at a time,
and again in the backward pass:

    hidden [N, D] ─ x weight[slice].T ─> [N, S] ─ as above ─> log sum exp, entropy of each ─ joined ─> [N]
         └─ backward: the logits again, overwritten by their gradient ─> weight[slice]'s, hidden's

Legend: N tokens, V vocabulary, C rows of a chunk, D hidden size, S tokens of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.config import MOST_LOGITS

_CACHED = 1 << 18
"""Logits of one chunk on a CPU: few enough to stay in a cache between its passes."""
_LAUNCHED = 1 << 27
"""Logits of one chunk on other devices: enough to hide the launch of its kernels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Log probabilities and entropies at given tokens, in float32 or wider."""

    logprobs: Tensor
    """[N] log probability of each token, after temperature."""
    entropy: Tensor
    """[N] entropy of the distribution each token was drawn from, in nats."""
    likeliest: Tensor
    """[N] bool, True where no token is likelier."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadLogits:
    """Logits [N, V] that are not materialised: slices of ``hidden @ weight.T`` are made one at a time."""

    hidden: Tensor
    """[N, D] hidden states at the tokens that are read."""
    weight: Tensor
    """[V, D] weight of the head."""
    most: int = MOST_LOGITS
    """Most logits of one slice; a slice has at least one token of the vocabulary."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V)."""
        return (self.hidden.shape[0], self.weight.shape[0])

    def sum(self) -> Tensor:
        """Return [], a number that depends on everything the logits depend on, for a gradient of 0."""
        return self.hidden.sum() + self.weight.sum()


def token_logprobs(
    logits: Tensor | HeadLogits, tokens: Tensor, temperature: float = 1.0, *, chunk: int | None = None
) -> TokenLogprobs:
    """Return log probabilities and entropies under ``softmax(logits / temperature)``, with gradients.

    log p = z_token - log sum exp z with z = logits / temperature; H = -sum p log p.

    Args:
        logits: [N, V] of any float type, or the hidden states and the weight they are made of.
        tokens: [N] int64.
        temperature: sampling temperature of the tokens, above 0.
        chunk: logits computed at once, in whole rows and at least one; None chooses for the device.

    Raises:
        FormulaError: shapes do not fit, or the temperature is not positive.
    """
    if len(logits.shape) != 2 or tokens.shape != logits.shape[:1]:
        raise FormulaError(
            f"token_logprobs: logits have shape {list(logits.shape)} and tokens {list(tokens.shape)}",
            why="each token needs one row of logits",
        )
    if not temperature > 0:
        raise FormulaError(
            f"token_logprobs: temperature is {temperature}",
            why="at temperature 0 the likeliest token has probability 1 and gives no gradient",
            fix="sample at a temperature above 0",
        )
    chunk = chunk or (_CACHED if tokens.device.type == "cpu" else _LAUNCHED)
    made_of: tuple[Any, ...] = (logits, None, 0)
    if isinstance(logits, HeadLogits):
        made_of = (logits.hidden, logits.weight, logits.most)
    found = _TokenLogprobs.apply(*made_of, tokens, temperature, chunk)  # type: ignore[no-untyped-call]
    logprobs, entropy, likeliest = found
    return TokenLogprobs(logprobs=logprobs, entropy=entropy, likeliest=likeliest)


class _TokenLogprobs(torch.autograd.Function):
    """Log probabilities from logits [N, V], or, with a weight [V, D], from hidden states [N, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        weight: Tensor | None,
        most: int,
        tokens: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(given.dtype, torch.float32)
        of_slices = []
        score = highest = torch.tensor(-torch.inf, dtype=wide, device=given.device)
        for start, _, logits in _slices(given, weight, most):
            normaliser, entropy, chosen, top = torch.empty(4, len(tokens), dtype=wide, device=given.device)
            inside, ids = _within(tokens, start, logits.shape[1])
            for part in _chunks(logits, chunk):
                scores = logits[part].to(wide) / temperature
                torch.amax(scores, -1, out=top[part])
                torch.gather(scores, -1, ids[part, None], out=chosen[part, None])
                torch.logsumexp(scores, -1, out=normaliser[part])
                # before the sum: lse - sum p z would cancel where one token dominates
                scores.sub_(normaliser[part, None])
                torch.sum(scores.exp().mul_(scores), -1, out=entropy[part])
            of_slices.append((normaliser, entropy.neg_()))
            score, highest = torch.where(inside, chosen, score), torch.maximum(highest, top)
        normaliser, entropy = of_slices[0] if len(of_slices) == 1 else _joined(of_slices)
        likeliest = score >= highest
        ctx.save_for_backward(given, weight, tokens, normaliser, entropy)
        ctx.mark_non_differentiable(likeliest)
        ctx.set_materialize_grads(False)
        ctx.most, ctx.temperature, ctx.chunk = most, temperature, chunk
        return score - normaliser, entropy, likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute dz = g (onehot - p) - h p (z - log sum exp z + H) for gradients g of log p and h of H."""
        given, weight, tokens, normaliser, entropy = ctx.saved_tensors
        of_logprobs = torch.zeros_like(normaliser) if gradients[0] is None else gradients[0] / ctx.temperature
        of_entropy = None if gradients[1] is None else gradients[1] / ctx.temperature
        of_given = torch.empty_like(given) if weight is None else torch.zeros_like(given, dtype=entropy.dtype)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start, rows, logits in _slices(given, weight, ctx.most):
            inside, ids = _within(tokens, start, logits.shape[1])
            hits, slopes = of_logprobs * inside, of_given if weight is None else logits
            for part in _chunks(logits, ctx.chunk):
                scores = (logits[part].to(normaliser.dtype) / ctx.temperature).sub_(normaliser[part, None])
                shares = scores.exp()
                slope = -of_logprobs[part, None]
                if of_entropy is not None:
                    slope = slope - of_entropy[part, None] * scores.add_(entropy[part, None])
                shares.mul_(slope).scatter_add_(-1, ids[part, None], hits[part, None])
                slopes[part] = shares
            if rows is not None:
                of_given += slopes @ rows
            if of_weight is not None:
                torch.mm(slopes.T, given, out=of_weight[start : start + logits.shape[1]])
        return of_given.to(given.dtype), of_weight, None, None, None, None


def _slices(given: Tensor, weight: Tensor | None, most: int) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Yield each slice's first token, weights and logits; the next slice overwrites the logits."""
    if weight is None:
        yield 0, None, given
        return
    rows, vocabulary = given.shape[0], weight.shape[0]
    width = -(-vocabulary // max(1, -(-rows * vocabulary // most)))
    held = given.new_empty(rows * width)
    for start in range(0, vocabulary, width):
        part = weight[start : start + width]
        yield start, part, torch.mm(given, part.T, out=held[: rows * len(part)].view(rows, len(part)))


def _within(tokens: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return [N] each: whether a token is in a slice, and its index there, or any index."""
    ids = tokens - start
    return (ids >= 0) & (ids < width), ids.clamp(0, width - 1)


def _joined(of_slices: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return [N] each: log sum exp and entropy of all slices; H = sum of P (H of the slice - log P)."""
    normalisers, entropies = (torch.stack(each) for each in zip(*of_slices, strict=True))
    normaliser = torch.logsumexp(normalisers, 0)
    logs = normalisers - normaliser
    return normaliser, (logs.exp() * (entropies - logs)).sum(0)


def _chunks(logits: Tensor, numbers: int) -> list[slice]:
    rows = max(1, numbers // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
