"""A small new decoder: any causal type of transformers, with random weights.

NewModel ─ sizes ─> config, by the type's own names ─ seed ─> module, with logits or a scalar head
                                                              weights: drawn when they are read
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rillflow.errors import ModelError, nearest
from rillflow.models.architecture import built_with, causal_class, scalar_class
from rillflow.models.config import NewModel, misfits
from rillflow.models.lazy_weights import Drawing, Source, taken_out
from rillflow.models.scalar_head import require_one_number, start_head

_FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
"""Names of the feed-forward size in configs; the first that a type has is used."""
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
_INIT_STD = ("initializer_range", "init_std")
"""Names of the initial weights' standard deviation in configs."""
_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
"""Limits for a small mixture of experts; a type's default of 128 experts would dwarf its other weights."""


def new_module(
    new: NewModel, *, vocabulary: int, seed: int, dtype: torch.dtype, is_scalar: bool
) -> tuple[PreTrainedModel, Source]:
    """Return a module on the meta device; its weights depend only on settings, vocabulary and seed.

    Args:
        new: its sizes.
        vocabulary: number of tokens.
        seed: seed of its weights.
        dtype: dtype of its weights.
        is_scalar: whether it has a scalar head in place of logits.

    Raises:
        ModelError: the type is unknown or not supported, or its sizes do not fit together.
    """
    config = _config(new, vocabulary)
    kind, made = AutoModelForCausalLM, causal_class(config)
    if is_scalar:
        kind, made = AutoModelForSequenceClassification, scalar_class(config)
        require_one_number(config)
    with torch.random.fork_rng(devices=[]), Drawing() as drawing:
        torch.default_generator.manual_seed(seed)
        module: PreTrainedModel = kind.from_config(
            config, attn_implementation=built_with(made, config), dtype=torch.float32
        )
        if is_scalar:
            start_head(module)
    return module.eval(), taken_out(module, dtype, drawing.drawn)


def _config(new: NewModel, vocabulary: int) -> PreTrainedConfig:
    if new.architecture not in CONFIG_MAPPING:
        raise ModelError(
            f"policy.model.new.architecture is {new.architecture!r}",
            why="transformers has no model type of this name",
            fix=nearest(new.architecture, CONFIG_MAPPING.keys()),
        )
    kind = CONFIG_MAPPING[new.architecture]
    try:
        return kind(**_settings(new, vocabulary, kind))
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ModelError(
            f"a {new.architecture} cannot have hidden {new.hidden}, layers {new.layers}, heads {new.heads}",
            why=str(error).strip().splitlines()[-1].strip(),
            fix="change the sizes, or choose another architecture",
        ) from error


def _settings(new: NewModel, vocabulary: int, kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the config's arguments under names that the type has, directly or in its ``attribute_map``."""
    for misfit in misfits(new):
        raise ModelError(misfit.what, misfit.why, misfit.fix)
    own = kind().to_dict()
    known = set(own) | set(kind.attribute_map)
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": new.hidden,
        "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads,
        "max_position_embeddings": new.context,
    }
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ModelError(
            f"policy.model.new.architecture is {new.architecture!r}",
            why=f"its config has no {unknown[0]}, so it is not a plain decoder",
            fix="choose qwen2, llama, qwen3, gpt2 or another decoder",
        )
    settings |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    if new.init_std is not None:
        named = [name for name in _INIT_STD if name in known]
        if not named:
            raise ModelError(
                f"policy.model.new.init_std is {new.init_std:g}",
                why=f"the config of a {new.architecture} has none of {', '.join(_INIT_STD)}",
                fix="leave init_std out",
            )
        settings[named[0]] = new.init_std
    for name in [name for name in _FEED_FORWARD if name in known][:1]:
        settings[name] = new.intermediate
    settings |= {name: min(own[name], most) for name, most in _EXPERTS.items() if own.get(name)}
    settings |= {name: new.intermediate for name in _EXPERT_WIDTHS if own.get(name)}
    if "head_dim" in known:
        settings["head_dim"] = new.hidden // new.heads
    if "num_key_value_heads" in known:
        settings["num_key_value_heads"] = new.kv_heads
    elif new.kv_heads != new.heads:
        raise ModelError(
            f"policy.model.new.kv_heads is {new.kv_heads} and heads is {new.heads}",
            why=f"every head of a {new.architecture} has its own keys and values",
            fix=f"set kv_heads = {new.heads}",
        )
    return settings
