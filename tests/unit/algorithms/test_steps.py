"""Every algorithm's step becomes a graph with the real roles' endpoints, and stays one screen long."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pytest

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.controller.flow import Flow
from rillflow.graph.graph import Graph
from rillflow.graph.trace import Signature, Tracer, trace
from rillflow.roles.judge import Judge
from rillflow.roles.policy import Policy, Reference
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.sampler import Sampler
from rillflow.roles.scalar_roles import Critic, RewardModel, SafetyCostModel
from rillflow.rollout.config import answering
from rillflow.workers.endpoint import endpoints_of


class WholePolicy(Policy, Sampler):
    """Both halves of the policy, whose endpoints a step calls under one name."""


FUNCTIONS: Mapping[str, type] = {
    "policy": WholePolicy,
    "reference": Reference,
    "critic": Critic,
    "cost_critic": Critic,
    "reward": Reward,
    "cost": Cost,
    "reward_model": RewardModel,
    "judge": Judge,
}
MODELS: Mapping[str, type] = {**FUNCTIONS, "reward": RewardModel, "cost": SafetyCostModel}
STEP_LINES = 40
CRITICS = ("ppo", "safe_rlhf")
SETTINGS = [
    {},
    {"epochs": 2},
    {"loss": {"kl": 0.1, "kl_in": "loss"}},
    {"loss": {"kl": 0.1, "kl_in": "reward"}, "minibatches": 2},
    {"loss": {"kl": 0.1}, "kl_target": 2.0},
    {"overlong_buffer": 2},
    {"margin": True, "centring": 0.1},
    {"orders": "random"},
    {"data": "fresh", "truncated": "mask"},
    {"loss": {"kl": 0.1}, "reference": "previous", "minibatches": 2},
    {"loss": {"kl": 0.1}, "reference": "moving"},
    {"selector": "random", "reference": "previous"},
    {"selector": "max_random", "reference": "moving", "data": "fresh"},
    {"selector": "max_max", "loss": {"kind": "simpo"}},
    {"shape": {"clip": (-1.0, 1.0), "length_price": 0.1}},
    {"shape": {"normalise": "running", "clip": (-1.0, 1.0)}},
    {"shape": {"normalise": "batch"}},
    {"truncated": "mask", "missing_end_penalty": 0.5, "loss": {"kl": 0.1, "kl_in": "reward"}},
    {"truncated": "bootstrap", "loss": {"kl": 0.1}},
]


def configured(name: str, settings: Mapping[str, object]) -> AlgorithmConfig | None:
    """Return the algorithm's settings; None if it has no such setting."""
    kind = ALGORITHMS[name].config
    if set(settings) - set(kind.model_fields):
        return None
    if settings.get("truncated") == "bootstrap" and name not in CRITICS:
        return None
    loss = settings.get("loss", {})
    if isinstance(loss, Mapping) and "loss" in settings:
        section = kind.model_fields["loss"].annotation
        if set(loss) - set(getattr(section, "model_fields", {})):
            return None
    if name == "remax" and dict(settings.get("shape") or {}).get("normalise"):
        return None
    return kind.model_validate({"name": name, "steps": 1, **settings})


def traced(algorithm: Algorithm, config: AlgorithmConfig, kinds: Mapping[str, type] = FUNCTIONS) -> Graph:
    roles: dict[str, dict[str, Signature]] = {
        role: {name: marked.signature for name, marked in endpoints_of(kinds[role]).items()}
        for role in algorithm.listened(config).heard
    }

    def run(tracer: Tracer, data: object) -> object:
        return algorithm.step(Flow(tracer), data, config)

    return trace(config.name, run, Tracer(roles), (*algorithm.data.fields, *config.columns))


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, settings) for settings in SETTINGS for name in ALGORITHMS if configured(name, settings)],
    ids=str,
)
def test_every_step_is_a_graph_in_which_no_field_is_missing(name: str, settings: dict[str, object]) -> None:
    config = configured(name, settings)
    assert config is not None
    for kinds in (FUNCTIONS, MODELS):
        graph = traced(ALGORITHMS[name], config, kinds)
        assert set(graph.roles) == set(ALGORITHMS[name].listened(config).heard)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if configured(name, {"samples_per_prompt": 4})])
def test_a_step_samples_each_prompt_as_often_as_the_recipe_says(name: str) -> None:
    config = configured(name, {"samples_per_prompt": 4})
    assert config is not None
    calls = ALGORITHMS[name].listened(config).calls["policy.generate"]
    assert 4 in [answering(args[1:], options).get("samples") for args, options in calls]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_is_one_screen(name: str) -> None:
    lines, _ = inspect.getsourcelines(ALGORITHMS[name].step)
    assert len(lines) <= STEP_LINES


