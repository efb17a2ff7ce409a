"""Routes: the experts that tokens of sampled rows used, and training that replays them."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from rillflow.errors import ModelError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.routing import PLAN, Routers
from rillflow.records.batch import Batch
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.rollout.native.passes import RoutePlan
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.trainer import Trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=[1],
)
"""A model with experts in two of its three layers."""


def sampled(module: nn.Module, prompts: Any, *, record_after: float = inf, version: int = 0) -> Batch:
    """Sample rows that share prompts, wait for slots and change slots."""
    config = RolloutConfig(max_tokens=12, max_rows=5, replay_routing=True)
    stops = frozenset(range(8))
    engine = NativeEngine(
        module, config, stop_tokens=stops, seed=3, context=256, record_after=record_after, workers=1
    )
    engine.load(version, {})
    return engine.generate(prompts([9, 10, 11], [12] * 7, [9, 10, 20, 21]), samples=4)


def chosen(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return [T, R, k] the routers' choice for a row that runs alone."""
    plan = RoutePlan()
    with Routers(module).watched(), torch.no_grad():
        module(input_ids=tokens[None], use_cache=False, **{PLAN: plan})
    return plan.routes


@pytest.mark.parametrize("record_after", [inf, pytest.param(2, marks=pytest.mark.slow)])
def test_routes_are_those_of_every_row_alone(build: Any, prompts: Any, record_after: float) -> None:
    module = build(CONFIG)
    rollouts = sampled(module, prompts, record_after=record_after)
    assert len(set(rollouts.ragged("tokens").lengths.tolist())) > 3, "rows end apart, so that others move"
    for tokens, routes in zip(
        rollouts.ragged("tokens").rows(), rollouts.ragged("routes").rows(), strict=True
    ):
        assert routes.shape == (len(tokens), 2, 2)
        assert torch.equal(routes[:-1].sort(-1).values.long(), chosen(module, tokens)[:-1].sort(-1).values)
        assert bool((routes[-1] == -1).all()), "the last token went through no pass"


def test_training_takes_the_routes_it_is_given(build: Any, prompts: Any) -> None:
    module = build(CONFIG)
    rollouts = sampled(module, prompts)
    teaching = rollouts.with_fields(advantages=torch.linspace(-1, 1, len(rollouts)))
    elsewhere = teaching.ragged("routes").values.clone()
    elsewhere[..., 0], elsewhere[..., 1] = 3, 4
    forced = teaching.with_fields(routes=teaching.ragged("routes").with_values(elsewhere))
    touched = []
    for rows in (teaching, forced):
        trainer = Trainer(module, TrainConfig(lr=1e-9, beta1=0.0, balance=0.1), total_steps=1)
        metrics = trainer.update(rows, PolicyLoss(PolicyLossConfig(), max_tokens=20))
        state = trainer.optimizer.state()
        names = [
            name for name, _ in module.named_parameters() if name.endswith("down_proj") and ".experts" in name
        ]
        moved = torch.stack([state[f"exp_avg/{name}"].abs().flatten(1).sum(1) > 0 for name in names])
        touched.append(moved.nonzero()[:, 1].unique().tolist())
        assert float(metrics["routing/idle/share"].value) == pytest.approx(1 - len(touched[-1]) / 6, abs=0.2)
    assert touched[1] == [3, 4] and len(touched[0]) > 2


def test_rows_of_one_prompt_that_went_other_ways_are_read_apart(build: Any, prompts: Any) -> None:
    module = build(CONFIG)
    rollouts = sampled(module, prompts)
    other = rollouts.ragged("routes").values.clone()
    second = rollouts.ragged("tokens").row_of == 1
    other[second] = (other[second] + 1) % 6
    mixed = rollouts.with_fields(routes=rollouts.ragged("routes").with_values(other))
    scorer = Trainer(module, TrainConfig(), total_steps=1).scorer
    together = scorer.logprobs(mixed).rows()
    for row in range(2):
        alone = scorer.logprobs(mixed.select([row])).rows()[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)
    own = scorer.logprobs(rollouts).rows()
    assert float((own[1] - together[1]).abs().max()) > 1e-3, "other experts say something else"


def test_a_dense_model_has_no_routes(build: Any, prompts: Any) -> None:
    with pytest.raises(ModelError, match="replay_routing is true, and Qwen2ForCausalLM has no experts"):
        sampled(build(), prompts)
