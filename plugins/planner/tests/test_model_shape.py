"""Model shape: known totals, what a config may say, and what it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow_planner.model_config import read_shape
from rillflow_planner.model_shape import ModelShape

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_inner": None}
QWEN3_MIXTURE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN25_SMALL = {**LLAMA, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
QWEN25_SMALL |= {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936}
QWEN25_SMALL |= {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (LLAMA, 8.030e9, None),
        (GPT2, 124.4e6, None),
        (QWEN25_SMALL, 1.5437e9, None),
        (QWEN3_MIXTURE, 30.53e9, 3.3e9),
        (DEEPSEEK_V3, 671.0e9, 37.5e9),
        (
            {**LLAMA, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
            6.738e9,
            None,
        ),
    ],
)
def test_parameters_are_the_published_totals(
    config: dict[str, Any], parameters: float, active: float | None
) -> None:
    shape = read_shape(config, "published")
    assert shape.parameters == pytest.approx(parameters, rel=0.01)
    if active is not None:
        with_embedding = shape.active_parameters + shape.vocabulary * shape.hidden
        assert with_embedding == pytest.approx(active, rel=0.02)


def test_cache_of_grouped_and_latent_attention() -> None:
    assert read_shape(LLAMA, "llama").cached_numbers == 32 * 2 * 8 * 128
    assert read_shape(DEEPSEEK_V3, "deepseek").cached_numbers == 61 * (512 + 64)


def test_a_scalar_head_replaces_the_vocabulary() -> None:
    policy = read_shape(LLAMA, "llama")
    critic = replace(policy, is_scalar=True)
    assert policy.parameters - critic.parameters == 128256 * 4096 - 4096


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_field_is_named(missing: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != missing}
    with pytest.raises(PlanError) as caught:
        read_shape(config, "mine")
    assert missing in caught.value.what
    assert "mine" in caught.value.what


@pytest.mark.parametrize("value", [0, -1, 10**12, 3.5, "4096", True])
def test_an_absurd_size_is_refused_with_its_value(value: object) -> None:
    with pytest.raises(PlanError) as caught:
        read_shape({**LLAMA, "hidden_size": value}, "mine")
    assert repr(value) in caught.value.what


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 5},
        {"num_experts": 4, "num_experts_per_tok": 8},
        {"num_experts": 4},
        {"tie_word_embeddings": "yes"},
        {"num_attention_heads": 31},
    ],
)
def test_contradictions_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        read_shape({**LLAMA, **changes}, "mine")


@given(layers=st.integers(1, 40), heads=st.sampled_from([1, 2, 4, 8]), inner=st.integers(1, 4096))
def test_parameters_are_the_sum_of_their_parts(layers: int, heads: int, inner: int) -> None:
    shape = ModelShape(
        name="any",
        hidden=64 * heads,
        layers=layers,
        heads=heads,
        kv_heads=1,
        head_dim=64,
        inner=inner,
        vocabulary=1000,
    )
    attention = 64 * heads * (64 * heads + 2 * 64) + (64 * heads) ** 2
    layer = attention + 3 * 64 * heads * inner
    assert shape.parameters == layers * layer + 2 * 1000 * 64 * heads
    assert shape.token_flops == 2 * (layers * layer + 1000 * 64 * heads)
