"""A replayed bundle of a skipped update names the first non-finite tensor, its row and its token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.errors import RunDirectoryError
from rillflow.formulas.config import PolicyLossConfig, ValueLossConfig
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, load_scalar_model, save_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, TokenLoss, ValueLoss
from rillflow.training.skipping import Skipped
from rillflow.training.trainer import Trainer
from rillflow_parts.replay.bundle import replay_bundle

MODEL = NewModel(hidden=16, layers=2, heads=2, kv_heads=1, context=16, alphabet="0123456789+=")
CONFIG = {
    "policy": {**TrainConfig().model_dump(), "model": {"dtype": "float32"}},
    "rollout": {"temperature": 1.0, "max_tokens": 4},
    "algorithm": {"name": "grpo", "loss": PolicyLossConfig().model_dump()},
}
TOKENS = [[3, 4, 5, 6], [3, 11, 5, 6, 8], [4, 4, 5]]


@pytest.fixture
def model() -> LanguageModel:
    torch.set_num_threads(1)
    return load_model(ModelConfig(new=MODEL), seed=0, device=torch.device("cpu"), base=Path())


def rows() -> Batch:
    tokens = Ragged.from_rows(TOKENS, torch.int64)
    mask = tokens.with_values(tokens.positions >= 2)
    return Batch(
        ids=row_ids([RowId(0, prompt, 0) for prompt in range(3)]),
        fields={"tokens": tokens, "loss_mask": mask, "advantages": torch.tensor([1.0, -1.0, 0.5])},
    )


def bundled(model: LanguageModel, folder: Path, batch: Batch, loss: TokenLoss | None = None) -> None:
    trainer = Trainer(model.module, TrainConfig(), total_steps=2)
    trainer.skipped = Skipped(folder / "policy", lambda at: save_model(model, at / "policy"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    trainer.update(batch, loss or PolicyLoss(PolicyLossConfig(), max_tokens=4))
    assert len(trainer.skipped.take()) == 1


def test_the_module_the_row_and_the_token_are_named(model: LanguageModel, tmp_path: Path) -> None:
    trainer = Trainer(model.module, TrainConfig(), total_steps=2)
    batch = rows().with_fields(sampler_logprobs=trainer.scorer.logprobs(rows()))
    first = model.module.model.layers[0]
    with torch.no_grad():  # only token 11 has a last dimension, which overflows where two factors multiply
        model.module.get_input_embeddings().weight[:, 15] = torch.arange(model.module.config.vocab_size) == 11
        first.self_attn.o_proj.weight[15] = 0
        for factor in (first.mlp.gate_proj, first.mlp.up_proj):
            factor.weight[:, 15] = 1e30
    bundled(model, tmp_path, batch)
    (found,) = replay_bundle(tmp_path)
    assert "loss is nan" in found.recorded
    where = "token 1 (id 11) of row (epoch 0 prompt 1 sample 0)"
    assert found.first == f"the output of model.layers.0.mlp.down_proj at {where}"


def test_a_weight_that_is_not_finite_is_named(model: LanguageModel, tmp_path: Path) -> None:
    trainer = Trainer(model.module, TrainConfig(), total_steps=2)
    batch = rows().with_fields(sampler_logprobs=trainer.scorer.logprobs(rows()))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[11, 5] = torch.nan
    bundled(model, tmp_path, batch)
    (found,) = replay_bundle(tmp_path)
    assert found.first == "the weight model.embed_tokens.weight at [11, 5]"


def test_a_field_that_is_not_finite_is_named(model: LanguageModel, tmp_path: Path) -> None:
    trainer = Trainer(model.module, TrainConfig(), total_steps=2)
    odd = torch.tensor([1.0, float("inf"), 0.5])
    bundled(
        model, tmp_path, rows().with_fields(sampler_logprobs=trainer.scorer.logprobs(rows()), advantages=odd)
    )
    (found,) = replay_bundle(tmp_path)
    where = "row (epoch 0 prompt 1 sample 0)"
    assert found.first == f"{where}: advantages is inf at {where}"
    assert found.recorded == f"advantages is inf at {where}"


def test_a_critics_update_is_made_again(model: LanguageModel, tmp_path: Path) -> None:
    save_model(model, tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"))
    critic = load_scalar_model(config, seed=0, device=torch.device("cpu"), base=Path(), section="critic")
    trainer = Trainer(critic.module, TrainConfig(), total_steps=2)
    folder = tmp_path / "x" / "critic"
    trainer.skipped = Skipped(folder, lambda at: save_model(critic, at / "critic"))
    tokens = rows().ragged("tokens")
    returns = torch.zeros(len(tokens.values))
    returns[8] = 3e38  # its square overflows: token 4 of row 1
    fields = {"returns": tokens.with_values(returns), "old_values": tokens.with_values(returns * 0)}
    trainer.update(rows().with_fields(**fields), ValueLoss(ValueLossConfig()))
    (tmp_path / "x" / "config.json").write_text(json.dumps(CONFIG))
    (found,) = replay_bundle(tmp_path / "x")
    assert found.role == "critic"
    assert found.first is not None
    assert "token 4 (id 8) of row (epoch 0 prompt 1 sample 0)" in found.first


def root_of(logprobs: Tensor, advantages: Tensor, *, shift: float) -> Tensor:
    """Return NaN where a log probability is below -shift."""
    return advantages * (logprobs + shift).sqrt()


def no_step(flow: Any, prompts: object, config: object) -> None:
    """Provide the step of a file that also has a loss."""
    del config
    flow.policy.update(prompts, loss=root_of)


def test_a_loss_of_ones_own_is_replayed_by_the_file_that_has_it(model: LanguageModel, tmp_path: Path) -> None:
    loss = TokenLoss(root_of, model_outputs=("logprobs", "entropy"), name="policy", options={"shift": 0.1})
    bundled(model, tmp_path, rows(), loss)
    with pytest.raises(RunDirectoryError, match=rf"(?s)loss, {__name__}\.root_of.*FILE\.py replay BUNDLE"):
        replay_bundle(tmp_path)
    own = Algorithm(config=AlgorithmConfig, step=no_step)
    (found,) = replay_bundle(tmp_path, [own])
    assert found.first is not None and "the loss at token 2 (id 5) of row (epoch 0 prompt 0" in found.first


def test_an_update_that_is_finite_here_says_so(model: LanguageModel, tmp_path: Path) -> None:
    trainer = Trainer(model.module, TrainConfig(), total_steps=2)
    batch = rows().with_fields(sampler_logprobs=trainer.scorer.logprobs(rows()))
    hook = model.module.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    bundled(model, tmp_path, batch)
    hook.remove()
    (found,) = replay_bundle(tmp_path)
    assert found.first is None
    assert "gradient's norm is nan" in found.recorded


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a bundle"):
        replay_bundle(tmp_path)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "bundle.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        replay_bundle(tmp_path)
