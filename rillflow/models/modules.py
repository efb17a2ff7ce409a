"""Modules: a small new decoder, or a Hugging Face directory or hub name, checked before it is loaded.

    NewModel ─ sizes ─> config, by the type's own names ─ seed ─> module, with logits or a scalar head
                                                                  weights: drawn when they are read
    directory | hub name ─ config: a decoder? ─> weights: safetensors, complete? ─> module, unread
                                  └─ with a scalar head, or without: then the head is new

Nothing in a directory is executed: no custom code, no pickle.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rillflow.errors import ModelError, nearest
from rillflow.models.architecture import (
    built_with,
    causal_class,
    head_weights,
    require_one_number,
    scalar_class,
    start_head,
)
from rillflow.models.config import NewModel, misfits
from rillflow.models.directory_checks import (
    LIBRARY_ERRORS,
    check_files,
    check_sizes,
    check_weight_files,
    end_tokens,
    refuse_quantised,
    settings_in,
    unusable,
)
from rillflow.models.lazy_weights import Drawing, Source, taken_out, unread_weights

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
    config = _new_config(new, vocabulary)
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


def _new_config(new: NewModel, vocabulary: int) -> PreTrainedConfig:
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


def load_module(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model with unread weights (``models.unread``).

    Raises:
        ModelError: the directory has no supported model, or lacks weights.
    """
    config = _read_config(source)
    kind = causal_class(config)
    wanted = kind.__name__
    declared = config.architectures or [wanted]
    if wanted not in declared:
        raise ModelError(
            f"the model {source} is a {declared[0]}",
            why=f"loaded as a {wanted}, some of its weights would be random, or unused",
            fix="name a checkpoint of a causal language model",
        )
    module, missing = _weights(source, config, kind, dtype)
    _refuse_missing(source, module, missing)
    return module


def load_scalar_module(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a decoder with a scalar head, with unread weights except those of a new head.

    A causal language model gets a new head in place of its logits. A directory with a head keeps it, and its
    class: ForTokenClassification has a bias that ForSequenceClassification would drop.

    Raises:
        ModelError: as ``load_module``; or the head has more than one label.
    """
    config = _read_config(source)
    causal, scalar = causal_class(config).__name__, scalar_class(config).__name__
    heads: dict[str, Any] = {scalar: scalar_class(config)}
    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]
        heads[kind.__name__] = kind
    declared = (config.architectures or [causal])[0]
    if declared != causal and declared not in heads:
        raise ModelError(
            f"the model {source} is a {declared}",
            why=f"a scalar head is added to a {causal}, or loaded from a {' or a '.join(heads)}",
            fix="name a causal language model, or a checkpoint that has a head of one label",
        )
    if declared in heads and config.num_labels != 1:
        raise ModelError(
            f"the head of the model {source} returns {config.num_labels} numbers",
            why="a value or a score is one number",
            fix="name a checkpoint trained with num_labels = 1, or a causal language model",
        )
    require_one_number(config)
    with torch.random.fork_rng(devices=[]):
        kind = heads[scalar] if declared == causal else heads[declared]
        module, missing = _weights(source, config, kind, dtype)
    new = head_weights(module) if declared == causal else frozenset()
    _refuse_missing(source, module, missing - new)
    if missing & new:
        start_head(module)
    if ends := end_tokens(source):
        config.get_text_config().eos_token_id = ends  # no generation config is saved with a head
    return module


def _read_config(source: str) -> PreTrainedConfig:
    """Return the config of a supported decoder."""
    if Path(source).is_dir():
        check_files(Path(source))
        if (settings := Path(source) / "config.json").exists():
            check_sizes(Path(source), settings_in(settings))
    try:
        settings, _ = PreTrainedConfig.get_config_dict(source)
        _check_settings(source, settings)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except LIBRARY_ERRORS as error:
        raise unusable(source, "config", error) from error
    if config.is_encoder_decoder:
        raise ModelError(
            f"the model {source} is an encoder-decoder ({config.model_type})",
            why="Rillflow trains causal language models, which read prompt and answer as one text",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )
    return config


def _weights(
    source: str, config: PreTrainedConfig, kind: Any, dtype: torch.dtype
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Return the module, and the names of the weights that its files lack."""
    check_weight_files(source)
    unread = unread_weights(source)
    try:
        module, found = kind.from_pretrained(
            None,
            state_dict=unread,
            config=config,
            dtype=dtype,
            attn_implementation=built_with(kind, config),
            output_loading_info=True,
        )
    except LIBRARY_ERRORS as error:
        raise unusable(source, "weights", error) from error
    module.config.name_or_path = source
    with suppress(OSError):  # without this file, transformers takes these settings from the config
        if module.can_generate():
            module.generation_config = GenerationConfig.from_pretrained(source)
    return module, frozenset(found["missing_keys"])


def _refuse_missing(source: str, module: PreTrainedModel, missing: frozenset[str]) -> None:
    if missing:
        raise ModelError(
            f"the model {source} has no weight {min(missing)!r}",
            why=f"{len(missing)} weights of a {type(module).__name__} would be random",
            fix="name a complete checkpoint",
        )


def _check_settings(source: str, settings: dict[str, Any]) -> None:
    if not isinstance(settings, dict):
        raise ModelError(
            f"the config of the model {source} is not a JSON object", why="config.json holds settings by name"
        )
    kind = settings.get("model_type")
    if "auto_map" in settings and kind not in CONFIG_MAPPING:
        raise ModelError(
            f"the model {source} brings its own code for type {kind!r}",
            why="Rillflow runs no code from a model's directory",
            fix="choose a model whose type is part of transformers",
        )
    refuse_quantised(source, settings)
