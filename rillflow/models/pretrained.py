"""Pretrained: a Hugging Face directory or hub name, looked at before it is loaded.

    directory | hub name ─ config: a decoder? ─> weights: safetensors, all there? ─> module

Nothing in a directory is executed: no custom code, no pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from rillflow.errors import ModelError
from rillflow.models.architecture import causal_class
from rillflow.models.attention import ATTENTION

LIBRARY_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
"""What transformers raises for a directory it cannot use."""


def load_module(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with Rillflow's attention, on the CPU.

    Raises:
        ModelError: the directory holds none we can drive, or not all of its weights.
    """
    try:
        settings, _ = PreTrainedConfig.get_config_dict(source)
        _check_settings(source, settings)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except LIBRARY_ERRORS as error:
        raise _unusable(source, "config", error) from error
    _check_architecture(source, config)
    _check_weight_files(source)
    try:
        module, found = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except LIBRARY_ERRORS as error:
        raise _unusable(source, "weights", error) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelError(
            f"the model {source} has no weight {missing[0]!r}",
            why=f"{len(missing)} weights of a {type(module).__name__} would be random",
            fix="name a complete checkpoint of a causal language model",
        )
    return module


def _check_settings(source: str, settings: dict[str, Any]) -> None:
    if not isinstance(settings, dict):
        raise ModelError(
            f"the config of the model {source} is no JSON object", why="config.json holds settings by name"
        )
    kind = settings.get("model_type")
    if "auto_map" in settings and kind not in CONFIG_MAPPING:
        raise ModelError(
            f"the model {source} brings its own code for type {kind!r}",
            why="Rillflow executes nothing from a model's directory",
            fix="choose a model of a type that transformers itself has",
        )
    if "quantization_config" in settings:
        raise ModelError(
            f"the model {source} is quantised",
            why="its weights are integers, which cannot be trained",
            fix="name the float or bfloat16 model it was made from",
        )


def _check_architecture(source: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelError(
            f"the model {source} is an encoder with a decoder ({config.model_type})",
            why="prompt and answer are one text for a causal language model",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )
    wanted = causal_class(config).__name__
    declared = config.architectures or [wanted]
    if wanted not in declared:
        raise ModelError(
            f"the model {source} is a {declared[0]}",
            why=f"as a {wanted} some of its weights would be random, or unused",
            fix="name a checkpoint of a causal language model",
        )


def _check_weight_files(source: str) -> None:
    directory = Path(source)
    if not directory.is_dir() or any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"the weights of {source} are in {pickles[0]}, a pickle",
            why="loading a pickle can execute anything; Rillflow reads safetensors",
            fix="convert them: load with transformers where you trust the file, then save_pretrained",
        )
    raise ModelError(f"the model {source} has no weights", why="there is no .safetensors file in it")


def _unusable(source: str, part: str, error: BaseException) -> ModelError:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return ModelError(
        f"the {part} of the model {source} cannot be used",
        why=" ".join(lines[:2]) or type(error).__name__,
        fix="name a directory that AutoModelForCausalLM.from_pretrained loads",
    )
