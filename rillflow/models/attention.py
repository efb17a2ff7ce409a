"""The one attention function every model is built with, and the seam engines plug into.

    transformers module ── query, key, value ──> rillflow attention ── attention_plan ──> an engine's own
                                                        └────────── no plan ───────────> plain causal SDPA

A module stays unmodified: this function is registered with the library's public attention
interface, and an engine passes an ``AttentionPlan`` as one more keyword of ``module(...)``.

Legend: N batch, H query heads, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rillflow.errors import ModelError

ATTENTION = "rillflow"


class AttentionPlan(Protocol):
    """What an engine does with one layer's query, key and value."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend causally.

        Args:
            layer: the layer's index in the model, from 0.
            query: [N, H, T, D].
            key: [N, K, T, D], positions already applied, as ``value``.
            value: [N, K, T, D].
            scaling: factor on query times key.
            window: how many tokens back a token sees, itself included; None for all.

        Returns:
            [N, T, H, D].
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
    **rest: Any,
) -> tuple[Tensor, None]:
    """The registered function; see the module's drawing.

    Raises:
        ModelError: the architecture asks for something this function does not compute.
    """
    del attention_mask, dropout  # rows are causal and the plan knows their seams; we never train with dropout
    _refuse_unknown(rest)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if attention_plan is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        return attention_plan.attend(layer, query, key, value, scale, sliding_window), None
    return causal(query, key, value, scale, sliding_window).transpose(1, 2), None


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """[N, H, T, D] plain causal attention over whole rows that start at position 0.

    On a CPU narrower types are computed in float32: forward and backward take a half to a quarter of the
    time there, and the result is more exact.
    """
    dtype, tokens = query.dtype, query.shape[2]
    if query.device.type == "cpu" and dtype.itemsize < 4:
        query, key, value = query.float(), key.float(), value.float()
    mask = None
    if window is not None and window < tokens:
        reach = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        mask = reach.triu(1 - window)
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    ).to(dtype)


def _refuse_unknown(rest: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if rest.get(name) is not None:
            raise ModelError(
                f"the model's attention uses {name!r}",
                why="Rillflow's attention is a scaled dot product, causal, with or without a sliding window",
                fix="choose a model without it",
            )


def register() -> None:
    """Make ``attn_implementation="rillflow"`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)  # rows know their own seams
