"""A role's setting: the model that it loads, and the construction of each class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import ScalarModel, save_model
from rillflow.models.tokenizer import ModelInput
from rillflow.rewards.config import RewardConfig
from rillflow.roles.combined_scores import Panel
from rillflow.roles.scalar_roles import Critic, RewardModel
from rillflow.roles.setting import RoleSetting, made
from rillflow.rollout.config import RolloutConfig
from rillflow.tasks.config import TaskConfig
from rillflow.training.config import TrainConfig
from rillflow.workers.backend import Place, Site
from rillflow.workers.collectives import SingleRank
from rillflow.workers.config import MeshSizes

MakeModel = Callable[..., ScalarModel]


def setting(stack: ExitStack, role: str, **given: Any) -> RoleSetting:
    site = Site(place=Place("main", 0), ranks=SingleRank(), fetch=lambda *_: [], stack=stack)
    return RoleSetting(
        role=role,
        site=site,
        base=Path(),
        run=Path(),
        device="cpu",
        threads=1,
        seed=3,
        train=TrainConfig(lr=1e-3),
        rollout=RolloutConfig(),
        task=TaskConfig(),
        sizes=MeshSizes(),
        **{"limits": RewardConfig(), **given},
    )


def new(**sizes: Any) -> ModelConfig:
    return ModelConfig(new=NewModel(hidden=16, layers=1, context=16, alphabet="0123456789+=", **sizes))


def test_a_model_to_train_has_its_own_tokens_and_a_scorer_the_policys(
    make_model: MakeModel, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        trained = RewardModel.make(setting(stack, "reward_model", model=new()))
        save_model(trained.model, tmp_path / "model")
        known = ModelInput(tokenizer=make_model().tokenizer, context=32)
        scorers = {"reward.model": ModelConfig(path=str(tmp_path / "model"))}
        frozen = RewardModel.make(setting(stack, "reward", scorers=scorers, model_input=known))
    assert trained._reread is None and frozen._reread is not None, "the policy writes another alphabet"
    assert trained._tokenizer is trained.model.tokenizer and frozen._tokenizer is known.tokenizer


def test_a_critic_has_the_name_and_the_version_of_its_setting() -> None:
    with ExitStack() as stack:
        first = setting(stack, "policy", model=new())
        known = ModelInput(tokenizer=first.load(ScalarModel).tokenizer, context=16)
        given = replace(first, role="second_critic", version=4, model_input=known)
        critic = made(Critic.make, lambda site: replace(given, site=site), first.site)
    assert isinstance(critic, Critic) and critic.version == 4 and critic._name == "second_critic"


def test_a_panel_makes_the_members_that_are_weighed() -> None:
    with ExitStack() as stack:
        known = ModelInput(
            tokenizer=setting(stack, "policy", model=new()).load(ScalarModel).tokenizer, context=9
        )
        limits = RewardConfig(weights={"function": 1.0, "model": 0.5})
        given = setting(
            stack, "reward", limits=limits, scorers={"reward.model": new()}, model_input=known, functions=()
        )
        assert given.context == 9 and [*Panel.make(given)._members] == ["function", "model"]


def test_what_is_made_before_the_trained_model_has_no_tokeniser() -> None:
    with ExitStack() as stack, pytest.raises(AssertionError, match="critic is made before"):
        _ = setting(stack, "critic").tokenizer
