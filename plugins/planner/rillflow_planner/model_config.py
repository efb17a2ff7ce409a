"""Model config: read the shape of a model from its config.json, for the types of model_types.toml.

config.json ─┐
model types ─┴─ kinds of layers, experts, states, vectors ─> ModelShape
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from rillflow.errors import PlanError, nearest
from rillflow.placement.tables import YES, whole
from rillflow_planner.model_shape import ModelShape

_MOST = 100_000_000
"""Largest accepted size."""
_MOST_LAYERS = 10_000
"""Largest accepted number of layers."""
_FULL, _LINEAR, _SLIDING, _CHUNKED = (
    f"{kind}_attention" for kind in ("full", "linear", "sliding", "chunked")
)
_KINDS = (_FULL, _LINEAR, _SLIDING, _CHUNKED, "moe", "mlp")
"""Known kinds of layers; the last two are only a feed-forward block."""
_LETTERS = {"M": _LINEAR, "*": _FULL, "E": "moe", "-": "mlp", "mamba": _LINEAR, "attention": _FULL}
"""Other names of kinds of layers."""


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read the shape from the content of a Hugging Face ``config.json``.

    ``model_types.toml`` has the supported model types. Of a model for text and pictures, the language model
    is counted.

    Raises:
        PlanError: an unknown model type; a needed field is missing, or holds zero or an implausible value.
    """
    text = config.get("text_config")
    outer = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
    read = _Config(name, {**outer, **text} if isinstance(text, Mapping) else config)
    hidden, heads = read.size("hidden_size", "n_embd", "d_model"), read.size("num_attention_heads", "n_head")
    kinds = read.layer_kinds()
    kv_heads = read.size("num_key_value_heads", default=heads)
    _part(name, heads, kv_heads, "num_key_value_heads")
    latent = read.size("kv_lora_rank", default=0)
    experts = read.size("n_routed_experts", "num_local_experts", "num_experts", default=0)
    rotary = read.size("qk_rope_head_dim", default=0) if latent else 0
    if latent:
        head_dim = read.size("qk_nope_head_dim") + rotary
    else:
        head_dim = read.size("head_dim", default=0) or _part(name, hidden, heads, "num_attention_heads")
    mixed = read.mixture_layers(kinds) if experts else 0
    unfed = sum(kind in (_FULL, _LINEAR) for kind in kinds) if read.has_blocks else 0
    window, chunk = read.size("sliding_window", default=0), read.size("attention_chunk_size", default=0)
    shape = ModelShape(
        name=name,
        hidden=hidden,
        layers=len(kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=read.inner(hidden, has_dense=len(kinds) > mixed + unfed),
        vocabulary=read.size("vocab_size"),
        is_tied=read.flag("tie_word_embeddings"),
        matrices=read.kind.get("matrices", 3),
        latent=latent + rotary,
        query_latent=read.size("q_lora_rank", default=0) if latent else 0,
        value_dim=read.size("v_head_dim") if latent else 0,
        rotary=rotary,
        gates_queries=read.kind.get("gates_queries", False),
        windowed_layers=sum(kind in (_SLIDING, _CHUNKED) for kind in kinds),
        window=chunk // 2 if _CHUNKED in kinds else window,
        linear_layers=kinds.count(_LINEAR),
        unattended_layers=sum(kind in (_LINEAR, "moe", "mlp") for kind in kinds),
        unfed_layers=unfed,
        keeps_attention=not {_LINEAR, _CHUNKED}.isdisjoint(kinds),
        excluded="the encoder of pictures" if text is not None else "",
    )
    shape = read.with_experts(shape, mixed, experts) if mixed else shape
    shape = read.with_states(shape) if shape.linear_layers else shape
    return replace(shape, vectors=shape.vectors + read.vectors(shape))


@cache
def model_types() -> dict[str, dict[str, Any]]:
    """Return what is known of every supported model type, by its name in ``config.json``."""
    found = tomllib.loads(files("rillflow_planner").joinpath("model_types.toml").read_text("utf-8"))
    return {name: found[kind["as"]] if "as" in kind else kind for name, kind in found.items()}


class _Config:
    """Sizes of a config.json, with the defaults of its model type."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        kind = config.get("model_type", "gpt2" if "n_embd" in config else "llama")
        if not isinstance(kind, str) or kind not in model_types():
            raise PlanError(
                f"the config of {name}: model_type is {kind!r}",
                why="the planner does not know what the layers of this model type compute; it knows "
                + ", ".join(model_types()),
                fix="plan a model of a known type; a similar name may mean other layers, so none is proposed",
            )
        self.name, self.kind = name, model_types()[kind]
        self.values = {**self.kind.get("defaults", {}), **{key: config[key] for key in config}}

    def size(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """Return the size under the first name in the config; the default if all are missing, null or 0."""
        absent = (None,) if default is None else (None, 0)
        known = next((one for one in names if self.values.get(one) not in absent), None)
        if known is None and default is not None:
            return default
        if known is None:
            raise PlanError(
                f"the config of {self.name} has no {names[0]}",
                why="the planner needs it to compute the cost of the model",
                fix=f"add it, or one of {', '.join(names)}; {nearest(names[0], self.values)}",
            )
        found: int = whole(1, most)(self.values[known], f"the config of {self.name}: {known}")
        return found

    def flag(self, key: str) -> bool:
        """Return a setting that is true or false; false if it is missing or null."""
        value = self.values.get(key)
        return value is not None and bool(YES(value, f"the config of {self.name}: {key}"))

    def names(self, key: str) -> list[Any]:
        """Return a list of the config; empty if it is missing or null."""
        value = self.values.get(key)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(one, str | int) for one in value)
        ):
            raise PlanError(
                f"the config of {self.name}: {key} is {value!r}", why="it must be a list of names or numbers"
            )
        return value or []

    @property
    def has_blocks(self) -> bool:
        """Whether feed-forward blocks are layers of their own."""
        return bool(self.values.get("layers_block_type") or self.values.get("hybrid_override_pattern"))

    def layer_kinds(self) -> list[str]:
        """Return the kind of every layer, listed or every nth; a window that is not set is no window."""
        listed = self.names("layers_block_type") or self.names("layer_types")
        pattern = str(self.values.get("hybrid_override_pattern") or "").replace("|", "")
        kinds = [_LETTERS.get(kind, kind) for kind in listed or pattern]
        names = ("num_hidden_layers", "n_layer", "num_layers")
        layers = len(kinds) if self.has_blocks else self.size(*names, most=_MOST_LAYERS)
        if not kinds:
            other, interval = self.kind.get("other", _FULL), self.kind.get("interval", "")
            every = self.size(interval, "interval", default=layers + 1)
            first = self.size("max_window_layers", default=0) if self.values.get("use_sliding_window") else 0
            kinds = [other if (at + 1) % every and at >= first else _FULL for at in range(layers)]
        wrong = next((kind for kind in kinds if kind not in _KINDS), None)
        if wrong is not None or len(kinds) != layers:
            raise PlanError(
                f"the config of {self.name} has {layers} layers, of the kinds "
                + ", ".join(sorted(map(str, {*kinds}))),
                why=f"{wrong} is unknown" if wrong else f"kinds are listed for {len(kinds)} layers",
                fix=f"list one of {', '.join(_KINDS)} for every layer",
            )
        has_window = self.size("sliding_window", default=0) and self.values.get("use_sliding_window", True)
        return [_FULL if kind == _SLIDING and not has_window else kind for kind in kinds]

    def mixture_layers(self, kinds: Sequence[str]) -> int:
        """Return the number of layers with routed experts."""
        layers = len(kinds)
        if self.has_blocks:
            return kinds.count("moe")
        if self.values.get("moe_layers") is not None:
            return len(self.names("moe_layers"))
        every = self.size("decoder_sparse_step", "interleave_moe_layer_step", default=1)
        first = self.size("first_k_dense_replace", default=0, most=layers)
        dense = {*self.names("mlp_only_layers"), *range(first)}
        return sum((place + 1) % every == 0 and place not in dense for place in range(layers))

    def inner(self, hidden: int, *, has_dense: bool) -> int:
        """Return the intermediate size of a dense block; GPT-2 leaves out four times the hidden size."""
        default = 4 * hidden if "n_embd" in self.values else None
        names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "moe_intermediate_size")
        return self.size(*names[: 3 if has_dense else 4], default=default)

    def with_experts(self, shape: ModelShape, layers: int, experts: int) -> ModelShape:
        """Return the shape with routed experts in so many layers."""
        shared = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
        return replace(
            shape,
            experts=experts,
            experts_per_token=self.size("num_experts_per_tok", "experts_per_token", most=experts),
            expert_inner=self.size("moe_intermediate_size", "intermediate_size"),
            shared_experts=self.size("n_shared_experts", default=0),
            shared_inner=self.size(*shared, default=0),
            expert_width=self.size("moe_latent_size", default=0),
            dense_layers=shape.layers - shape.unfed_layers - layers,
        )

    def with_states(self, shape: ModelShape) -> ModelShape:
        """Return the shape with its layers that mix tokens by a state: gated delta rule or Mamba-2.

        Yang et al., arXiv 2412.06464; Dao and Gu, arXiv 2405.21060.
        """
        hidden, is_mamba = shape.hidden, "mamba_num_heads" in self.values
        heads = self.size("mamba_num_heads" if is_mamba else "linear_num_value_heads")
        value = self.size("mamba_head_dim" if is_mamba else "linear_value_head_dim")
        key = self.size("ssm_state_size" if is_mamba else "linear_key_head_dim")
        width, groups = heads * value, self.size("n_groups" if is_mamba else "linear_num_key_heads")
        mixed = width + 2 * groups * key
        vectors = mixed * self.size("conv_kernel" if is_mamba else "linear_conv_kernel_dim")
        if is_mamba:
            vectors += 3 * heads + width + mixed * self.flag("use_conv_bias")
            vectors += (width + mixed + heads + hidden) * self.flag("use_bias")
        else:
            vectors += 2 * heads + value
        return replace(
            shape,
            linear_parameters=hidden * (mixed + width + heads * (1 if is_mamba else 2)) + width * hidden,
            linear_state=width * key,
            vectors=shape.linear_layers * vectors,
        )

    def vectors(self, shape: ModelShape) -> int:
        """Return the parameters outside matrices, without those of linear layers: norms, biases, sinks."""
        norms: int = self.kind.get("norms", 2) * shape.layers + self.kind.get("final", 1)
        norms += self.size("n_positions", default=0) if "n_embd" in self.values else 0
        dense = shape.layers - shape.unfed_layers - shape.mixture_layers
        return (
            norms * shape.hidden
            + shape.attending_layers * self._attention_vectors(shape)
            + dense * self._block_biases(shape, shape.inner)
            + shape.mixture_layers * self._expert_vectors(shape)
        )

    def _attention_vectors(self, shape: ModelShape) -> int:
        """Return the norms, biases and sinks of attention in one layer."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        norms = {"head": 2 * shape.head_dim, "whole": queries + keys}
        named = self.kind.get("head_norms", "head" if self.values.get("use_qk_norm") else "")
        named = "" if "attention_chunk_size" in self.values else named  # Llama 4 has norms without weights
        found: int = shape.heads * self.kind.get("sinks", False) + norms.get(named, 0)
        biases = {"q": queries * (1 + shape.gates_queries), "kv": 2 * keys, "o": shape.hidden}
        if shape.latent:
            found += shape.query_latent + shape.latent - shape.rotary
            biases |= {"q": shape.query_latent, "kv": shape.latent}
        biased = self.kind.get("bias", "qkvo") if self.flag("attention_bias") else ""
        return found + sum(size for part, size in biases.items() if part in biased)

    def _block_biases(self, shape: ModelShape, inner: int) -> int:
        return self.flag("mlp_bias") * ((shape.matrices - 1) * inner + shape.hidden)

    def _expert_vectors(self, shape: ModelShape) -> int:
        """Return the biases of router and experts, and the gate of shared experts, of one layer."""
        shared = shape.shared_experts * (shape.shared_inner or shape.expert_inner)
        found: int = shape.hidden * self.kind.get("shared_gate", False)
        found += self._block_biases(shape, shared) if shared else 0
        found += self.flag("mlp_bias") * (shape.expert_width + shape.hidden) if shape.expert_width else 0
        biases = 1 + (shape.matrices - 1) * shape.expert_inner + shape.hidden
        found += shape.experts * biases * self.kind.get("expert_bias", False)
        return found


def _part(name: str, size: int, parts: int, what: str) -> int:
    """Return one of the equal parts of a size."""
    if size % parts:
        why = f"it must divide {size}; {size} / {parts} leaves {size % parts}"
        raise PlanError(f"the config of {name} has {what} = {parts}", why=why)
    return size // parts