@pytest.mark.parametrize("name", ["dr_grpo", "gspo", "cispo"])
def test_what_is_another_algorithm_with_other_settings_shares_its_step(name: str) -> None:
    assert ALGORITHMS[name].step is ALGORITHMS["grpo"].step


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("grpo", {"ratio": "token", "surrogate": "clip", "clip_high": 0.2, "aggregation": "token_mean"}),
        ("dr_grpo", {"aggregation": "constant", "clip_high": 0.2}),
        ("gspo", {"ratio": "sequence", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("cispo", {"surrogate": "weight", "clip_low": 1.0, "clip_high": 4.0}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean", "kl": 0.0}),
        ("ppo", {"kl_in": "reward", "kl_estimator": None}),
        ("safe_rlhf", {"kl_in": "reward", "kl_estimator": None}),
        ("reinforce_pp", {"kl_in": "reward", "kl_estimator": None}),
    ],
)
def test_one_setting_of_a_loss_leaves_its_other_defaults(name: str, defaults: dict[str, object]) -> None:
    config = configured(name, {"loss": {"entropy": 0.5}})
    assert config is not None
    loss = config.model_dump()["loss"]
    assert loss["entropy"] == 0.5
    assert {key: loss[key] for key in defaults} == defaults


def test_a_price_that_is_to_adapt_begins_above_zero_in_the_reward() -> None:
    for loss in ({}, {"kl": 0.1, "kl_in": "loss"}):
        with pytest.raises(ValueError, match=r"kl_target is 2.*above 0 with kl_in = 'reward'"):
            configured("ppo", {"kl_target": 2.0, "loss": loss})


def test_minibatches_without_a_demonstration_are_refused_where_demonstrations_count() -> None:
    few, many = {"prompts_per_step": 4, "minibatches": 4}, {"prompts_per_step": 4, "minibatches": 8}
    assert configured("ppo", {"pretrain_weight": 0.5, **few}) is not None
    assert configured("ppo", many) is not None
    with pytest.raises(ValueError, match=r"minibatches is 8 and prompts_per_step 4"):
        configured("ppo", {"pretrain_weight": 0.5, **many})


def test_both_kinds_of_learners_learn_from_what_was_there_before_either_did() -> None:
    config = configured("ppo", {})
    assert config is not None
    names = [stage.name for stage in traced(ALGORITHMS["ppo"], config).stages]
    updates = [names.index(name) for name in ("critic.update", "policy.update")]
    assert names.index("critic.values") < min(updates)
    whitened = names.index("controller.whitened")
    assert names.index("controller.value_targets") < whitened < names.index("policy.update")


def test_only_rows_of_groups_that_differ_reach_the_update() -> None:
    config = configured("dapo", {"epochs": 2})
    assert config is not None
    graph = traced(ALGORITHMS["dapo"], config)
    names = [stage.name for stage in graph.stages]
    given = {
        name: {graph.source_name(edge) for edge in graph.into(names.index(name))}
        for name in ("policy.update", "policy.logprobs", "controller.group_advantages")
    }
    assert given == {
        "policy.update": {"controller.where varied", "policy.logprobs", "controller.group_advantages"},
        "policy.logprobs": {"controller.where varied"},
        "controller.group_advantages": {"controller.where varied"},
    }, "log probabilities are asked for rows that are kept alone"
    assert names.count("policy.generate") == 1, "a trace shows one round"


@pytest.mark.parametrize(
    "name", sorted(ALGORITHMS.keys() - {"sft", "preference", "pairwise", "dpo", "kto", "online_dpo"})
)
def test_rows_cut_off_leave_every_update_where_that_is_asked(name: str) -> None:
    config = configured(name, {"truncated": "mask", "minibatches": 2})
    assert config is not None
    graph = traced(ALGORITHMS[name], config)
    updates = [stage.index for stage in graph.stages if stage.endpoint == "update"]
    assert len(updates) == {"ppo": 2, "safe_rlhf": 3}.get(name, 1)
    for update in updates:
        assert {graph.source_name(edge) for edge in graph.into(update)} == {"controller.where ended"}


@pytest.mark.parametrize("name", CRITICS)
def test_a_row_cut_off_is_worth_at_its_end_what_each_critic_says(name: str) -> None:
    config = configured(name, {"truncated": "bootstrap"})
    assert config is not None
    names = [stage.name for stage in traced(ALGORITHMS[name], config).stages]
    critics = [role for role in ("critic", "cost_critic") if f"{role}.values" in names]
    assert [f"{role}.final_values" in names for role in critics] == [True] * len(critics)
    assert names.count("controller.bootstrapped_rewards") == len(critics) == 1 + (name == "safe_rlhf")
