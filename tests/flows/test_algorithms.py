"""Every algorithm's recipe learns, inline and on Ray; test_safe_rlhf.py checks Safe RLHF's limit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.errors import ConfigError
from rillflow.runs.reader import read_rollouts

RECIPES = Path(__file__).parents[2] / "recipes"
IMITATES = "best_of_n"
"""Tested separately below: it trains without advantages, and no table of rises includes it."""
OTHERWISE = {"sft", "preference", "pairwise", "dpo", "kto", "online_dpo", IMITATES}
"""Algorithms that train without advantages; tests/flows has a file for each kind."""
SAMPLED = sorted(ALGORITHMS.keys() - OTHERWISE)
WHERE = ("inline", "together", "apart")
"""One process; Ray with every role on one pool of two ranks; Ray with a pool of one rank for each role."""
EVERY_DAY = {("ppo", "inline")}
STEPS, LONGER = 14, 24
BOUND, BOUND_STEPS = "safe_rlhf", 44
"""The cost limit slows its rise."""
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "learning.md"
FEW = ("algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2")

Lines = list[dict[str, Any]]


def steps_of(name: str) -> int:
    if name == BOUND:
        return BOUND_STEPS
    return STEPS if (name, "inline") in EVERY_DAY else LONGER


def cases(where: Sequence[str]) -> list[Any]:
    return [
        pytest.param(name, place, marks=() if (name, place) in EVERY_DAY else pytest.mark.slow)
        for name in SAMPLED
        for place in where
    ]


def recipe_of(name: str) -> Path:
    """Return an algorithm's recipe; GRPO uses Dr.GRPO's with its own defaults, because its own is long."""
    return RECIPES / ("dr_grpo" if name == "grpo" else name) / "run.toml"


def placed(path: Path, where: str) -> list[str]:
    """Return the settings of a placement for a recipe's roles."""
    if where == "inline":
        return []
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    if where == "together":
        return ["placement.backend=ray", "placement.pools.main=2"]
    roles = load_recipe(path).called
    pools = [f"placement.pools.of_{role}=1" for role in roles]
    return ["placement.backend=ray", *pools, *(f"placement.roles.{role}=of_{role}" for role in roles)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Lines]:
    """Return a function that runs an algorithm under a placement, each only once."""
    known: dict[tuple[str, str], Lines] = {}

    def lines(name: str, where: str) -> Lines:
        if (name, where) not in known:
            path = recipe_of(name)
            settings = [f"algorithm.name={name}", f"algorithm.steps={steps_of(name)}", *placed(path, where)]
            known[name, where] = run(path, tmp_path_factory.mktemp(name) / "run", *settings)
        return known[name, where]

    return lines


def run(recipe: Path, folder: Path, *settings: str) -> Lines:
    """Run a recipe; return the metrics of every step that sampled."""
    options = [word for setting in settings for word in ("--set", setting)]
    assert main(["run", str(recipe), "--dir", str(folder), "--quiet", *options]) == 0
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/score/mean" in line]


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "run/step_seconds/mean"}


