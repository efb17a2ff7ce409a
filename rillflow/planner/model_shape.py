"""Model shape: the sizes of a decoder that decide what it costs, dense or a mixture of experts.

config.json ─> ModelShape ─> parameters, FLOPs a token, bytes of cache a token
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder by its sizes.

    Example:
        ModelShape(name="qwen2.5-7b", hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
                   inner=18944, vocabulary=152064)
    """

    name: str
    """What people call it."""
    hidden: int
    """Numbers of a token between layers."""
    layers: int
    """Decoder layers."""
    heads: int
    """Attention heads of a layer."""
    kv_heads: int
    """Heads of keys and values: fewer where queries are grouped."""
    head_dim: int
    """Numbers of one head."""
    inner: int
    """Numbers inside a dense feed-forward block."""
    vocabulary: int
    """Tokens it knows."""
    is_tied: bool = False
    """Whether the embedding serves as the head."""
    is_scalar: bool = False
    """Whether the head gives one number: critics, reward and cost models."""
    matrices: int = 3
    """Of a feed-forward block: 3 with a gate, 2 without."""
    experts: int = 0
    """Routed experts of a layer; 0 of a dense model."""
    experts_per_token: int = 0
    """Routed experts that compute a token."""
    expert_inner: int = 0
    """Numbers inside one expert."""
    shared_experts: int = 0
    """Experts that compute every token."""
    dense_layers: int = 0
    """Layers of a mixture whose feed-forward block is dense."""
    latent: int = 0
    """Numbers cached of a token and layer where attention is latent; 0: keys and values of all heads."""
    query_latent: int = 0
    """Numbers a query is made from where attention is latent."""
    value_dim: int = 0
    """Numbers of a value's head where they are others than a key's; 0: ``head_dim``."""
    rotary: int = 0
    """Numbers of a key that carry its place where attention is latent; the rest is made from the latent."""

    @property
    def is_mixture(self) -> bool:
        """Whether some layers choose among experts."""
        return self.experts > 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values, output; latent attention after DeepSeek-V2, 2405.04434, 2.1.

        Grouped: h (q + 2 kv) d + q d h. Latent: h q_l + q_l q d + h (l + r) + l q (d - r + v) + q v h.
        """
        width = self.heads * self.head_dim
        if not self.latent:
            return self.hidden * (width + 2 * self.kv_heads * self.head_dim) + width * self.hidden
        query = (
            self.hidden * self.query_latent + self.query_latent * width
            if self.query_latent
            else self.hidden * width
        )
        inner = self.latent - self.rotary
        made = inner * self.heads * (self.head_dim - self.rotary + self.value_width)
        return query + self.hidden * self.latent + made + self.heads * self.value_width * self.hidden

    @property
    def value_width(self) -> int:
        """Numbers of one value's head."""
        return self.value_dim or self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert of one layer."""
        return self.matrices * self.hidden * self.expert_inner

    @property
    def mixture_layers(self) -> int:
        """Layers that choose among experts."""
        return self.layers - self.dense_layers if self.is_mixture else 0

    @property
    def routed_parameters(self) -> int:
        """Of all routed experts of all layers: what is cut over ``ep``."""
        return self.mixture_layers * self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Of the table of tokens."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the last matrix product: a row per token it knows, or one."""
        return self.hidden if self.is_scalar else self.vocabulary * self.hidden

    @cached_property
    def trunk_parameters(self) -> int:
        """Of all layers but their routed experts; norms are left out: they are less than a thousandth."""
        dense = self.matrices * self.hidden * self.inner
        mixed = self.shared_experts * self.expert_parameters + self.hidden * self.experts
        blocks = (self.layers - self.mixture_layers) * dense + self.mixture_layers * mixed
        return self.layers * self.attention_parameters + blocks

    @cached_property
    def parameters(self) -> int:
        """All numbers to train; a tied head is counted once."""
        head = 0 if self.is_tied and not self.is_scalar else self.head_parameters
        return self.embedding_parameters + self.trunk_parameters + self.routed_parameters + head

    @cached_property
    def shared_parameters(self) -> int:
        """All but routed experts: what is cut over ``tp`` and ``pp`` alone."""
        return self.parameters - self.routed_parameters

    @cached_property
    def active_parameters(self) -> int:
        """That one token is multiplied with: the trunk, its experts and the head."""
        chosen = self.mixture_layers * self.experts_per_token * self.expert_parameters
        return self.trunk_parameters + chosen + self.head_parameters

    @cached_property
    def cached_numbers(self) -> int:
        """Keys and values of one token in all layers, or its latents."""
        return self.layers * (self.latent or self.kv_heads * (self.head_dim + self.value_width))

    @property
    def token_flops(self) -> float:
        """FLOPs of the matrix products of one token, forward: 2 for each active parameter."""
        return 2.0 * self.active_parameters

    def attention_flops(self, context_tokens: float) -> float:
        """FLOPs of one token that attends to so many: 2 (d + v) for each head, layer and token seen."""
        return 2.0 * self.layers * self.heads * (self.head_dim + self.value_width) * context_tokens

    def read_parameters(self, rows: float) -> float:
        """Parameters one step of decoding reads: the trunk, the head, and the experts that rows chose.

        An expert is chosen by none of n rows with probability (1 - k / E)^n when all are as likely.
        """
        if not self.is_mixture:
            return float(self.trunk_parameters + self.head_parameters)
        missed = float((1.0 - self.experts_per_token / self.experts) ** rows)
        return self.trunk_parameters + self.head_parameters + (1.0 - missed) * self.routed_parameters
