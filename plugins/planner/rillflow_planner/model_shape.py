"""Model shape: the sizes of a decoder that determine its cost, for dense models and mixtures of experts.

config.json ─ model_config ─> ModelShape ─> parameters, FLOPs per token, bytes of KV cache per token
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rillflow.placement.grid import Numbers


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
    shared_inner: int = 0
    """Intermediate size of one shared expert if it differs from a routed one; 0: ``expert_inner``."""
    expert_width: int = 0
    """Size of the tokens that routed experts compute, if it differs from the hidden size; 0: ``hidden``."""
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
    gates_queries: bool = False
    """Whether the query projection also returns a gate for every number of the heads' output."""
    windowed_layers: int = 0
    """Number of layers that attend to at most ``window`` tokens."""
    window: int = 0
    """Tokens that a windowed layer attends to."""
    linear_layers: int = 0
    """Number of layers that mix tokens by a recurrent state: linear attention or a state-space model."""
    linear_parameters: int = 0
    """Parameters of the projections of one such layer."""
    linear_state: int = 0
    """Numbers of a row's recurrent state in one such layer."""
    unattended_layers: int = 0
    """Number of layers without attention over tokens; they are linear, or only a feed-forward block."""
    unfed_layers: int = 0
    """Number of layers without a feed-forward block."""
    vectors: int = 0
    """Parameters of the whole model outside matrices: norms, biases, convolutions, sinks, positions."""
    keeps_attention: bool = False
    """Whether Rillflow's attention cannot replace the model's: some layers have a state, or attend in chunks.
    """
    excluded: str = ""
    """Part of the config that is not counted, such as a vision encoder."""

    @property
    def is_mixture(self) -> bool:
        """Whether some layers route tokens to experts."""
        return self.experts > 0

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer: query, key, value and output projections.

        Grouped: h (q + 2 kv) d + q d h, and h q d for a gate. Latent: h q_l + q_l q d + h (l + r)
        + l q (d - r + v) + q v h, after DeepSeek-V2, 2405.04434, 2.1.
        """
        width = self.heads * self.head_dim
        if not self.latent:
            projected = (1 + self.gates_queries) * width + 2 * self.kv_heads * self.head_dim
            return self.hidden * projected + width * self.hidden
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
        return self.matrices * (self.expert_width or self.hidden) * self.expert_inner

    @property
    def attending_layers(self) -> int:
        """Number of layers with attention over tokens."""
        return self.layers - self.unattended_layers

    @property
    def mixture_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.layers - self.unfed_layers - self.dense_layers if self.is_mixture else 0

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
        """Parameters of the matrices of all layers without routed experts."""
        dense = self.matrices * self.hidden * self.inner
        shared = self.shared_experts * self.matrices * self.hidden * (self.shared_inner or self.expert_inner)
        mixed = shared + self.hidden * (self.experts + 2 * self.expert_width)
        blocks = (self.layers - self.unfed_layers - self.mixture_layers) * dense + self.mixture_layers * mixed
        mixers = self.attending_layers * self.attention_parameters
        return mixers + self.linear_layers * self.linear_parameters + blocks

    @cached_property
    def parameters(self) -> int:
        """All trainable parameters; a tied head counts once."""
        head = 0 if self.is_tied and not self.is_scalar else self.head_parameters
        layers = self.trunk_parameters + self.routed_parameters + self.vectors
        return self.vocabulary * self.hidden + layers + head

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

    def seen_layers(self, context_tokens: Numbers = 0) -> Numbers:
        """Return the attending layers; a windowed one counts by the part of this context that it sees."""
        if not self.windowed_layers:
            return self.attending_layers
        hidden_part = 1.0 - np.minimum(1.0, self.window / np.maximum(context_tokens, 1.0))
        return self.attending_layers - self.windowed_layers * hidden_part

    @cached_property
    def layer_cache(self) -> int:
        """Cached numbers of one token in one attending layer: keys and values, or a latent."""
        return self.latent or self.kv_heads * (self.head_dim + self.value_width)

    @property
    def cached_numbers(self) -> int:
        """Cached numbers of one token in all attending layers, before it leaves a window."""
        return self.attending_layers * self.layer_cache

    def cache_numbers(self, context_tokens: float) -> float:
        """Return the cached numbers of a row with this context, per token: windows end, states stay."""
        states = self.linear_layers * self.linear_state / max(context_tokens, 1.0)
        return float(self.seen_layers(context_tokens)) * self.layer_cache + states

    @property
    def token_flops(self) -> float:
        """FLOPs of one token outside attention, forward: 2 per active parameter, 6 per number of a state.

        A recurrent state decays, is corrected by the token, and is read (gated delta rule, arXiv 2412.06464).
        """
        return 2.0 * self.active_parameters + 6.0 * self.linear_layers * self.linear_state

    def attention_flops(self, pairs: Numbers, context_tokens: Numbers = 0) -> Numbers:
        """Return the FLOPs of pairs of tokens in attention: 2 (d + v) per head, layer and pair.

        ``context_tokens`` is the mean context of a token, of which a windowed layer sees a part.
        """
        layers = self.seen_layers(context_tokens)
        return 2.0 * layers * self.heads * (self.head_dim + self.value_width) * pairs

    def layer_numbers(self, tp: Numbers) -> Numbers:
        """Return the activations that one token keeps in one layer for the backward pass.

        6 h for norms and residuals; queries, keys, values, output and the feed-forward block over tp
        (Korthikanti et al., arXiv 2205.05198, 4, without the square terms that FlashAttention avoids).
        """
        attention = self.heads * (self.head_dim + self.value_width) + 2 * self.kv_heads * self.head_dim
        linear = self.linear_layers * self.linear_parameters / self.hidden
        blocks = (self.layers - self.unfed_layers) * self.matrices * self.layer_inner
        kept = (self.attending_layers * attention + linear + blocks) / self.layers
        return np.add(6 * self.hidden, np.divide(kept, tp))

    @property
    def layer_inner(self) -> float:
        """Inner states of one token in a layer: those of its experts, with the copies sent to them."""
        if not self.is_mixture:
            return self.inner
        chosen = self.experts_per_token + self.shared_experts
        wider = self.shared_experts * ((self.shared_inner or self.expert_inner) - self.expert_inner)
        return chosen * (self.expert_inner + 2 * self.hidden / self.matrices) + wider
