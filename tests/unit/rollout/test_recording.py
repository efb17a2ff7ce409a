"""A recording has the module's bits, uses new weights, and is dropped if it could be wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from rillflow.records.batch import Batch
from rillflow.rollout.native.engine import NativeEngine

Build = Callable[..., nn.Module]
Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]

STOPS = range(0, 64, 8)
"""Tokens that end a row: one of eight."""
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


class Counting(nn.Module):
    """Counts Python calls of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.calls = 0
        module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: object) -> None:
        self.calls += not torch.jit.is_tracing()


def same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(one.ragged(name).values, other.ragged(name).values)
        for name in ("tokens", "sampler_logprobs")
    )


@pytest.mark.parametrize(
    ("config", "deterministic"),
    [
        (None, False),
        (None, True),
        (AutoConfig.for_model("mistral", **SIZE, sliding_window=8), True),
        (AutoConfig.for_model("gpt_neox", **SIZE), False),
        (AutoConfig.for_model("mixtral", **SIZE, num_local_experts=4, sliding_window=None), False),
    ],
    ids=["qwen2", "qwen2 deterministic", "mistral deterministic", "gpt_neox", "mixtral"],
)
def test_a_recording_has_the_bits_of_the_module(
    config: PreTrainedConfig | None, deterministic: bool, build: Build, engine: Engines, prompts: Prompts
) -> None:
    """Rows come and go, with prefixes of many lengths and shared ones."""
    module = build(config)
    batch = prompts(*range(1, 12))
    make = {"max_rows": 4, "deterministic": deterministic, "stop_tokens": STOPS}
    recorded = engine(module, **make, record_after=1).generate(batch, samples=2)
    assert same(recorded, engine(module, **make).generate(batch, samples=2))


@pytest.mark.parametrize("deterministic", [False, True])
def test_python_is_left_out_once_a_recording_is_there(
    deterministic: bool, build: Build, engine: Engines, prompts: Prompts
) -> None:
    module = build()
    used = engine(module, record_after=1, max_rows=2, deterministic=deterministic, stop_tokens=STOPS)
    batch = prompts(*[4] * 9)
    used.generate(batch)
    counting = Counting(module)
    used.generate(batch)
    assert counting.calls == 0


def test_weights_changed_in_place_are_seen(build: Build, engine: Engines, prompts: Prompts) -> None:
    module = build()
    used = engine(module, record_after=1)
    used.generate(prompts(5, 6))
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.1)
    assert same(used.generate(prompts(5, 6)), engine(module).generate(prompts(5, 6)))
    for weight in module.parameters():
        weight.data = weight.data * 0.9
    assert same(used.generate(prompts(5, 6)), engine(module).generate(prompts(5, 6)))


def test_exchanged_parameters_are_seen(build: Build, engine: Engines, prompts: Prompts) -> None:
    module = build()
    used = engine(module, record_after=1)
    used.generate(prompts(5, 6))
    module.load_state_dict({name: value * 1.1 for name, value in module.state_dict().items()}, assign=True)
    assert same(used.generate(prompts(5, 6)), engine(module).generate(prompts(5, 6)))


class Peeking(nn.Module):
    """A layer whose Python reads a value."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor, *rest: Any, **more: Any) -> Any:
        found: Tensor = self.inner(states, *rest, **more)
        return found * 1.5 if bool(found.mean() > 0) else found


def test_a_module_that_looks_at_values_is_not_recorded(
    build: Build, engine: Engines, prompts: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    module = build()
    layer = module.model.layers[0]  # type: ignore[union-attr, index]
    layer.mlp = Peeking(layer.mlp)
    batch = prompts(*range(1, 8))
    with caplog.at_level(logging.INFO, logger="rillflow"):
        found = engine(module, record_after=1, max_rows=3).generate(batch)
    assert "runs without recording: Converting a tensor to a Python boolean" in caplog.text
    assert same(found, engine(module, max_rows=3).generate(batch))
