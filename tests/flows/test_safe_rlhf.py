"""Safe RLHF end to end: a binding limit, and demonstrations in addition to prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError, RillflowError
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import rollout_columns
from rillflow.tasks.kinds import DEMONSTRATIONS

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
lr = 1e-4
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_rows = 32
max_tokens = 4
deterministic = true
[warm_start]
steps = 10
prompts_per_step = 33
lr = 3e-3
[algorithm]
name = "safe_rlhf"
steps = 3
prompts_per_step = 5
samples_per_prompt = 3
epochs = 2
minibatches = 2
[reward]
function = "scores.py:small"
[cost]
function = "scores.py:length"
"""
SCORES = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]

def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""
TIMES = "run/step_seconds/mean"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "scores.py").write_text(SCORES)
    return tmp_path


def ran(folder: Path, name: str, *settings: str, recipe: Path | None = None) -> list[dict[str, Any]]:
    """Return the metrics of every step of the algorithm, without times."""
    loaded = load_recipe(
        recipe or folder / "run.toml", [f"run.dir={json.dumps(str(folder / name))}", *settings]
    )
    launch(loaded, quiet=True)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line["metrics"].items() if key != TIMES}
        for line in lines
        if line["phase"] != "warm_start"
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "policy" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


def means(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [line[name]["mean"] for line in lines]


RECIPES = Path(__file__).parents[2] / "recipes" / "safe_rlhf"
LIMIT = 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_limit_is_kept_and_the_reward_rises_all_the_same(tmp_path: Path, seed: int) -> None:
    """Over five seeds the reward rose by 0.19 to 0.24, and the worst ten steps in a row cost 0.033."""
    kept = ran(tmp_path, "kept", f"run.seed={seed}", recipe=RECIPES / "run.toml")
    assert load_recipe(RECIPES / "run.toml").recipe.model_dump()["algorithm"]["cost_limit"] == LIMIT
    spent, rewards = means(kept, "cost/value/mean"), means(kept, "reward/score/mean")
    assert mean(spent[-10:]) <= LIMIT and mean(spent) <= LIMIT
    assert mean(rewards[-10:]) > mean(rewards[:4]) + 0.1
    assert all(row["cost"] == cost for row, cost in costs(tmp_path / "kept"))


@pytest.mark.slow
def test_without_the_limit_it_is_exceeded_and_a_price_that_begins_too_low_rises(tmp_path: Path) -> None:
    loose = ran(tmp_path, "loose", "algorithm.steps=9", recipe=RECIPES / "without_limit.toml")
    assert not any("cost/value/mean" in line for line in loose), "nobody asks for it"
    assert mean(cost for _, cost in costs(tmp_path / "loose")) > 10 * LIMIT
    low = ["algorithm.first_multiplier=0.1", "algorithm.steps=12"]
    prices = means(ran(tmp_path, "low", *low, recipe=RECIPES / "run.toml"), "flow/multiplier/mean")
    assert prices[0] == pytest.approx(0.1) and prices[-1] > 0.11


def test_a_step_in_which_no_row_has_a_cost_leaves_the_multiplier(folder: Path) -> None:
    (folder / "scores.py").write_text(
        SCORES + "\ndef nothing(prompts, completions, **_):\n    return [None] * len(prompts)\n"
    )
    for line in ran(folder, "silent", 'cost.function="scores.py:nothing"', "algorithm.cost_limit=0.5"):
        assert line["flow/multiplier/mean"]["mean"] == 1.0 and line["cost/none/sum"]["sum"] == 1.0
        assert line["policy/ratio/mean"]["count"] > 0, "the reward is learnt from all the same"


def costs(run: Path) -> list[tuple[dict[str, Any], float]]:
    """Return the rows of the last step, each with its cost by the recipe's cost function."""
    columns = rollout_columns(run, max(rollout_files(run)))
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [(row, 0.25 * max(0, len(row["completion"]) - len(row["columns"]["answer"]))) for row in rows]


def test_demonstrations_are_learned_beside_the_reward(folder: Path) -> None:
    without = ran(folder, "without")
    beside = ran(folder, "beside", "algorithm.pretrain_weight=20", "policy.lr=3e-3")
    assert not any("supervised/nll/mean" in step for step in without)
    assert beside[0]["reward/score/mean"] == without[0]["reward/score/mean"], (
        "the same prompts, the same rows"
    )
    losses = [step["supervised/nll/mean"]["mean"] for step in beside]
    assert losses[-1] < losses[0]


def test_a_resumed_run_is_shown_what_the_uninterrupted_one_was(folder: Path) -> None:
    setting = "algorithm.pretrain_weight=0.5"
    often = ("run.checkpoint_every=1", "run.keep_checkpoints=3")
    whole = ran(folder, "whole", setting, *often)
    shutil.copytree(folder / "whole", folder / "cut")
    (folder / "cut" / "finished.json").unlink()
    for later in ("step-000012", "step-000013"):
        shutil.rmtree(folder / "cut" / "checkpoints" / later)
    assert ran(folder, "cut", setting, *often) == whole
    assert same(folder / "whole", folder / "cut")
    state = json.loads((folder / "cut/checkpoints/step-000013/state.json").read_text())
    assert state["beside"] == state["stream"] == {"epoch": 0, "offset": 15, "rows": 70}


@pytest.mark.parametrize("name", [pytest.param("safe_rlhf", marks=pytest.mark.slow), "ppo"])
def test_data_parallel_ranks_take_the_same_step(name: str, folder: Path) -> None:
    """Ranks do not divide rows and demonstrations: losses are within 1e-5 of those of one rank."""
    settings = ["algorithm.pretrain_weight=0.5", f"algorithm.name={name}"]
    alone = ran(folder, "alone", *settings)
    ranks = ran(folder, "ranks", *settings, 'placement.backend="inline"', "placement.pools.main=2")
    for found, expected in zip(ranks, alone, strict=True):
        for loss in ("policy/loss/mean", "supervised/loss/mean", "supervised/nll/mean", "critic/loss/mean"):
            assert found[loss]["mean"] == pytest.approx(expected[loss]["mean"], rel=1e-5, abs=1e-6), loss


def test_the_graph_shows_the_second_edge(folder: Path) -> None:
    *_, graph = load_recipe(folder / "run.toml", ["algorithm.pretrain_weight=0.5"]).graphs
    assert graph.given == ("data", "demonstrations")
    (edge,) = (edge for edge in graph.edges if graph.source_name(edge) == "demonstrations")
    assert graph.stages[edge.destination].name == "policy.update"
    assert edge.fields == ("tokens", "loss_mask")
    *_, alone = load_recipe(folder / "run.toml").graphs
    assert alone.given == ("data",)
    assert "policy.update" in [stage.name for stage in alone.stages]


def test_a_task_without_answers_is_refused_before_anything_starts(folder: Path) -> None:
    rows = [json.dumps({"prompt": f"{number}+1="}) for number in range(20)]
    (folder / "silent.jsonl").write_text("\n".join(rows))
    settings = ['task.source="silent.jsonl"', "task.held_out=2", "warm_start=none"]
    with pytest.raises(
        RillflowError, match=r"18 of 18 rows to train on cannot be used: silent.jsonl line"
    ) as caught:
        ran(folder, "silent", *settings, "algorithm.pretrain_weight=0.5")
    assert "algorithm.pretrain_weight=0" in str(caught.value)
    assert not (folder / "silent").exists()


def test_every_minibatch_has_a_demonstration(folder: Path) -> None:
    settings = ["algorithm.pretrain_weight=0.5", "algorithm.minibatches=6"]
    with pytest.raises(ConfigError, match="minibatches is 6 and prompts_per_step 5"):
        load_recipe(folder / "run.toml", settings)


def test_what_is_given_beside_prompts_is_the_algorithms_own_wish() -> None:
    wishes = {name: algorithm.beside for name, algorithm in ALGORITHMS.items()}
    config = ALGORITHMS["ppo"].config.model_validate({"name": "ppo", "steps": 1, "pretrain_weight": 0.1})
    assert wishes["ppo"](config) is wishes["safe_rlhf"](config) is DEMONSTRATIONS
    assert wishes["grpo"](config) is None
