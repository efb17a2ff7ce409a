"""Rewards are shaped before training, and a resumed run remembers the shaping."""

from __future__ import annotations

import json
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.controller.interrupt import Interruption
from rillflow.errors import ConfigError, Interrupted

RECIPE = """
[run]
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
held_out = 0
[rollout]
max_tokens = 4
[policy]
lr = 1e-3
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+-=" }
[reward]
function = "reward.py:length"
[algorithm]
name = "rloo"
steps = 4
prompts_per_step = 4
samples_per_prompt = 4
"""
SHAPE = 'algorithm.shape={normalise="running",clip=[-1.0,1.0],length_price=0.25}'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(
        "def length(prompts, completions):\n    return [10.0 * len(each) for each in completions]\n"
    )
    return tmp_path / "run.toml"


def ran(recipe: Path, run: str, *settings: str) -> Path:
    chosen = load_recipe(recipe, [f"run.dir={json.dumps(str(recipe.parent / run))}", *settings])
    return Path(launch(chosen, quiet=True).run)


def numbers(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in metrics.items() if k != "run/step_seconds/mean"} for metrics in found]


def test_raw_scores_are_measured_and_shaped_ones_are_learnt_from(recipe: Path) -> None:
    plain, shaped = numbers(ran(recipe, "plain")), numbers(ran(recipe, "shaped", SHAPE))
    assert plain[0]["reward/score/mean"] == shaped[0]["reward/score/mean"], "what the function said"
    assert plain[0]["train/grad_norm/mean"] != shaped[0]["train/grad_norm/mean"]
    tenth = ran(recipe, "tenth", 'algorithm.shape={normalise="batch"}')
    (recipe.parent / "reward.py").write_text(
        "def length(prompts, completions):\n    return [7.0 + len(each) for each in completions]\n"
    )
    other = ran(recipe, "other", 'algorithm.shape={normalise="batch"}')
    one, two = (numbers(run)[0]["train/grad_norm/mean"]["mean"] for run in (tenth, other))
    assert one == pytest.approx(two, rel=1e-4), "a scale and a shift of all rewards change nothing"


def test_a_resumed_run_goes_on_with_the_same_mean_and_deviation(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ran(recipe, "whole", SHAPE)
    asked = chain([False] * 3, repeat(True))  # read before and after each step
    monkeypatch.setattr(Interruption, "requested", property(lambda _: next(asked), lambda *_: None), False)
    with pytest.raises(Interrupted, match="after step 2"):
        ran(recipe, "cut", SHAPE)
    monkeypatch.undo()
    assert numbers(ran(recipe, "cut", SHAPE)) == numbers(whole)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["algorithm.shape={clip=[1.0,-1.0]}"], "smaller bound first"),
        (["algorithm.shape={normalise='all'}"], "normalise"),
        (["algorithm.name=remax", "algorithm.shape={normalise='batch'}"], "of greedy answers and of samples"),
    ],
)
def test_shapes_that_cannot_be_are_refused(recipe: Path, settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, settings)
    assert why in str(caught.value)
