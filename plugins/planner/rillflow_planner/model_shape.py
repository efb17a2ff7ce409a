"""Model shape: the sizes of a decoder that determine its cost, for dense models and mixtures of experts.

config.json ─> ModelShape ─> parameters, FLOPs per token, bytes of KV cache per token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from rillflow.errors import PlanError, nearest
from rillflow.placement.grid import Numbers
from rillflow.placement.tables import YES, checked, whole

_MOST = 100_000_000
"""Largest accepted size."""
KNOWN = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "phi3", "gemma", "gemma2", "olmo2", "smollm3"),
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"),
)
"""Model types whose config names its sizes as expected here."""
_TYPE = checked(
    lambda kind: kind if kind in KNOWN else None,
    "the planner does not know the cost of this model type; known types are " + ", ".join(KNOWN),
    known=KNOWN,
)
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder model.

    Example:
        ModelShape(name="qwen2.5-7b", hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
                   inner=18944, vocabulary=152064)
    """

    name: str
    """Name of the model."""
    hidden: int
    """Hidden size."""
    layers: int
    """Number of decoder layers."""
    heads: int
    """Number of attention heads per layer."""
    kv_heads: int
    """Number of key and value heads; fewer than ``heads`` with grouped queries."""
    head_dim: int
    """Size of one head."""
    inner: int
    """Intermediate size of a dense feed-forward block."""
    vocabulary: int
    """Vocabulary size."""
    is_tied: bool = False
    """Whether embedding and head share their weights."""
    is_scalar: bool = False
    """Whether the head returns one number: critics, reward and cost models."""
    matrices: int = 3
    """Weight matrices of a feed-forward block: 3 with a gate, 2 without."""
    experts: int = 0
    """Number of routed experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Number of routed experts per token."""
    expert_inner: int = 0
    """Intermediate size of one expert."""
    shared_experts: int = 0
    """Number of experts that compute every token."""
    dense_layers: int = 0
    """Number of layers with a dense feed-forward block in a mixture of experts."""
    latent: int = 0
    """Cached numbers per token and layer with latent attention; 0: keys and values of all heads."""
    query_latent: int = 0
    """Rank of the query projection with latent attention."""
    value_dim: int = 0
    """Size of a value head if it differs from a key head; 0: ``head_dim``."""
    rotary: int = 0
    """Rotary dimensions of a key with latent attention; the other dimensions come from the latent."""

    @property
    def is_mixture(self) -> bool:
        """Whether some layers route tokens to experts."""
        return self.experts > 0

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer: query, key, value and output projections.

        Grouped: h (q + 2 kv) d + q d h. Latent: h q_l + q_l q d + h (l + r) + l q (d - r + v) + q v h, after
        DeepSeek-V2, 2405.04434, 2.1.
        """
        width = self.heads * self.head_dim
        if not self.latent:
            return self.hidden * (width + 2 * self.kv_heads * self.head_dim) + width * self.hidden
        query = (self.hidden + width) * self.query_latent or self.hidden * width
        inner = self.latent - self.rotary
        made = inner * self.heads * (self.head_dim - self.rotary + self.value_width)
        return query + self.hidden * self.latent + made + self.heads * self.value_width * self.hidden

    @property
    def value_width(self) -> int:
        """Size of one value head."""
        return self.value_dim or self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        return self.matrices * self.hidden * self.expert_inner

    @property
    def mixture_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.layers - self.dense_layers if self.is_mixture else 0

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of all layers, which ``ep`` shards."""
        return self.mixture_layers * self.experts * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head: one row per vocabulary entry, or a single row."""
        return self.hidden if self.is_scalar else self.vocabulary * self.hidden

    @cached_property
    def trunk_parameters(self) -> int:
        """Parameters of all layers without routed experts and without norms (less than a thousandth)."""
        dense = self.matrices * self.hidden * self.inner
        mixed = self.shared_experts * self.expert_parameters + self.hidden * self.experts
        blocks = (self.layers - self.mixture_layers) * dense + self.mixture_layers * mixed
        return self.layers * self.attention_parameters + blocks

    @cached_property
    def parameters(self) -> int:
        """All trainable parameters; a tied head counts once."""
        head = 0 if self.is_tied and not self.is_scalar else self.head_parameters
        return self.vocabulary * self.hidden + self.trunk_parameters + self.routed_parameters + head

    @cached_property
    def shared_parameters(self) -> int:
        """Parameters outside routed experts, which ``ep`` does not shard."""
        return self.parameters - self.routed_parameters

    @property
    def chosen_parameters(self) -> int:
        """Parameters of the routed experts that compute one token, in all layers."""
        return self.mixture_layers * self.experts_per_token * self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: the trunk, its experts and the head."""
        return self.trunk_parameters + self.chosen_parameters + self.head_parameters

    @cached_property
    def cached_numbers(self) -> int:
        """Cached numbers of one token in all layers: keys and values, or latents."""
        return self.layers * (self.latent or self.kv_heads * (self.head_dim + self.value_width))

    @property
    def token_flops(self) -> float:
        """FLOPs of the matrix products of one token, forward: 2 per active parameter."""
        return 2.0 * self.active_parameters

    def attention_flops(self, context_tokens: float) -> float:
        """Return attention FLOPs of one token: 2 (d + v) per head, layer and context token."""
        return 2.0 * self.layers * self.heads * (self.head_dim + self.value_width) * context_tokens

    def layer_numbers(self, tp: Numbers) -> Numbers:
        """Return the activations that one token keeps in one layer for the backward pass.

        6 h for norms and residuals; queries, keys, values, output and the feed-forward block over tp
        (Korthikanti et al., arXiv 2205.05198, 4, without the square terms that FlashAttention avoids).
        """
        kept = self.heads * (self.head_dim + self.value_width) + 2 * self.kv_heads * self.head_dim
        return np.add(6 * self.hidden, np.divide(kept + self.matrices * self.layer_inner, tp))

    @property
    def layer_inner(self) -> float:
        """Inner states of one token in a layer: those of its experts, with the copies sent to them."""
        if not self.is_mixture:
            return self.inner
        chosen = self.experts_per_token + self.shared_experts
        return chosen * (self.expert_inner + 2 * self.hidden / self.matrices)


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read the shape from the content of a Hugging Face ``config.json``.

    Supported are Llama, Mistral, Qwen2 and Qwen3 by their common names, GPT-2 by its own names, mixtures of
    Qwen3, Mixtral and DeepSeek, and DeepSeek's latent attention.

    Raises:
        PlanError: a needed field is missing, or holds zero or an implausible value.
    """
    _TYPE(config.get("model_type", "llama"), f"the config of {name}: model_type")
    size = partial(_size, config, name)
    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head")
    layers, is_plain = size("num_hidden_layers", "n_layer", "num_layers"), "n_embd" in config
    inner = size("n_inner", default=4 * hidden) if is_plain else size("intermediate_size", "n_inner")
    kv_heads = size("num_key_value_heads", default=heads)
    _part(name, heads, kv_heads, "num_key_value_heads")
    latent, experts = size("kv_lora_rank", default=0), size(*_EXPERTS, default=0)
    rotary = size("qk_rope_head_dim", default=0) if latent else 0
    if latent:
        head_dim = size("qk_nope_head_dim") + rotary
    else:
        head_dim = size("head_dim", default=0) or _part(name, hidden, heads, "num_attention_heads")
    tied = config.get("tie_word_embeddings", is_plain)
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=size("vocab_size"),
        is_tied=YES(tied, f"the config of {name}: tie_word_embeddings"),
        matrices=2 if is_plain else 3,
        experts=experts,
        experts_per_token=size("num_experts_per_tok", most=experts) if experts else 0,
        expert_inner=size("moe_intermediate_size", default=inner) if experts else 0,
        shared_experts=size("n_shared_experts", default=0) if experts else 0,
        dense_layers=size("first_k_dense_replace", default=0, most=layers) if experts else 0,
        latent=latent + rotary,
        query_latent=size("q_lora_rank", default=0) if latent else 0,
        value_dim=size("v_head_dim") if latent else 0,
        rotary=rotary,
    )


def _size(
    config: Mapping[str, Any], name: str, *names: str, default: int | None = None, most: int = _MOST
) -> int:
    """Return the size under the first name in the config; the default if all are missing, null or 0."""
    absent = (None,) if default is None else (None, 0)
    known = next((one for one in names if config.get(one) not in absent), None)
    if known is None and default is not None:
        return default
    if known is None:
        raise PlanError(
            f"the config of {name} has no {names[0]}",
            why="the planner needs it to compute the cost of the model",
            fix=f"add it, or one of {', '.join(names)}; {nearest(names[0], config)}",
        )
    found: int = whole(1, most)(config[known], f"the config of {name}: {known}")
    return found


def _part(name: str, size: int, parts: int, what: str) -> int:
    """Return one of the equal parts of a size."""
    if size % parts:
        why = f"it must divide {size}; {size} / {parts} leaves {size % parts}"
        raise PlanError(f"the config of {name} has {what} = {parts}", why=why)
    return size // parts
