"""Recomputed activations: less memory, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
)

from rillflow.errors import ModelError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.recompute import Recompute
from rillflow.training.scorer import LogprobReader, Scorer
from rillflow.training.trainer import Trainer

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NOISY = {
    "dropout in a layer's own function": OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.3),
    "dropout in functions of the parts of a layer": Starcoder2Config(
        **SIZES, num_key_value_heads=2, residual_dropout=0.3, embedding_dropout=0.3
    ),
    "noise in the routing of experts": MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.3
    ),
}


def built(config: PreTrainedConfig) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


def outputs_and_gradients(
    module: PreTrainedModel, rows: Batch, recompute: Recompute | None = None
) -> list[Tensor]:
    """Return outputs and gradients of one pass; the module's gradients are cleared."""
    scorer = Scorer(module, TrainConfig())
    with recompute or nullcontext():
        found = scorer.forward(rows, LogprobReader())
        (found.logprobs.sum() + found.entropy.sum()).backward()
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    module.zero_grad()
    return [found.logprobs.detach(), found.entropy.detach(), *gradients]


@pytest.mark.parametrize("noise", NOISY)
def test_noise_that_a_model_trains_with_stays_off(noise: str, make_rows: MakeRows) -> None:
    module = built(NOISY[noise])
    plain = outputs_and_gradients(module, make_rows())
    again = outputs_and_gradients(module, make_rows(), Recompute(module))
    assert len(plain) == len(again) > 10
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert not any(part.training for part in module.modules())


@pytest.mark.parametrize("noise", NOISY)
def test_rows_that_are_only_measured_are_measured_without_noise(noise: str, make_rows: MakeRows) -> None:
    module = built(NOISY[noise])
    trainer = Trainer(module, TrainConfig(gradient_checkpointing=True), total_steps=1)
    rows = make_rows()
    rows = rows.with_fields(
        sampler_logprobs=trainer.scorer.logprobs(rows), advantages=torch.where(torch.arange(6) < 3, 0.0, 1.0)
    )
    trainer.update(rows, PolicyLoss(PolicyLossConfig()), ratio_tolerance=1e-5)
    assert not any(part.training for part in module.modules())


def test_every_layer_is_computed_a_second_time(make_module: MakeModule, make_rows: MakeRows) -> None:
    module, passes = make_module(), []
    for layer in module.model.layers:
        layer.mlp.register_forward_pre_hook(lambda part, _: passes.append(part.training))
    outputs_and_gradients(module, make_rows())
    assert len(passes) == 2
    recompute = Recompute(module)
    passes.clear()
    outputs_and_gradients(module, make_rows(), recompute)
    assert passes == [False] * 4


def test_a_model_that_says_something_else_when_recomputed_is_refused(make_module: MakeModule) -> None:
    module = make_module()

    def louder(layer: nn.Module, _: object, output: Tensor) -> Tensor:
        return output * 2 if layer.training else output

    module.model.layers[0].register_forward_hook(louder)
    with pytest.raises(ModelError, match="gives other outputs with gradient checkpointing"):
        Recompute(module)


def test_a_model_without_layers_that_recompute_is_refused(make_module: MakeModule) -> None:
    module = make_module()
    module.model.layers = nn.ModuleList()
    with pytest.raises(ModelError, match="supports gradient checkpointing"):
        Recompute(module)
