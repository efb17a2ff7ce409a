"""An update that is not finite is left out, told, kept, and made again by ``rillflow replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.cli.main import main

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "prompts.jsonl"
held_out = 0
[reward]
function = "scores.py:reward"
[policy]
lr = 1e-3
model.new = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[algorithm]
name = "grpo"
steps = 5
prompts_per_step = 4
samples_per_prompt = 2
minibatches = 2
scale = "off"
"""
REWARD = """
from pathlib import Path
HUGE = Path(__file__).with_name("huge")

def reward(prompts, completions, **_):
    scores = [len(text) / 3 for text in completions]
    for row, prompt in enumerate(prompts):
        if HUGE.exists() and prompt == "5+1=" and row % 2 == 0:
            scores[row] = 3e38
    return scores
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "scores.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "huge").touch()
    return tmp_path / "run.toml"


def run(recipe: Path, *settings: str, folder: str = "run") -> int:
    words = [word for setting in settings for word in ("--set", setting)]
    return main(["run", str(recipe), *words, "--dir", str(recipe.parent / folder)])


def lines(recipe: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.parent / "run" / name).read_text().splitlines()]


def test_it_is_left_out_and_counted_its_rows_are_named_and_a_replay_finds_the_one(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe) == 0
    left_out = lines(recipe, "skips.jsonl")
    steps = [line["step"] for line in left_out]
    assert steps and set(steps) < {1, 2, 3, 4, 5}
    said = capsys.readouterr().out
    assert f"an update of the policy in step {steps[0]} was left out: {left_out[0]['reason']}" in said
    counted = {line["step"]: line["metrics"] for line in lines(recipe, "metrics.jsonl")}
    for step, metrics in counted.items():
        skipped = metrics["train/skipped/sum"]["sum"] if step in steps else 0
        assert skipped == steps.count(step)
        assert ("train/skipped/sum" in metrics) == (step in steps)
        updates = metrics["train/grad_norm/mean"]["count"] if "train/grad_norm/mean" in metrics else 0
        assert updates == 2 - skipped
    assert all(any(prompt == 5 for _, prompt, _ in line["rows"]) for line in left_out)
    bundle = recipe.parent / "run" / "bundles" / f"step-{steps[0]:06d}"
    assert main(["replay", str(bundle)]) == 1
    said = capsys.readouterr().out
    assert f"the run found  {left_out[0]['reason']}" in said
    assert "first here     row (epoch 0 prompt 5 sample" in said
    (bundle / "config.json").write_text("{}")
    assert main(["replay", str(bundle)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["replay", str(bundle.parent)]) == 2
    assert "is no bundle" in capsys.readouterr().err


def test_a_spent_budget_stops_with_a_checkpoint_and_a_larger_one_goes_on_to_the_same_bits(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, folder="whole") == 0
    assert run(recipe, "run.max_skipped=0") == 1
    step = lines(recipe, "skips.jsonl")[0]["step"]
    error = capsys.readouterr().err
    assert "run.max_skipped is 0" in error and "not finite" in error
    assert f"bundles/step-{step:06d}" in error
    assert (recipe.parent / "run" / "checkpoints" / f"step-{step:06d}").is_dir()
    assert run(recipe, "run.max_skipped=9") == 0
    one, other = (
        load_file(recipe.parent / folder / "checkpoints/step-000005/policy/model.safetensors")
        for folder in ("run", "whole")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp = 2", "fsdp = 2", "tp = 2", "pp = 2"])
def test_ranks_leave_it_out_together(recipe: Path, mesh: str) -> None:
    where = ("placement.pools={main=2}", f"placement.train={{main={{{mesh}}}}}")
    assert run(recipe, "policy.model.new.layers=2", "policy.model.new.kv_heads=2", *where) == 0
    left_out = lines(recipe, "skips.jsonl")
    assert left_out and all(len(line["rows"]) == 4 for line in left_out)
    bundle = recipe.parent / "run" / "bundles" / f"step-{left_out[0]['step']:06d}"
    assert main(["replay", str(bundle)]) == 1
