"""Rows with turns, forks, preemption and new weights on CUDA, where passes are padded and run as graphs."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from rillflow.models.attention import ATTENTION, register
from tests.unit.rollout.reused_rows import CONTEXT, Reuse, engine_of, round_passes

MOST = {("cpu", "float32"): 1e-5, ("cuda", "float32"): 1e-4}
"""Largest deviation of a log probability; in bfloat16 0.1."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch sees none")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def module_on(device: str, dtype: str) -> nn.Module:
    register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return module.to(device, getattr(torch, dtype))


@on_each_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_agree_with_plain_passes_however_cache_rows_are_reused(device: str, dtype: str) -> None:
    """The offered cache rows are compared after each step too; on a CPU passes are padded without graphs."""
    padded, graphs = 0, 0
    for seed in range(3 if device == "cuda" else 1):
        module = module_on(device, dtype)
        engine = engine_of(module, max_rows=20, record_after=64)
        passes = round_passes(engine, captures=device == "cuda")
        rows = Reuse(module=module, engine=engine, chance=Random(seed), most_samples=8)
        rows.run(10)
        assert max(rows.deviations(), default=0.0) <= MOST.get((device, dtype), 0.1)
        padded, graphs = padded + passes.padded, graphs + passes.replayed
    assert padded > 10
    assert (graphs > 20) == (device == "cuda")
