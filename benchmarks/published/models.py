"""The models of published steps, from the config.json that their makers publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rillflow_planner.model_shape import ModelShape, read_shape

Config = dict[str, Any]


def _dense(
    hidden: int, layers: int, heads: int, kv: int, inner: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": words,
        **more,
    }


_QWEN3_MIXTURE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama-7B": _dense(4096, 32, 32, 32, 11008, 32000),
    "Llama-13B": _dense(5120, 40, 40, 40, 13824, 32000),
    "Llama-34B": _dense(8192, 48, 64, 8, 22016, 32000),
    "Llama-70B": _dense(8192, 80, 64, 8, 28672, 32000),
    "Llama-3.1-8B": _dense(4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _dense(8192, 80, 64, 8, 28672, 128256),
    "Qwen2.5-1.5B": _dense(1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
    "Qwen2.5-7B": _dense(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _dense(5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _dense(5120, 64, 40, 8, 27648, 152064),
    "Qwen3-32B": _dense(5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Qwen3-30B-A3B": _dense(2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **_QWEN3_MIXTURE),
    "Qwen3-235B-A22B": _dense(4096, 94, 64, 4, 12288, 151936, moe_intermediate_size=1536, **_QWEN3_MIXTURE),
    # a quarter of its layers attend to all tokens, with heads of 256: here all layers do, with heads of 64
    "Qwen3.5-35B-A3B": _dense(
        2048,
        40,
        16,
        2,
        512,
        248320,
        head_dim=64,
        num_experts=256,
        num_experts_per_tok=9,
        moe_intermediate_size=512,
    ),
    "DeepSeek-V3": _dense(
        7168,
        61,
        128,
        128,
        18432,
        129280,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
}


def shape(name: str, *, is_scalar: bool = False) -> ModelShape:
    """The shape of a published model."""
    return replace(read_shape(CONFIGS[name], name), is_scalar=is_scalar)
