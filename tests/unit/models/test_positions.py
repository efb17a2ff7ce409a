"""Positions: a token's position depends on the model and on no other row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
)

from rillflow.errors import ModelError
from rillflow.models.architecture import settle_positions
from rillflow.models.attention import ATTENTION
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import Scorer
from rillflow.workers.collectives import SingleRank
from tests.unit.models.shards import local_weights

ORIGINAL, CONTEXT = 16, 64
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 9.0, 27.0]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    **FACTORS,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "pad_token_id": None,
}
COMPANY = {
    "phi3": Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=LONGROPE),
    "phimoe": PhimoeConfig(
        **SIZES,
        num_local_experts=4,
        rope_parameters={**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": LONGROPE,
        },
    ),
}

Load = Callable[[PreTrainedConfig], LanguageModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads the model of a directory written by transformers only."""

    def make(config: PreTrainedConfig) -> LanguageModel:
        tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz", CONTEXT).library
        torch.manual_seed(0)
        config.vocab_size = len(tokenizer)
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        module.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        found = ModelConfig(path="model")
        return load_model(found, seed=0, device=torch.device("cpu"), base=tmp_path)

    return make


def prompts(*lengths: int) -> Batch:
    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(len(lengths))]),
        fields={
            "tokens": Ragged.from_rows([[1 + (7 * place) % 36 for place in range(n)] for n in lengths]),
            "columns": Ragged.from_text(["{}"] * len(lengths)),
        },
    )


def by_the_library(folder: Path, row: Tensor) -> Tensor:
    """Return [T - 1] log probabilities of transformers' module for a row padded to the context's length."""
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    filled = torch.cat([row, row.new_ones(CONTEXT - len(row))])
    with torch.no_grad():
        logits = module(input_ids=filled[None], use_cache=False).logits[0, : len(row) - 1]
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]


@pytest.mark.parametrize("kind", COMPANY)
def test_sampler_trainer_and_library_agree_on_rows_that_cross_the_original_length(
    kind: str, load: Load, tmp_path: Path
) -> None:
    model = load(COMPANY[kind])
    config = RolloutConfig(max_tokens=14, max_rows=2)
    engine = NativeEngine(
        model.module, config, stop_tokens=frozenset(), seed=1, context=model.context, record_after=4
    )
    rows = engine.generate(prompts(3, 12, 9), samples=2)
    assert rows.ragged("tokens").lengths.tolist() == [17, 17, 26, 26, 23, 23]
    scored = Scorer(model.module, TrainConfig()).logprobs(rows)
    mask = rows.ragged("loss_mask").values
    sampled = rows.ragged("sampler_logprobs").values
    assert float((scored.values - sampled)[mask].abs().max()) < 1e-4
    whole = torch.cat(
        [
            torch.cat([torch.zeros(1), by_the_library(tmp_path / "model", row)])
            for row in rows.ragged("tokens").rows()
        ]
    )
    assert float((whole - sampled)[mask].abs().max()) < 1e-4


@pytest.mark.parametrize("kind", COMPANY)
def test_a_rows_log_probabilities_are_the_same_in_any_micro_batch(kind: str, load: Load) -> None:
    model = load(COMPANY[kind])
    tokens = prompts(5, 40, 12, 17).ragged("tokens")
    mask = tokens.with_values(tokens.positions > 0)
    rows = prompts(5, 40, 12, 17).with_fields(loss_mask=mask)
    one, several = (
        Scorer(model.module, TrainConfig(tokens_per_micro_batch=budget)).logprobs(rows).values
        for budget in (1000, 20)
    )
    assert float((one - several).abs().max()) < 1e-4


def test_a_context_within_the_original_length_keeps_the_short_factors(load: Load, tmp_path: Path) -> None:
    settings = {**SIZES, "max_position_embeddings": ORIGINAL}
    model = load(Phi3Config(**settings, original_max_position_embeddings=ORIGINAL, rope_parameters=LONGROPE))
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    tokens = prompts(ORIGINAL).ragged("tokens").values[None]
    with torch.no_grad():
        found, expected = (each(input_ids=tokens, use_cache=False).logits for each in (model.module, own))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_rank_that_samples_reads_positions_as_the_trainer_does(load: Load) -> None:
    like = load(COMPANY["phi3"]).module
    shard = sampling_module(like, {}, SingleRank())
    assign(shard, local_weights(like, {}, 0, 1))
    tokens = prompts(7).ragged("tokens").values[None]
    with torch.no_grad():
        found, expected = (each(input_ids=tokens, use_cache=False).logits for each in (shard, like))
    assert torch.equal(found, expected)


def test_a_saved_model_is_the_librarys_own(load: Load, tmp_path: Path) -> None:
    model = load(COMPANY["phi3"])
    model.module.save_pretrained(tmp_path / "again")
    names = [
        set(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()) for name in ("model", "again")
    ]
    assert names[0] == names[1]
    assert (tmp_path / "again" / "config.json").read_text().count('"longrope"') == 1


def test_a_model_that_reads_other_rows_lengths_elsewhere_is_refused() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=37)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()

    def louder(_: nn.Module, __: object, named: dict[str, Tensor], output: Tensor) -> Tensor:
        return output * (1 + named["position_ids"].max() / CONTEXT)

    module.model.layers[0].register_forward_hook(louder, with_kwargs=True)
    with pytest.raises(ModelError, match=r"a longer row in the batch .* LlamaForCausalLM"):
        settle_positions(module, module)
