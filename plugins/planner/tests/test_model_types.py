"""Model types: every supported one has the parameters of transformers' own modules on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model.options import LAYOUTS, grids
from rillflow_planner.model_config import model_types, read_shape

LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 211,
    "pad_token_id": 0,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN_SHARED = {**QWEN, "shared_expert_intermediate_size": 56}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, SMALL) for kind in ("llama", "mistral", "qwen2", "olmo2", "smollm3", "phi3")),
    (
        "llama",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    ("mistral", {**SMALL, "sliding_window": 16}),
    ("qwen2", {**SMALL, "tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 4}),
    ("qwen3", {**SMALL, "head_dim": 24, "attention_bias": True}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 211, "n_positions": 32}),
    ("gemma", {**SMALL, "head_dim": 24}),
    ("gemma2", {**SMALL, "head_dim": 24}),
    ("gemma3_text", {**SMALL, "head_dim": 24, "num_hidden_layers": 13}),
    ("glm4", {**SMALL, "head_dim": 24}),
    ("qwen2_moe", {**SMALL, **QWEN_SHARED}),
    ("qwen2_moe", {**SMALL, **QWEN_SHARED, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe", {**SMALL, **QWEN, "head_dim": 24, "mlp_only_layers": [0]}),
    ("mixtral", {**SMALL, "num_local_experts": 4}),
    ("deepseek_v2", {**SMALL, **LATENT, **ROUTED, "q_lora_rank": None, "first_k_dense_replace": 1}),
    ("deepseek_v3", {**SMALL, **LATENT, **ROUTED, "q_lora_rank": 40, "num_key_value_heads": 4}),
    ("deepseek_v3", {**SMALL, **LATENT, **ROUTED, "attention_bias": True, "n_shared_experts": 2}),
    ("glm4_moe", {**SMALL, **ROUTED, "head_dim": 24, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", {**SMALL, **ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 3}),
    ("minimax_m2", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 24}),
    ("gpt_oss", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 24}),
    ("llama4_text", {**SMALL, "intermediate_size_mlp": 200, "num_local_experts": 4}),
    ("llama4_text", {**SMALL, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 200}),
    ("qwen3_next", {**SMALL, **QWEN_SHARED, **LINEAR, "head_dim": 24}),
    ("qwen3_next", {**SMALL, **QWEN_SHARED, **LINEAR, "mlp_only_layers": [0, 5], "attention_bias": True}),
    ("qwen3_5_text", {**SMALL, **LINEAR, "head_dim": 24}),
    ("qwen3_5_moe_text", {**SMALL, **QWEN_SHARED, **LINEAR, "head_dim": 24}),
    ("nemotron_h", {**SMALL, **MAMBA, **ROUTED, "hybrid_override_pattern": "MEM*-E", "head_dim": 24}),
    (
        "nemotron_h",
        {
            **{key: SMALL[key] for key in SMALL if key != "num_hidden_layers"},
            **MAMBA,
            **ROUTED,
            **dict.fromkeys(("use_bias", "mlp_bias", "attention_bias"), True),
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 72,
        },
    ),
]
"""Model type and the keys of its config; others have the values of transformers."""
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
"""Sizes of published models by name, under the keys of their own config.json."""


def built(kind: str, config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the config as transformers writes it, and the parameters of the model on the meta device."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = CONFIG_MAPPING[kind](**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    return made.to_dict(), sum(weights.numel() for weights in model.parameters())


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_parameters_are_those_of_transformers(kind: str, config: dict[str, Any]) -> None:
    written, parameters = built(kind, config)
    assert read_shape(written, "small").parameters == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_those_of_transformers(name: str) -> None:
    config = {key: value for key, value in PUBLISHED[name].items() if key != "model_type"}
    kind = PUBLISHED[name]["model_type"].replace("kimi_k2", "deepseek_v3")
    assert read_shape(PUBLISHED[name], name).parameters == built(kind, config)[1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gemma3", {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}),
        ("qwen3_5", {"model_type": "qwen3_5_text", **SMALL, **LINEAR, "head_dim": 24}),
        ("qwen3_5_moe", {**SMALL, **QWEN_SHARED, **LINEAR, "head_dim": 24}),
        ("llama4", {"model_type": "llama4_text", **SMALL, "num_local_experts": 4}),
        ("kimi_k25", {**SMALL, **LATENT, **ROUTED, "num_key_value_heads": 4}),
    ],
)
def test_of_a_model_for_pictures_the_language_model_is_counted(kind: str, text: dict[str, Any]) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    text = {**text, "num_hidden_layers": 8}
    made = CONFIG_MAPPING[kind](text_config=dict(text))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made.get_text_config())
    parameters = sum(weights.numel() for weights in model.parameters())
    read = read_shape({"model_type": kind, "text_config": made.get_text_config().to_dict()}, kind)
    assert read.parameters == parameters and read.excluded
    if kind == "gemma3":  # as its makers publish it: sizes that are the defaults are left out
        assert read_shape({"model_type": kind, "text_config": text}, kind).parameters == parameters


def test_every_type_is_compared() -> None:
    known = {kind for kind, _ in CASES} | {"gemma3", "llama4", "qwen3_5", "qwen3_5_moe", "kimi_k25"}
    assert known | {"kimi_k2"} == set(model_types())
    assert model_types()["kimi_k2"] is model_types()["deepseek_v3"]


@pytest.mark.parametrize("kind", ["qwen3_6", "deepseek_v4", "llama5", "", None, 3, ["llama"]])
def test_an_unknown_type_is_refused_without_a_neighbour(kind: object) -> None:
    with pytest.raises(PlanError) as caught:
        read_shape({**SMALL, "model_type": kind}, "mine")
    assert repr(kind) in caught.value.what and "did you mean" not in str(caught.value)


GPT_OSS = {**SMALL, "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
QWEN_NEXT = {**SMALL, **QWEN_SHARED, **LINEAR, "model_type": "qwen3_next", "head_dim": 16}
QWEN_NEXT["num_hidden_layers"] = 8


def test_a_window_bounds_cache_and_attention_in_its_layers_alone() -> None:
    windowed = read_shape({**GPT_OSS, "sliding_window": 128}, "windowed")
    whole = read_shape({**GPT_OSS, "sliding_window": None}, "whole")
    assert (windowed.windowed_layers, whole.windowed_layers) == (3, 0)
    assert windowed.parameters == whole.parameters
    for context in (64.0, 128.0):
        assert windowed.cache_numbers(context) == whole.cache_numbers(context) == whole.cached_numbers
    assert windowed.cache_numbers(1280.0) == pytest.approx(whole.cached_numbers * (3 + 3 / 10) / 6)
    pairs = [shape.attention_flops(1.0, 1280.0) for shape in (windowed, whole)]
    assert pairs[0] / pairs[1] == pytest.approx((3 + 3 / 10) / 6)


def test_a_state_replaces_the_cache_of_linear_layers() -> None:
    shape = read_shape(QWEN_NEXT, "hybrid")
    assert (shape.linear_layers, shape.attending_layers) == (6, 2)
    state = 4 * 8 * 16
    for context in (10.0, 1000.0):  # a row's bytes: keys and values grow, states do not
        row = 2 * 2 * 2 * 16 * context + 6 * state
        assert shape.cache_numbers(context) * context == pytest.approx(row)
    assert shape.attention_flops(1.0) == 2.0 * 2 * 4 * 2 * 16


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["linear_attention"] * 3},
        {"layer_types": ["rotating"] * 8},
        {"layer_types": "linear_attention"},
        {"linear_num_value_heads": None},
        {"layer_types": [["linear_attention"]] * 8},
        {"layer_types": [{}]},
        {"num_hidden_layers": 100_000_000},
        {"first_k_dense_replace": 9},
        {"mlp_only_layers": 3},
        {"mlp_only_layers": [[3]]},
        {"linear_num_value_heads": -1},
        {"num_experts_per_tok": 9},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 2},
    ],
)
def test_a_contradiction_in_layers_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        read_shape({**QWEN_NEXT, **changes}, "mine")
    assert "mine" in caught.value.what and caught.value.why


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "llama4_text", "gpt_oss", "gemma3_text"])
def test_the_runtime_splits_models_whose_attention_it_replaces(kind: str) -> None:
    """Held to what the runtime itself says of the module's class."""
    from transformers import CONFIG_MAPPING

    from rillflow.models.architecture import ATTENTION, built_with, causal_class

    config = CONFIG_MAPPING[kind](**next(changes for name, changes in CASES if name == kind))
    shape = read_shape(config.to_dict(), kind)
    assert shape.keeps_attention is (built_with(causal_class(config), config) != ATTENTION)
    whole = {*grids(shape, 8, 8, LAYOUTS["rillflow"])} == {Grid(dp=8)}
    assert whole is shape.keeps_attention
    assert len({*grids(shape, 8, 8, LAYOUTS["megatron"])}) > 1
