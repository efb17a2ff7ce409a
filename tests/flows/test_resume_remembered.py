"""Contract crash-equivalence for steps that remember numbers and train critics.

The reward function holds the run in the middle of a step, so that it ends there.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.main import main
from tests.flows.held import ended_in_the_middle, write_scores

RECIPE = """
[run]
seed = 3
threads = 1
checkpoint_every = 2
[task]
source = "arithmetic"
digits = 1
operators = "+"
held_out = 0
[reward]
function = "scores.py:reward"
timeout_s = 100
sandbox = false
[policy]
lr = 1e-3
model.new = {{ hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }}
[rollout]
max_tokens = 4
[warm_start]
steps = 3
prompts_per_step = 32
lr = 3e-3
[algorithm]
name = "{name}"
steps = 6
prompts_per_step = 8
samples_per_prompt = 4
minibatches = 2
kl_target = 0.5
loss.kl = 0.02
"""
COST = """
cost_limit = 0.2
multiplier_lr = 0.3
[cost]
function = "scores.py:cost"
"""
REMEMBERED = {"ppo": {"kl_weight"}, "safe_rlhf": {"kl_weight", "log_multiplier"}}
CRITICS = {"ppo": {"critic"}, "safe_rlhf": {"critic", "cost_critic"}}
HELD_IN_STEP = 5
LOADED = {Path("policy", "tokenizer_config.json"), Path("manifest.json")}
"""Files that differ: transformers records that a tokenizer came from a directory, hence another digest."""


def written(folder: Path, name: str) -> Path:
    """Write a recipe in a folder and return its path."""
    (folder / "run.toml").write_text(RECIPE.format(name=name) + (COST if name == "safe_rlhf" else ""))
    write_scores(folder)
    return folder / "run.toml"


def numbers(run: Path) -> list[tuple[int, str, dict[str, Any]]]:
    """Return every step's metrics without the time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["metrics"]["run/step_seconds/mean"]
    return [(line["step"], line["phase"], line["metrics"]) for line in lines]


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("ppo", signal.SIGKILL, id="ppo"),
        pytest.param("safe_rlhf", signal.SIGTERM, id="safe_rlhf", marks=pytest.mark.slow),
    ],
)
def test_remembered_numbers_and_critics_resume_bit_for_bit(
    name: str, how: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, whole, run = written(tmp_path, name), tmp_path / "whole", tmp_path / "run"
    assert main(["run", str(recipe), "--dir", str(whole), "--quiet"]) == 0
    state = json.loads((newest(whole) / "state.json").read_text())
    assert state["numbers"].keys() == REMEMBERED[name]
    assert state["numbers"]["kl_weight"] != 0.02, "a weight that never moved would resume whatever is done"

    ended_in_the_middle(recipe, run, HELD_IN_STEP, how)
    kept = 4 if how is signal.SIGKILL else 5
    assert json.loads((newest(run) / "state.json").read_text())["done"] == kept
    capsys.readouterr()
    assert main(["run", str(recipe), "--dir", str(run)]) == 0
    assert f"resuming after step {3 + kept}" in "".join(capsys.readouterr())

    assert numbers(run) == numbers(whole)
    files = {path.relative_to(newest(whole)) for path in newest(whole).rglob("*") if path.is_file()} - LOADED
    assert {Path(role, "model.safetensors") for role in CRITICS[name]} < files
    assert {Path(f"{role}.optimizer/rank-00000.safetensors") for role in (*CRITICS[name], "policy")} < files
    for file in files:
        assert (newest(run) / file).read_bytes() == (newest(whole) / file).read_bytes(), file
    for file in (whole / "rollouts").iterdir():
        assert (run / "rollouts" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_step(tmp_path: Path) -> None:
    """The interrupted step is repeated."""
    recipe, run = written(tmp_path, "ppo"), tmp_path / "run"
    errors = ended_in_the_middle(recipe, run, HELD_IN_STEP, signal.SIGINT, signal.SIGINT)
    assert "a run keeps everything up to its last checkpoint" in errors
    assert json.loads((newest(run) / "state.json").read_text())["done"] == 4
