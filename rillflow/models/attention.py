"""The one attention function every model is built with, and the seam engines plug into.

    transformers module ── query, key, value ──> rillflow attention ── attention_plan ──> an engine's own
                                                        └────────── no plan ───────────> plain causal SDPA

A module stays unmodified: this function is registered with the library's public attention
interface, and an engine passes an ``AttentionPlan`` as one more keyword of ``module(...)``.

    query · key · scaling ─ softcap: c tanh(./c) ─ mask ─ softmax beside the head's sink ─> shares of values

Legend: N batch, H query heads, K key/value heads, G = H / K, T tokens, D head size, E that of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rillflow.errors import ModelError

ATTENTION = "rillflow"


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """How a layer's queries and keys become shares of its values."""

    scaling: float
    """Factor on query times key."""
    window: int | None = None
    """How many tokens back a token sees, itself included; None for all."""
    softcap: float | None = None
    """Scores beyond it are bent towards it (Gemma 2); None for none."""
    sinks: Tensor | None = None
    """[H] a learned score of each head, whose share goes to no value (gpt-oss); None for none."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products and nothing besides."""
        return self.softcap is None and self.sinks is None

    def shares(self, products: Tensor, bias: Tensor) -> Tensor:
        """What each query takes of L values, in float32 or wider, in the shape of ``products``.

        Args:
            products: [N, K, G, ..., L] of queries and keys, scaled.
            bias: 0 where a query sees a key, -inf elsewhere.
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
    """What an engine does with one layer's query, key and value."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend causally.

        Args:
            layer: the layer's index in the model, from 0.
            query: [N, H, T, D].
            key: [N, K, T, D], positions already applied.
            value: [N, K, T, E].
            scores: how these become shares.

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
    """The registered function; see the module's drawing.

    Raises:
        ModelError: the architecture asks for something this function does not compute.
    """
    del attention_mask, dropout  # rows are causal and the plan knows their seams; we never train with dropout
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
    """[N, H, T, E] causal attention over whole rows that start at position 0.

    So many keys ``before`` the first query's own belong to the same rows.

    On a CPU narrower types are computed in float32: forward and backward take a half to a quarter of the
    time there, and the result is more exact.
    """
    dtype, tokens, window = query.dtype, query.shape[2], scores.window
    if query.device.type == "cpu" and dtype.itemsize < 4:
        query, key, value = query.float(), key.float(), value.float()
    if scores.is_plain:
        is_whole = not before and (window is None or window >= tokens)
        mask = None if is_whole else _reach(tokens, before, window, query.device)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scores.scaling, enable_gqa=True
        ).to(dtype)
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups, *query.shape[2:]) * scores.scaling
    bias = torch.zeros(tokens, before + tokens, device=query.device)
    bias.masked_fill_(~_reach(tokens, before, window, query.device), -torch.inf)
    shares = scores.shares(grouped @ key[:, :, None].transpose(-1, -2), bias)
    return (shares.to(value.dtype) @ value[:, :, None]).flatten(1, 2).to(dtype)


def _reach(tokens: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """[T, before + T] which keys each token sees, of those before it and its own."""
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
    """Make ``attn_implementation="rillflow"`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)  # rows know their own seams
