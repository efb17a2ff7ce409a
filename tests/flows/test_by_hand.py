"""The explicit loop of examples/grpo_by_hand.py and the assembled run are the same computation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = """
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 90
held_out = 10
[policy]
lr = 3e-3
model.new = { hidden = 32, layers = 2, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
[reward]
function = "reward.py:low"
[algorithm]
name = "grpo"
steps = 6
prompts_per_step = 16
samples_per_prompt = 8
minibatches = 2
"""
REWARD = """
def low(prompts, completions, **columns):
    return [sum(letter < "5" and letter.isdigit() for letter in answer) / 4 for answer in completions]
"""


def test_both_doors_lead_to_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("grpo_by_hand", ROOT / "examples" / "grpo_by_hand.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    by_hand = example.main()
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    loaded = load_recipe(tmp_path / "run.toml", [f"run.dir={json.dumps(str(tmp_path / 'run'))}"])
    launch(loaded, quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assembled = [json.loads(line)["metrics"] for line in lines]
    assert [step["loss"] for step in by_hand] == [
        metrics["policy/loss/mean"]["mean"] for metrics in assembled
    ]
    assert [step["reward"] for step in by_hand] == [
        metrics["reward/score/mean"]["mean"] for metrics in assembled
    ]
    assert by_hand[-1]["reward"] > by_hand[0]["reward"]