def means(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [line[name]["mean"] for line in lines]


def rise(lines: Sequence[dict[str, Any]]) -> float:
    seen = means(lines, "reward/score/mean")
    return mean(seen[-3:]) - mean(seen[:4])


def expected_rise(name: str, steps: int) -> float:
    """Return the mean minus three deviations of five seeds, at this or the next smaller measured step."""
    until = max(each for each in (STEPS, LONGER) if each <= steps)
    table = MEASURED.read_text().split(f"## After {until} steps")[1].split("##")[0]
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    middle, deviation = (float(cell) for cell in row.split("|")[3:5])
    return middle - 3 * deviation


def test_every_algorithm_that_samples_has_a_recipe() -> None:
    for name in SAMPLED:
        assert recipe_of(name).is_file(), name
    assert {name for name, _ in EVERY_DAY} < set(SAMPLED)


@pytest.mark.parametrize(("name", "where"), cases(WHERE))
def test_the_reward_rises(name: str, where: str, ran: Callable[[str, str], Lines]) -> None:
    lines = ran(name, where)
    assert len(lines) == steps_of(name)
    assert rise(lines) > max(0.0, expected_rise(name, steps_of(name)))


@pytest.mark.parametrize(("name", "where"), cases(["apart"]))
def test_roles_apart_on_ray_have_the_bits_of_inline(
    name: str, where: str, ran: Callable[[str, str], Lines]
) -> None:
    """placement-blind, backend-blind: every metric of every step but the time."""
    apart, inline = ([without_time(line) for line in ran(name, place)] for place in (where, "inline"))
    assert apart == inline


def test_a_price_of_divergence_moves_and_both_models_are_measured(tmp_path: Path) -> None:
    recipe = RECIPES / "ppo" / "run.toml"
    lines = run(recipe, tmp_path / "run", "algorithm.steps=4", "warm_start.steps=10")
    weights = means(lines, "flow/next_kl_weight/mean")
    assert weights[0] < 0.02, "nothing has diverged yet, so the price falls"
    assert all(0 < weight < 0.03 for weight in weights)
    for name in ("flow/mean_divergence/mean", "critic/squared_error/mean", "critic/grad_norm/mean"):
        assert len(means(lines, name)) == 4


def test_greedy_answers_are_neither_recorded_nor_counted(tmp_path: Path) -> None:
    recipe = RECIPES / "remax" / "run.toml"
    settings = ("algorithm.steps=1", "warm_start.steps=1", "algorithm.samples_per_prompt=1")
    (line,) = run(recipe, tmp_path / "run", *settings)
    assert line["rollout/rows/sum"]["sum"] == 80
    rows = read_rollouts(tmp_path / "run", 2)
    assert len(rows) == 80 and {row.row.sample for row in rows} == {0}
    assert all(row.advantage is not None for row in rows)


def test_a_step_whose_groups_are_all_alike_learns_nothing_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "alike"
    shutil.copytree(RECIPES / "dapo", folder)
    (folder / "reward.py").write_text(
        "def one(prompts, completions, **_):\n    return [1.0] * len(prompts)\n"
    )
    settings = ("algorithm.steps=2", "warm_start.steps=1", "algorithm.overlong_buffer=0", *FEW)
    recipe, where = folder / "run.toml", 'reward.function="reward.py:one"'
    lines = run(recipe, tmp_path / "run", *settings, where)
    assert means(lines, "reward/flat_groups/share") == [1.0, 1.0]
    assert means(lines, "refill/kept/share") == [0.0, 0.0] and means(lines, "refill/rounds/mean") == [
        4.0,
        4.0,
    ]
    assert not any("policy/loss/mean" in line for line in lines), "there was no row to learn from"


def test_groups_that_agree_are_replaced_from_further_prompts_and_a_resume_draws_the_same(
    recipe: Path,
) -> None:
    """Every step trains its full number of varied groups; the stream continues where refills ended."""
    text = "def low(prompts, completions, **_):\n    return [float(text[:1] < '5') for text in completions]\n"
    (recipe.parent / "reward.py").write_text(text)
    options = {
        "loss.kl": 0,
        "minibatches": 1,
        "epochs": 1,
        "prompts_per_step": 5,
        "max_rounds": 9,
        "steps": 3,
    }
    settings = ['reward.function="reward.py:low"', "run.checkpoint_every=1", "run.keep_checkpoints=9"]
    settings += ["algorithm.name=dapo", *(f"algorithm.{key}={value}" for key, value in options.items())]
    whole = run(recipe, recipe.parent / "whole", *settings)
    assert max(means(whole, "refill/rounds/mean")) > 1
    for step, line in enumerate(whole, 7):
        drawn, kept = line["refill/groups/sum"]["sum"], line["refill/kept/share"]
        assert kept["count"] == drawn and round(kept["mean"] * drawn) == 5
        assert line["rollout/rows/sum"]["sum"] == 4 * drawn, "rows of all rounds are counted"
        rows = read_rollouts(recipe.parent / "whole", step)
        taught = [row for row in rows if row.advantage is not None]
        assert len(rows) == 4 * drawn and len(taught) == 20
        groups: dict[int, set[float]] = {}
        for row in taught:
            groups.setdefault(row.row.prompt, set()).add(row.reward or 0.0)
        assert all(len(rewards) > 1 for rewards in groups.values())
    shutil.copytree(recipe.parent / "whole", recipe.parent / "cut")
    (recipe.parent / "cut" / "finished.json").unlink()
    for step in (8, 9):
        shutil.rmtree(recipe.parent / f"cut/checkpoints/step-{step:06}")
    again = run(recipe, recipe.parent / "cut", *settings)
    assert [without_time(line) for line in again] == [without_time(line) for line in whole]
    states = [
        json.loads((recipe.parent / name / "checkpoints/step-000009/state.json").read_text())["stream"]
        for name in ("whole", "cut")
    ]
    drawn = sum(line["refill/groups/sum"]["sum"] for line in whole)
    assert states[0] == states[1] and states[0] == {"epoch": drawn // 60, "offset": drawn % 60, "rows": 60}


@pytest.mark.parametrize(
    "small", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["two steps", "until it rises"]
)
def test_the_best_are_imitated_and_their_divergence_stays_under_the_bound(
    small: bool, tmp_path: Path
) -> None:
    few = (
        "algorithm.steps=2",
        "warm_start.steps=12",
        "algorithm.threshold=0",
        "algorithm.prompts_per_step=8",
    )
    settings = ("algorithm.measure_kl=true", "evaluate.problems=2", *(few if small else ()))
    lines = run(RECIPES / IMITATES / "run.toml", tmp_path / "run", *settings)
    seen = means(lines, "reward/score/mean")
    assert small or mean(seen[-4:]) > mean(seen[:4]) + 0.1
    found, bound = (means(lines, f"flow/best_of_n_{each}/mean") for each in ("divergence", "bound"))
    assert [(one, most) for one, most in zip(found, bound, strict=True) if not 0 <= one < most] == []
    assert max(found) > 0 and bound == pytest.approx([1.2044] * len(bound), abs=1e-4)
    apart = means(lines, "flow/mean_divergence/mean")
    assert abs(apart[0]) < 1e-4 and apart[-1] > 0.02


def test_a_step_in_which_no_row_is_good_enough_learns_nothing_and_goes_on(tmp_path: Path) -> None:
    settings = (
        "algorithm.steps=2",
        "warm_start.steps=1",
        "algorithm.threshold=2.0",
        *FEW,
        "evaluate.problems=2",
    )
    lines = run(RECIPES / IMITATES / "run.toml", tmp_path / "run", *settings, *FEW)
    assert len(lines) == 2 and not any("supervised/loss/mean" in line for line in lines)


def test_best_of_n_that_would_keep_every_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep is 8 and samples_per_prompt 8"):
        load_recipe(RECIPES / IMITATES / "run.toml", ["algorithm.keep=8"])
