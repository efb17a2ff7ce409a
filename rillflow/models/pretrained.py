"""Pretrained: a Hugging Face directory or hub name, checked before it is loaded.

    directory | hub name ─ config: a decoder? ─> weights: safetensors, complete? ─> module, unread
                                  └─ with a scalar head, or without: then the head is new

Nothing in a directory is executed: no custom code, no pickle.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rillflow.errors import ModelError
from rillflow.models.architecture import built_with, causal_class, scalar_class
from rillflow.models.bounds import check_files, check_sizes
from rillflow.models.end_tokens import end_tokens
from rillflow.models.lazy_weights import unread_weights
from rillflow.models.scalar_head import head_weights, require_one_number, start_head
from rillflow.models.weight_files import (
    LIBRARY_ERRORS,
    check_weight_files,
    refuse_quantised,
    settings_in,
    unusable,
)


def load_module(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model with unread weights (``models.unread``).

    Raises:
        ModelError: the directory has no supported model, or lacks weights.
    """
    config = _config(source)
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
    config = _config(source)
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


def _config(source: str) -> PreTrainedConfig:
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
