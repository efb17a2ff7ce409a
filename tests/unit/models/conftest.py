"""Small real models and tokenizers, created on the fly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_pair_tokenizer(
    *, begin: bool = False, end: bool = False, chat: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that may add begin and end tokens itself."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["the cat sat on the mat, the cat said hello world"] * 4, trainer)
    if begin or end:
        pattern = f"{'<s> ' if begin else ''}$A{' </s>' if end else ''}"
        backend.post_processor = processors.TemplateProcessing(
            single=pattern, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT if chat else None,
    )


def tiny_module(kind: str, vocabulary: int, **settings: object) -> PreTrainedModel:
    """Return a random model of a type with transformers' attention; untied, so every weight has a name."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | settings)))


@pytest.fixture
def byte_pair() -> Callable[..., PreTrainedTokenizerFast]:
    """Return a function that makes byte-level BPE tokenizers."""
    return byte_pair_tokenizer


@pytest.fixture
def make_directory(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model directory with transformers only, as any script would."""

    def make(kind: str = "llama", *, name: str = "model", inner: object = None, **settings: object) -> Path:
        inner = inner or byte_pair_tokenizer()
        module = tiny_module(kind, len(inner), **({"tie_word_embeddings": False} | settings))
        module.generation_config = GenerationConfig(eos_token_id=[1, 3])
        folder = tmp_path / name
        module.save_pretrained(folder)
        inner.save_pretrained(folder)
        return folder

    return make
