"""A small real model, and batches of rows to train it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    PreTrainedModel,
    Qwen2Config,
)

from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_module() -> MakeModule:
    """Return a function that makes a two-layer Qwen2 whose random weights depend only on the seed."""

    return partial(_module, AutoModelForCausalLM)


@pytest.fixture
def make_scalar() -> MakeModule:
    """Return a function that makes the same model with a random scalar head."""
    return partial(_module, AutoModelForSequenceClassification, num_labels=1)


@pytest.fixture
def make_exact() -> MakeModule:
    """Return a function that makes a two-layer GPT-2 with a scalar head in float64, without float32 parts."""

    def make(attention: str = ATTENTION) -> PreTrainedModel:
        register()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            initializer_range=0.2,
            num_labels=1,
        )
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
        return model.to(torch.float64).eval()

    return make


def _module(kind: Any, seed: int = 0, attention: str = ATTENTION, **changes: object) -> PreTrainedModel:
    register()
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "dtype": torch.float32,
    }
    dtype = settings.pop("dtype")
    dtype = changes.pop("dtype", dtype)
    config = Qwen2Config(**{**settings, **changes})
    model = kind.from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


@pytest.fixture
def module(make_module: MakeModule) -> PreTrainedModel:
    return make_module()


@pytest.fixture
def make_rows() -> MakeRows:
    """Return a function that makes groups of rows with a shared prompt: tokens, loss mask, advantages."""

    def make(prompts: Sequence[int] = (5, 3), samples: int = 3, seed: int = 1, longest: int = 9) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        rows, masks, ids = [], [], []
        for prompt, length in enumerate(prompts):
            start = torch.randint(0, 64, (length,), generator=generator).tolist()
            for sample in range(samples):
                answer = int(torch.randint(1, longest, (1,), generator=generator))
                rows.append(start + torch.randint(0, 64, (answer,), generator=generator).tolist())
                masks.append([False] * length + [True] * answer)
                ids.append(RowId(0, prompt, sample))
        return Batch(
            ids=row_ids(ids),
            fields={
                "tokens": Ragged.from_rows(rows),
                "loss_mask": Ragged.from_rows(masks, torch.bool),
                "advantages": torch.randn(len(rows), generator=generator),
            },
        )

    return make
