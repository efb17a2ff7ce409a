"""Generation over tensor-parallel ranks, on gloo processes: the whole module's text from parts of it.

Every model is given by its config and a seed, so each process makes the same whole module and cuts its own
part out of it. What is sampled has to be the same on all ranks of a group, bit by bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.cluster.ranks import Alone, Ranks
from rillflow.errors import ModelError, RolloutError
from rillflow.models.attention import ATTENTION, register
from rillflow.models.sampling_shard import assign, local_weights, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import rollouts_of
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine

sys.path.insert(0, str(Path(__file__).parent))
from processes import together

Rows = dict[RowId, tuple[tuple[int, ...], tuple[float, ...]]]

CONTEXT = 128
LENGTHS = (1, 3, 3, 7, 12, 20, 31, 33)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 70,  # over 4 ranks: 18, 18, 18, 16
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 61},  # biases; over 4 ranks: 16, 16, 16, 13
    "qwen3": {"tie_word_embeddings": False, "head_dim": 10},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "gpt_neox": {"tie_word_embeddings": False, "num_key_value_heads": 8},
    "gemma3_text": {"head_dim": 12, "sliding_window": 8},
}


def whole_module(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    register()
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)  # fresh weights say nearly the same of every token
            if name.endswith("bias"):
                weight.normal_()  # and fresh biases nothing
            weight.data = weight.data.to(dtype)
    return module.eval()


def own_part(whole: PreTrainedModel, tp: Ranks) -> PreTrainedModel:
    plan = tensor_plan(whole)
    module = sampling_module(whole, plan, tp)
    assign(module, local_weights(whole, plan, tp.rank, tp.size))
    return module


def prompts(vocabulary: int = 61) -> Batch:
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (length,), generator=random).tolist() for length in LENGTHS]
    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(len(rows))]),
        fields={"tokens": Ragged.from_rows(rows), "columns": Ragged.from_text(["{}"] * len(rows))},
    )


def engine(module: PreTrainedModel, tp: Ranks, seed: int = 3, **settings: Any) -> NativeEngine:
    return NativeEngine(
        module,
        RolloutConfig(**{"max_tokens": 30, "max_rows": 6, **settings}),
        stop_tokens=frozenset({3, 9}),
        seed=seed,
        context=CONTEXT,
        tp=tp,
    )


def bits(rollouts: Batch) -> Rows:
    return {rollout.row: (rollout.tokens, rollout.logprobs) for rollout in rollouts_of(rollouts)}


def tokens_of(rows: Rows) -> dict[RowId, tuple[int, ...]]:
    return {row: tokens for row, (tokens, _) in rows.items()}


TEXT = torch.arange(2 * 24).view(2, 24) * 7 % 61


def logits(ranks: Ranks, kinds: list[str]) -> list[Any]:
    """Of TEXT, for every kind of model; no tensor, which would need this process to live on."""
    found = []
    for kind in kinds:
        module = own_part(whole_module(kind), ranks)
        with torch.inference_mode():
            found.append(module(input_ids=TEXT, use_cache=False).logits.tolist())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_the_whole_module(size: int) -> None:
    everyone = together(size, logits, list(MODELS))
    for index, kind in enumerate(MODELS):
        with torch.inference_mode():
            wanted = whole_module(kind)(input_ids=TEXT, use_cache=False).logits
        found = [torch.tensor(theirs[index]) for theirs in everyone]
        assert all(torch.equal(theirs, found[0]) for theirs in found), kind
        scale = wanted.abs().max()
        torch.testing.assert_close(found[0] / scale, wanted / scale, rtol=0, atol=1e-5, msg=kind)
