"""Every algorithm's recipe learns; Safe RLHF's is in test_safe_rlhf.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes"
EVERY_DAY = ("dapo", "ppo", "remax")
OTHERS = ("dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo")
STEPS = 14


def run(recipe: Path, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The metrics of every step that sampled."""
    options = [word for setting in settings for word in ("--set", setting)]
    assert main(["run", str(recipe), "--dir", str(folder), "--quiet", *options]) == 0
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/score/mean" in line]


def means(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [line[name]["mean"] for line in lines]


def rise(lines: Sequence[dict[str, Any]]) -> float:
    seen = means(lines, "reward/score/mean")
    return mean(seen[-3:]) - mean(seen[:4])


def test_every_algorithm_that_samples_has_a_recipe() -> None:
    sampled = {"grpo": "arithmetic"}
    for name in ALGORITHMS.keys() - {"sft", "preference"}:
        assert (RECIPES / sampled.get(name, name) / "run.toml").is_file(), name
    assert set(EVERY_DAY) | set(OTHERS) | {"safe_rlhf", "grpo"} == ALGORITHMS.keys() - {"sft", "preference"}


@pytest.mark.parametrize("name", EVERY_DAY)
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    lines = run(RECIPES / name / "run.toml", tmp_path / "run", f"algorithm.steps={STEPS}")
    assert len(lines) == STEPS
    assert rise(lines) > 0.04


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_reward_rises_more_slowly_watched(name: str, tmp_path: Path) -> None:
    assert rise(run(RECIPES / name / "run.toml", tmp_path / "run")) > 0.1


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
    (file,) = (tmp_path / "run" / "rollouts").glob("*.jsonl")
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    assert len(rows) == 80 and {row["sample"] for row in rows} == {0}
    assert all("advantage" in row for row in rows)


def test_a_step_whose_groups_are_all_alike_learns_nothing_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "alike"
    shutil.copytree(RECIPES / "dapo", folder)
    (folder / "reward.py").write_text(
        "def one(prompts, completions, **_):\n    return [1.0] * len(prompts)\n"
    )
    settings = ("algorithm.steps=2", "warm_start.steps=1", "algorithm.overlong_buffer=0")
    lines = run(folder / "run.toml", tmp_path / "run", *settings, 'reward.function="reward.py:one"')
    assert means(lines, "reward/flat_groups/share") == [1.0, 1.0]
    assert means(lines, "policy/loss/mean") == [0.0, 0.0]
