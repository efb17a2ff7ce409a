"""Refused modules, which are refused before a token is sampled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    PreTrainedConfig,
    Qwen2ForCausalLM,
)

from rillflow.errors import ModelError
from rillflow.models.attention import ATTENTION
from rillflow.records.batch import Batch
from rillflow.rollout.native.engine import NativeEngine

Build = Callable[..., nn.Module]
Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]

SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
UNFIT: dict[str, tuple[PreTrainedConfig, str]] = {
    "attention of its own": (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "trial"),
    "the keyword is dropped": (AutoConfig.for_model("stablelm", **SIZE), "0 of its 2 layers"),
    "the interface is not used": (
        CodeGenConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4),
        "0 of its 2 layers",
    ),
    "a convolution": (
        AutoConfig.for_model("lfm2", **SIZE, layer_types=["conv", "full_attention"]),
        "1 of its 2 layers",
    ),
    "a recurrence": (AutoConfig.for_model("jamba", **SIZE, use_mamba_kernels=False), "of its 2 layers"),
    "attention in chunks": (
        AutoConfig.for_model(
            "llama4_text", **SIZE, head_dim=8, num_local_experts=2, intermediate_size_mlp=32
        ),
        "chunked_attention",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_plain_decoder_is_refused(
    name: str, build: Build, engine: Engines, prompts: Prompts
) -> None:
    config, reason = UNFIT[name]
    module = build(config)
    with pytest.raises(ModelError, match=f"cannot be sampled(.|\n)*{reason}"):
        engine(module).generate(prompts([1, 2, 3]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_attention_is_refused(
    attention: str, build: Build, engine: Engines, prompts: Prompts
) -> None:
    with pytest.raises(ModelError, match=r"0 of its 2 layers(.|\n)*attn_implementation='rillflow'"):
        engine(build(attention=attention)).generate(prompts([1, 2, 3]))


class Remembering(Qwen2ForCausalLM):
    """Adds the previous token's embedding to each one: state that keys and values do not hold."""

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        states = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=states + states.roll(1, dims=1), **rest)


def test_a_layer_that_remembers_otherwise_is_found_by_trial(
    tiny: nn.Module, engine: Engines, prompts: Prompts
) -> None:
    config = copy.deepcopy(tiny.config)
    module = Remembering._from_config(config, attn_implementation=ATTENTION).eval()
    with pytest.raises(ModelError, match="keeps state other than keys and values"):
        engine(module).generate(prompts([1, 2, 3]))


@pytest.mark.parametrize("context", [2, 3, 9])
def test_a_short_context_is_enough_for_the_trial(context: int, engine: Engines, prompts: Prompts) -> None:
    found = engine(context=context).generate(prompts([1]))
    assert found.ragged("tokens").lengths.tolist() == [min(context, 13)]


def test_the_library_does_not_build_what_has_no_interface() -> None:
    with pytest.raises((KeyError, ValueError)):
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model("falcon", **SIZE), attn_implementation=ATTENTION
        )
