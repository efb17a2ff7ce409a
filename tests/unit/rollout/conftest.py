"""Small real models, and prompts for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine

VOCABULARY = 64
CONTEXT = 256

Build = Callable[..., nn.Module]
Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]


def tiny_config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )


def _build(config: PreTrainedConfig | None = None, attention: str = ATTENTION) -> nn.Module:
    register()
    torch.manual_seed(0)
    chosen = copy.deepcopy(config or tiny_config())  # a module writes its attention into its config
    module: nn.Module = AutoModelForCausalLM.from_config(chosen, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)  # fresh weights give every token nearly the same probability
    return module


@pytest.fixture
def build() -> Build:
    """Return a function that makes a module from a config: the tiny Qwen2 by default."""
    return _build


@pytest.fixture(scope="session")
def tiny() -> nn.Module:
    """Return one tiny Qwen2 whose weights tests do not change."""
    return _build()


@pytest.fixture
def engine(tiny: nn.Module) -> Engines:
    """Return a function that makes an engine; its keywords are those of RolloutConfig and of NativeEngine."""

    def make(
        module: nn.Module = tiny,
        *,
        stop_tokens: Sequence[int] = (),
        seed: int = 3,
        context: int = CONTEXT,
        record_after: float = float("inf"),
        workers: int | None = None,
        keep_cache: bool = False,
        **settings: float,
    ) -> NativeEngine:
        return NativeEngine(
            module,
            RolloutConfig(**{"max_tokens": 12, **settings}).with_kept_cache(keep_cache),
            stop_tokens=frozenset(stop_tokens),
            seed=seed,
            context=context,
            record_after=record_after,
            workers=workers,
        )

    return make


@pytest.fixture
def prompts() -> Prompts:
    """Return a function that makes a batch of prompts from lists of tokens, or lengths of random ones."""

    def make(*rows: Sequence[int] | int, epoch: int = 0, **fields: Tensor) -> Batch:
        random = torch.Generator().manual_seed(len(rows))
        drawn = [
            torch.randint(0, VOCABULARY, (row,), generator=random).tolist() if isinstance(row, int) else row
            for row in rows
        ]
        return Batch(
            ids=row_ids([RowId(epoch, index, 0) for index in range(len(rows))]),
            fields={
                "tokens": Ragged.from_rows(drawn),
                "columns": Ragged.from_text([f'{{"n": {index}}}' for index in range(len(rows))]),
                **fields,
            },
        )

    return make
