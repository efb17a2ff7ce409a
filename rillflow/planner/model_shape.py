"""Model shape: the sizes of a decoder that decide what it costs, dense or a mixture of experts.

config.json ─> ModelShape ─> parameters, FLOPs a token, bytes of cache a token
"""

from __future__ import annotations

from dataclasses import dataclass


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
