"""A recipe as a planner's problem: shapes, rows, and what is measured in place of what is assumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rillflow.app.memory import estimate
from rillflow.app.model_files import sizes_of_new
from rillflow.app.planned import settings_of
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError, ModelError, PlanError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.compute import Setting, load_of
from rillflow_planner.cost_model.memory import activation_bytes
from rillflow_planner.cost_model.options import grids_of
from rillflow_planner.recipe_problem import (
    open_cluster,
    plan_of,
    shape_of_directory,
    shape_of_new,
    state_problem,
)

ROOT = Path(__file__).parents[3]
RECIPE = """
[policy]
model.new = { hidden = 64, layers = 4, heads = 8, kv_heads = 4, context = 64 }
tokens_per_micro_batch = 512
[rollout]
max_tokens = 16
max_rows = 32
[task]
size = 600
[algorithm]
name = "ppo"
steps = 3
prompts_per_step = 24
samples_per_prompt = 4
epochs = 2
minibatches = 3
loss.kl = 0.1
"""
CLUSTER = """
[[machine_type]]
device = "cpu"
devices = 4
per_machine = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe")
    (path / "run.toml").write_text(RECIPE)
    (path / "cluster.toml").write_text(CLUSTER)
    return path


def loaded(folder: Path, *settings: str) -> Resolved:
    return load_recipe(folder / "run.toml", settings)


def test_a_new_models_shape_is_that_of_the_model_made() -> None:
    new = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=48, alphabet="0123456789+=")
    made = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    counted = sum(parameter.numel() for parameter in made.module.parameters() if parameter.dim() > 1)
    assert shape_of_new(new).parameters == counted


def test_a_recipe_is_a_problem(folder: Path) -> None:
    stated = state_problem(loaded(folder), open_cluster(folder / "cluster.toml"))
    problem, workload = stated.problem, stated.problem.workload
    assert list(problem.shapes) == ["policy", "reference", "critic"]
    assert problem.shapes["critic"].is_scalar and not problem.shapes["policy"].is_scalar
    assert [unit.name for unit in problem.units] == ["policy", "reference", "critic"]
    assert (workload.prompts, workload.samples, workload.rows) == (24, 4, 96)
    assert (workload.epochs, workload.minibatches, workload.tokens_per_micro_batch) == (2, 3, 512)
    assert (workload.dtype, workload.rows_at_once, workload.response.limit) == ("float32", 32, 16)
    assert 4.5 < workload.prompt.mean < 6.5, "sums and differences of two numbers of two digits"
    assert len(stated.assumptions) == 2
    assert "sigma 0.6, clipped at 16" in stated.assumptions[0] and "reward" in stated.assumptions[1]


def test_what_is_learnt_from_has_the_lengths_of_the_data(folder: Path) -> None:
    recipe = loaded(
        folder, 'algorithm={ name = "sft", steps = 2, prompts_per_step = 8 }', "rollout.max_tokens=9"
    )
    stated = state_problem(recipe, open_cluster(folder / "cluster.toml"))
    assert (stated.problem.workload.rows, stated.assumptions) == (8, ())
    assert 2 <= stated.problem.workload.response.mean <= 4


def test_a_models_sizes_come_from_its_directory(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    found = shape_of_directory(str(tmp_path))
    assert (found.hidden, found.layers, found.kv_heads, found.inner) == (64, 2, 2, 128)
    del sizes["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(PlanError, match="vocab"):
        shape_of_directory(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        shape_of_directory(str(tmp_path))
    with pytest.raises(ModelError, match="not known"):
        shape_of_directory("nobody/nothing")


def test_a_missing_cluster_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_cluster(tmp_path / "cluster.toml")


def test_a_placement_is_a_plan_and_back(folder: Path) -> None:
    placed = loaded(
        folder,
        "placement.pools={ main = 4, side = 2 }",
        'placement.roles.critic="side"',
        "placement.train_parallel={ main = { tp = 2 }, reference = { fsdp = 4 } }",
        "placement.rollout_parallel.tp=2",
    )
    graph = state_problem(placed, open_cluster(folder / "cluster.toml")).problem.graph
    fleet = open_cluster(folder / "cluster.toml").fleets[0]
    plan = plan_of(placed, graph, fleet)
    assert str(plan.units["policy"].grid) == "dp 2 x pp 1 x tp 2" and plan.units["policy"].generate_tp == 2
    again = load_recipe(folder / "run.toml", settings_of(plan, ()))
    assert plan_of(again, graph, fleet) == plan


def test_a_sampler_apart_is_another_problem(folder: Path) -> None:
    problem = state_problem(loaded(folder), open_cluster(folder / "cluster.toml")).problem
    units = {unit.name: None for unit in problem.apart().units}
    plan = Plan(name="ppo", pools=(), units=dict.fromkeys(units), freshness=2)  # type: ignore[arg-type]
    apart = problem.of_plan(plan)
    assert apart.samples_apart and apart.freshness == 2


@pytest.mark.parametrize("recomputes", ["true", "false"])
def test_activations_are_those_of_check(recomputes: str, tmp_path: Path) -> None:
    changed = f"tokens_per_micro_batch = 512\ngradient_checkpointing = {recomputes}"
    (tmp_path / "run.toml").write_text(RECIPE.replace("tokens_per_micro_batch = 512", changed))
    loaded = load_recipe(tmp_path / "run.toml")
    problem = state_problem(loaded, open_cluster(ROOT / "clusters/laptop.toml")).problem
    (policy,) = [unit for unit in problem.units if unit.name == "policy"]
    setting = Setting(problem=problem, shape=policy.shape, fleet=problem.hardware.fleets[0])
    load = load_of(problem.workload, 1, 1)
    planned = activation_bytes(setting, load, grids_of(Grid()))[0]
    model = loaded.recipe.policy.model.new
    assert model is not None
    checked = estimate(loaded, sizes_of_new(model), 64).phases["trains"]["activations"]
    assert planned == pytest.approx(checked * problem.workload.packing.trained, rel=1e-3)
