"""Log probabilities of given tokens and the entropy of their distributions, without copies of the logits.

    logits [N, V] ── a chunk of rows at a time, in float32 or wider ──> log p(token), entropy, likeliest? [N]

Kept for the backward pass are the logits themselves and two numbers a row; the backward pass makes the
one [N, V] gradient and fills it chunk by chunk. Legend: N tokens, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import FormulaError

_CACHED = 1 << 18
"""Logits of one chunk on a processor: few enough to stay in a cache between its passes."""
_LAUNCHED = 1 << 27
"""Logits of one chunk elsewhere: so many that what a chunk computes takes longer than asking for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """What a model says about given tokens, in float32 or wider."""

    logprobs: Tensor
    """[N] log probability of each token, after temperature."""
    entropy: Tensor
    """[N] entropy of the distribution each token was drawn from, in nats."""
    likeliest: Tensor
    """[N] bool, True where no token is likelier."""


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, *, chunk: int | None = None
) -> TokenLogprobs:
    """What ``softmax(logits / temperature)`` gives each token; gradients flow into the logits.

    log p = z_token - log sum exp z with z = logits / temperature; H = -sum p log p.

    Args:
        logits: [N, V] of any float type.
        tokens: [N] int64.
        temperature: the one the tokens were drawn at, above 0.
        chunk: logits computed at once, in whole rows and at least one; None for what suits the device.

    Raises:
        FormulaError: shapes do not fit, or the temperature is not positive.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
        raise FormulaError(
            f"token_logprobs: logits have shape {list(logits.shape)} and tokens {list(tokens.shape)}",
            why="there is one row of logits a token",
        )
    if not temperature > 0:
        raise FormulaError(
            f"token_logprobs: temperature is {temperature}",
            why="the likeliest token has probability 1 at temperature 0: there is nothing to learn from it",
            fix="sample at a temperature above 0",
        )
    chunk = chunk or (_CACHED if logits.device.type == "cpu" else _LAUNCHED)
    found = _TokenLogprobs.apply(logits, tokens, temperature, chunk)  # type: ignore[no-untyped-call]
    logprobs, entropy, likeliest = found
    return TokenLogprobs(logprobs=logprobs, entropy=entropy, likeliest=likeliest)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        normaliser, entropy, chosen, top = (
            torch.empty(logits.shape[0], dtype=wide, device=logits.device) for _ in range(4)
        )
        for part in _chunks(logits, chunk):
            scores = logits[part].to(wide) / temperature
            torch.amax(scores, -1, out=top[part])
            torch.gather(scores, -1, tokens[part, None], out=chosen[part, None])
            torch.logsumexp(scores, -1, out=normaliser[part])
            scores.sub_(
                normaliser[part, None]
            )  # before the sum: lse - sum p z would cancel where one token rules
            torch.sum(scores.exp().mul_(scores), -1, out=entropy[part])
        entropy.neg_()
        likeliest = chosen >= top
        ctx.save_for_backward(logits, tokens, normaliser, entropy)
        ctx.mark_non_differentiable(likeliest)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk = temperature, chunk
        return chosen - normaliser, entropy, likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """dz = g (onehot - p) - h p (z - log sum exp z + H) for gradients g of log p and h of H."""
        logits, tokens, normaliser, entropy = ctx.saved_tensors
        of_logprobs = torch.zeros_like(normaliser) if gradients[0] is None else gradients[0] / ctx.temperature
        of_entropy = None if gradients[1] is None else gradients[1] / ctx.temperature
        result = torch.empty_like(logits)
        for part in _chunks(logits, ctx.chunk):
            scores = (logits[part].to(normaliser.dtype) / ctx.temperature).sub_(normaliser[part, None])
            shares = scores.exp()
            slope = -of_logprobs[part, None]
            if of_entropy is not None:
                slope = slope - of_entropy[part, None] * scores.add_(entropy[part, None])
            shares.mul_(slope).scatter_add_(-1, tokens[part, None], of_logprobs[part, None])
            result[part] = shares
        return result, None, None, None


def _chunks(logits: Tensor, numbers: int) -> list[slice]:
    rows = max(1, numbers // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
