"""placement-blind, backend-blind: where roles run, and on what, changes no number."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rillflow.assembly.launch import launch
from rillflow.assembly.recipe import load_recipe

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
steps = 20
prompts_per_step = 33
lr = 3e-3
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 5
samples_per_prompt = 3
epochs = 2
minibatches = 2
loss.kl = 0.01
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
ONE_POOL = {"pools": {"main": 1}}
APART = {
    "backend": "inline",
    "pools": {"a": 1, "b": 1, "c": 1},
    "roles": {"policy": "a", "reference": "b", "reward": "c"},
}


def ran(folder: Path, placement: dict[str, Any]) -> tuple[list[Any], list[dict[str, float]]]:
    """What was sampled, and every step's losses."""
    folder.mkdir()
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    settings = [f"run.dir={json.dumps(str(folder / 'run'))}"]
    for name, value in placement.items():
        entries = value.items() if isinstance(value, dict) else ()
        settings += [f"placement.{name}.{key}={json.dumps(entry)}" for key, entry in entries]
        settings += [] if isinstance(value, dict) else [f"placement.{name}={json.dumps(value)}"]
    loaded = load_recipe(folder / "run.toml", settings)
    launch(loaded.recipe, loaded.base, quiet=True)
    rollouts = [
        (row["prompt_id"], row["sample"], row["tokens"], row["logprobs"])
        for file in sorted((folder / "run" / "rollouts").iterdir())
        for row in map(json.loads, file.read_text().splitlines())
    ]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [
        {name: value["mean"] for name, value in json.loads(line)["metrics"].items() if "loss/mean" in name}
        for line in lines
    ]
    return rollouts, losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[dict[str, float]]]:
    return ran(tmp_path_factory.mktemp("alone") / "tiny", ONE_POOL)


def test_roles_in_pools_of_their_own(tmp_path: Path, alone: tuple[Any, Any]) -> None:
    assert ran(tmp_path / "apart", APART) == alone


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_ranks_inline(ranks: int, tmp_path: Path, alone: tuple[Any, Any]) -> None:
    """Rows that do not divide by the ranks; rollouts are the same, losses within 1e-5 of each other.

    Steps are few: Adam divides a gradient by its own size, so rounding grows from step to step.
    """
    rollouts, losses = ran(tmp_path / "ranks", {"backend": "inline", "pools": {"main": ranks}})
    assert any(loss.get("policy/loss/mean") for loss in losses), "something was learned"
    assert [row[:3] for row in rollouts] == [row[:3] for row in alone[0]]
    for found, expected in zip(losses, alone[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ray_has_the_bits_of_inline(tmp_path: Path) -> None:
    """Two data-parallel ranks and a pool of its own for the reward."""
    placement = {"pools": {"main": 2, "scorer": 1}, "roles": {"reward": "scorer"}}
    inline = ran(tmp_path / "inline", {"backend": "inline", **placement})
    assert ran(tmp_path / "ray", {"backend": "ray", **placement}) == inline
