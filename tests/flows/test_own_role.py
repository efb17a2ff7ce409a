"""An algorithm's file brings its own role; the roles of a run follow from its step."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

import rillflow
from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.ppo import PPOConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.algorithms.steps import update_and_publish
from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
import own_role

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
model.new = { hidden = 32, layers = 2, heads = 4, context = 16, alphabet = "0123456789+=" }
lr = 3e-3
[rollout]
max_tokens = 4
[evaluate]
problems = 0
[algorithm]
name = "verified"
steps = 3
prompts_per_step = 8
samples_per_prompt = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    return tmp_path / "run.toml"


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_its_endpoint_is_a_stage_and_its_measure_a_metric(backend: str, recipe: Path) -> None:
    """Runs as a script, with the role in its own pool."""
    if backend == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    settings = ["placement.pools={ main = 1, other = 1 }", 'placement.roles={ verifier = "other" }']
    words = [word for each in (*settings, f"placement.backend={backend}") for word in ("--set", each)]
    command = [sys.executable, own_role.__file__, "run", str(recipe), "--dir", "run", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=recipe.parent
    )
    assert done.returncode == 0, done.stderr
    run = recipe.parent / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shares = [line["metrics"]["verifier/found/share"]["mean"] for line in lines]
    assert len(shares) == 3 and all(0 < share < 1 for share in shares)
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    assert {span["pool"] for span in spans if span["stage"] == "verifier.verify"} == {"other"}


def test_it_stands_in_the_graph(recipe: Path) -> None:
    loaded = load_recipe(recipe, algorithms=[own_role.ALGORITHM])
    assert loaded.called == ("policy", "verifier")
    (graph,) = loaded.graphs
    assert [stage.name for stage in graph.stages][:2] == ["policy.generate", "verifier.verify"]


def function(*_: Any) -> None:
    """A function in place of a class."""


@pytest.mark.parametrize(
    ("brings", "what"),
    [
        ({"verifier": function}, "'verifier', which is not a role: <function function"),
        ({"verifier": Path}, "'verifier', which is not a role: <class 'pathlib"),
        ({"critic": own_role.Verifier}, "'critic', which is a shipped role"),
        ({"verifier": "critc"}, "a role 'verifier' of the unknown kind 'critc'"),
        ({"verifier": "sampler"}, "a role 'verifier' of the unknown kind 'sampler'"),
    ],
)
def test_what_is_no_role_is_refused_before_anything_starts(
    brings: dict[str, Any], what: str, recipe: Path
) -> None:
    own = Algorithm(config=own_role.VerifiedConfig, step=own_role.step, brings=brings)
    with pytest.raises(ConfigError) as caught:
        assert load_recipe(recipe, algorithms=[own]).graphs
    assert what in caught.value.what


def test_a_kind_or_a_role_that_is_not_there_is_refused_with_the_nearest(recipe: Path) -> None:
    settings = {"config": own_role.VerifiedConfig, "step": own_role.step}
    with pytest.raises(ConfigError, match="did you mean 'critic'"):
        load_recipe(recipe, algorithms=[Algorithm(**settings, brings={"verifier": "critc"})])
    with pytest.raises(ConfigError, match="no role 'verifier'"):
        load_recipe(recipe, algorithms=[Algorithm(**settings)])
    with pytest.raises(ConfigError, match=r"no role 'verifier'(?s:.*)did you mean 'verifer'"):
        load_recipe(recipe, algorithms=[Algorithm(**settings, brings={"verifer": own_role.Verifier})])


class TwoCriticsConfig(PPOConfig):
    """PPO's settings."""

    name: Literal["two_critics"]  # type: ignore[assignment]


def two_critics(flow: Any, prompts: Any, config: Any) -> Any:
    """Run PPO's step with a second critic on the same returns."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    token_rewards = flow.compute(formulas.token_rewards, rewards, rollouts, into="token_rewards")
    values, credit = flow.critic.values(rollouts), {"gamma": config.gamma, "lam": config.lam}
    advantages = flow.compute(formulas.gae, token_rewards, values, rollouts, into="advantages", **credit)
    returns = flow.compute(formulas.value_targets, advantages, values, rollouts, into="returns")
    seconds = flow.second_critic.values(rollouts)
    reports = [
        critic.update(rollouts, own, returns, loss=config.value_loss, passes=config)
        for critic, own in ((flow.critic, values), (flow.second_critic, seconds))
    ]
    return (*reports, update_and_publish(flow, [rollouts, advantages], config))


def test_one_more_critic_is_made_trained_and_saved_as_the_first_is(recipe: Path) -> None:
    own = Algorithm(config=TwoCriticsConfig, step=two_critics, brings={"second_critic": "critic"})
    settings = {"algorithm.name": "two_critics", "run.checkpoint_every": 1, "critic.lr": 1e-2}
    run = rillflow.train(recipe, settings=settings, dir=recipe.parent / "run", algorithms=[own], quiet=True)
    lines = [json.loads(line)["metrics"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["critic/loss/mean"]["mean"], line["second_critic/loss/mean"]["mean"]) for line in lines]
    assert len(losses) == 3 and all(first == second for first, second in losses), "they learn the same"
    saved = {file.parent.name for file in run.path.glob("checkpoints/step-000003/*/model.safetensors")}
    assert {"policy", "critic", "second_critic"} <= saved


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.toml"))
VARIANTS = [[], ["algorithm.loss.kl=0"], ["algorithm.loss.kl=0.1"], ["algorithm.truncated=mask"]]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_roles_of_a_recipe_are_those_its_steps_call(path: Path) -> None:
    for overrides in VARIANTS:
        try:
            found = load_recipe(path, overrides)
        except ConfigError:  # the setting does not exist there, or conflicts with others
            continue
        assert found.main.algorithm in ALGORITHMS.values()
        traced = found.graphs[-1]
        assert set(found.main.roles) == set(traced.roles)
        assert found.main.roles[0] == next(iter(traced.roles))
