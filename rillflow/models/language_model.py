"""LanguageModel: a module, its tokeniser and how long a text may be; everything a role starts from.

ModelConfig ─┬─ path ─> pretrained ─┐
             └─ new ──> new_model ──┴─> module + tokeniser ─ checked together ─> LanguageModel on its device
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rillflow.errors import ConfigError, ModelError, nearest
from rillflow.models.architecture import check_attention, context_of
from rillflow.models.attention import register
from rillflow.models.config import ModelConfig
from rillflow.models.locate import locate
from rillflow.models.new_model import character_tokenizer, new_module
from rillflow.models.pretrained import load_module
from rillflow.models.quiet import quiet
from rillflow.models.tokenizer import Tokenizer, load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A causal language model, ready to sample from and to train."""

    module: PreTrainedModel
    """The unmodified transformers module, its attention Rillflow's, in evaluation mode."""
    tokenizer: Tokenizer
    """Its tokeniser."""
    context: int
    """The longest row in tokens, prompt and answer together."""


def load_model(config: ModelConfig, *, seed: int, device: torch.device, base: Path) -> LanguageModel:
    """A model from a directory, the hub, or made anew.

    Args:
        config: exactly one of ``path`` and ``new``.
        seed: decides a new model's weights; the same on every device.
        device: where the module goes.
        base: what a relative ``path`` is relative to.

    Raises:
        ConfigError: both or none of ``path`` and ``new`` are given.
        ModelError: the model is not there, or is none that Rillflow can drive.
    """
    if (config.path is None) == (config.new is None):
        raise ConfigError(
            "policy.model has both path and new" if config.new else "policy.model has neither path nor new",
            why="a model exists, or is made: exactly one of the two",
            fix='write path = "a/directory", or new = {}',
        )
    register()
    dtype = _DTYPES[config.dtype]
    with quiet():
        if config.new is not None:
            inner = character_tokenizer(config.new.alphabet, config.new.context)
            module = new_module(config.new, vocabulary=len(inner), seed=seed, dtype=dtype)
        else:
            assert config.path is not None  # exactly one of the two is there
            source = locate(config.path, base)
            module = load_module(source, dtype).to(device).eval()
            check_attention(module)
            inner = load_tokenizer(source)
        return _assemble(module.to(device), inner)


def choose_device(name: str) -> torch.device:
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        ConfigError: there is no such device; the message names those that are.
    """
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name == "auto":
        return torch.device("cuda:0" if len(there) > 1 else "cpu")
    if name == "cuda" and len(there) > 1:
        return torch.device("cuda:0")
    if name not in there:
        raise ConfigError(
            f"there is no device {name!r}",
            why=f"this machine has {', '.join(there)}",
            fix=nearest(name, ["auto", *there]),
        )
    return torch.device(name)


def _assemble(module: PreTrainedModel, inner: PreTrainedTokenizerBase) -> LanguageModel:
    tokenizer = Tokenizer(inner, stop_tokens=_listed(module.generation_config.eos_token_id))
    rows = module.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary_size > rows:
        raise ModelError(
            f"the tokeniser has {tokenizer.vocabulary_size} tokens and the model's embedding {rows} rows",
            why="a text with a token beyond the embedding could not be read",
            fix="use the tokeniser the model was trained with, or call resize_token_embeddings",
        )
    return LanguageModel(module=module, tokenizer=tokenizer, context=context_of(module))


def _listed(tokens: int | Sequence[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)
