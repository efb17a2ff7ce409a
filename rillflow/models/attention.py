"""The attention function of every model, and the interface through which engines replace it.

    transformers module ── query, key, value ──> rillflow attention ── attention_plan ──> an engine's own
                                                        └────────── no plan ───────────> plain causal SDPA

A module stays unmodified: this function is registered with transformers' public attention
interface, and an engine passes an ``AttentionPlan`` as one more keyword of ``module(...)``.

    query · key · scaling ─ softcap: c tanh(./c) ─ mask ─ softmax with the head's sink ─> weights of values

Legend: N batch, H query heads, K key/value heads, G = H / K, T tokens, D head size, E head size of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface

from rillflow.errors import ModelError

ATTENTION = "rillflow"


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Settings that turn a layer's queries and keys into attention weights."""

    scaling: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """Number of positions that a token attends to, its own included; None is no limit."""
    softcap: float | None = None
    """Scores are limited to this by tanh (Gemma 2); None for no limit."""
    sinks: Tensor | None = None
    """[H] a learned score per head that joins the softmax without a value (gpt-oss); None for none."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled products."""
        return self.softcap is None and self.sinks is None

    def shares(self, products: Tensor, bias: Tensor) -> Tensor:
        """Return attention weights over L values, in float32 or wider, in the shape of ``products``.

        Args:
            products: [N, K, G, ..., L] scaled products of queries and keys.
            bias: 0 where a query attends to a key, -inf elsewhere.
        """
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        if self.softcap is not None:
            products = torch.tanh(products / self.softcap) * self.softcap
        products = products + bias
        if self.sinks is None:
            return products.softmax(-1)
        sinks = self.sinks.to(products.dtype).view(*products.shape[1:3], *[1] * (products.dim() - 3))
        beside = torch.cat([products, sinks.expand(*products.shape[:-1], 1)], -1)
        return beside.softmax(-1)[..., :-1]


class AttentionPlan(Protocol):
    """An engine's computation of one layer's attention from query, key and value."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend causally.

        Args:
            layer: the layer's index in the model, from 0.
            query: [N, H, T, D].
            key: [N, K, T, D], positions already applied.
            value: [N, K, T, E].
            scores: how to compute attention weights.

        Returns:
            [N, T, H, E].
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend with the plan, or causally without one: the function registered with transformers.

    Raises:
        ModelError: the architecture needs something that this function does not compute.
    """
    del attention_mask, dropout  # rows are causal and plans know their boundaries; training uses no dropout
    _refuse_unknown(rest)
    scores = Scores(
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    if attention_plan is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        return attention_plan.attend(layer, query, key, value, scores), None
    return causal(query, key, value, scores).transpose(1, 2), None


def causal(query: Tensor, key: Tensor, value: Tensor, scores: Scores, before: int = 0) -> Tensor:
    """Return [N, H, T, E] causal attention over whole rows that start at position 0.

    ``before`` is the number of keys of the same rows that precede the first query's own key.

    On a CPU narrower types are computed in float32: forward and backward take a half to a quarter of the
    time there, and the result is more exact.
    """
    dtype, tokens, window = query.dtype, query.shape[2], scores.window
    if query.device.type == "cpu" and dtype.itemsize < 4:
        query, key, value = query.float(), key.float(), value.float()
    if scores.is_plain:
        is_whole = not before and (window is None or window >= tokens)
        mask = None if is_whole else _mask(tokens, before, window, query.device)
        if query.device.type == "cuda" and (dtype == torch.float32 or type(mask) is Tensor):
            key, value = (_per_query_head(states, query.shape[1]) for states in (key, value))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scores.scaling, enable_gqa=True
        ).to(dtype)
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups, *query.shape[2:]) * scores.scaling
    bias = torch.zeros(tokens, before + tokens, device=query.device)
    bias.masked_fill_(~_reach(tokens, before, window, query.device), -torch.inf)
    shares = scores.shares(grouped @ key[:, :, None].transpose(-1, -2), bias)
    return (shares.to(value.dtype) @ value[:, :, None]).flatten(1, 2).to(dtype)


def _mask(tokens: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``_reach`` as an attention mask; on CUDA without a window, in the form of fused kernels."""
    is_limited = window is not None and window < before + tokens
    if device.type == "cuda" and not is_limited:
        return causal_lower_right(tokens, before + tokens)
    return _reach(tokens, before, window, device)


def _per_query_head(states: Tensor, heads: int) -> Tensor:
    """Return [N, H, T, D] states, repeated for each query head.

    Fused CUDA kernels of float32, or with a mask, do not share key heads. The kernel that is not fused takes
    memory quadratic in the tokens.
    """
    groups = heads // states.shape[1]
    return states if groups == 1 else states.repeat_interleave(groups, 1)


def _reach(tokens: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Return [T, before + T] bool: the keys that each token attends to, earlier ones and its own pass's."""
    seen = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def _refuse_unknown(rest: dict[str, Any]) -> None:
    for name in ("position_bias", "head_mask", "indices", "block_indices", "sinks"):
        if rest.get(name) is not None:
            raise ModelError(
                f"the model's attention uses {name!r}",
                why="Rillflow's attention is a scaled dot product, causal, with or without a sliding window, "
                "a soft cap and sinks",
                fix="choose a model without it",
            )


def register() -> None:
    """Register ``attn_implementation="rillflow"`` with transformers; repeated calls change nothing."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)  # plans know the boundaries of rows
