"""Whole runs whose weights and gradients travel through codecs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.runs.run_data import load

RECIPE = """
[run]
threads = 1
seed = 3
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 60
held_out = 0
[policy]
lr = 1e-4
model.new = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }
model.dtype = "bfloat16"
[rollout]
max_tokens = 3
[algorithm]
name = "grpo"
steps = 4
prompts_per_step = 8
samples_per_prompt = 4
[reward]
function = "reward.py:low"
[placement]
backend = "inline"
pools = { main = 2, answers = 1 }
roles = { sampler = "answers" }
"""
REWARD = """
def low(prompts, completions, **columns):
    return [float(sum(each < "5" for each in text)) for text in completions]
"""
FLOAT32 = "policy.model.dtype=float32"


def trained(folder: Path, name: str, *changes: str) -> tuple[bytes, dict[str, float]]:
    """Run; return the weights of the last checkpoint, and the metrics of links of the last step."""
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    if not (folder / "base").exists():
        new = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=16, alphabet="0123456789+=")
        model = ModelConfig(new=new, dtype="bfloat16")
        save_model(load_model(model, seed=0, device=torch.device("cpu"), base=Path()), folder / "base")
    words = [f"run.dir={json.dumps(str(folder / name))}", *changes]
    launch(load_recipe(folder / "run.toml", words), quiet=True)
    newest = max((folder / name / "checkpoints").iterdir()) / "policy"
    last = load(folder / name).steps[-1].metrics
    links = {key: each.value for key, each in last.items() if key.startswith("links/")}
    return next(newest.glob("*.safetensors")).read_bytes(), links


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("schedule.mode=ahead", "schedule.freshness=1"),
        ("policy.model.new=none", "policy.model.path=base", "policy.model.adapter={ rank = 4 }"),
    ],
    ids=["in order", "ahead", "adapter"],
)
def test_differences_of_weights_change_no_bit(tmp_path: Path, changes: tuple[str, ...]) -> None:
    plain, nothing = trained(tmp_path, "plain", *changes)
    coded, links = trained(tmp_path, "coded", *changes, "links.weights=delta", "links.full_every=100")
    assert coded == plain and not nothing
    sent, whole = links["links/weight_sent_bytes/mean"], links["links/weight_bytes/mean"]
    assert 0 < sent < 0.7 * whole, "bfloat16 weights move little"


@pytest.mark.parametrize(
    "codec",
    ["dct", *(pytest.param(each, marks=pytest.mark.slow) for each in ("cast", "top_k", "sparse_loco"))],
)
def test_a_resumed_run_sums_gradients_as_an_uninterrupted_one(tmp_path: Path, codec: str) -> None:
    how = (f"links.gradients={codec}", "links.lifespan=3", "links.share=0.05", FLOAT32)
    weights, links = trained(tmp_path, "whole", *how)
    least = {"cast": 1.9, "top_k": 5, "dct": 5, "sparse_loco": 15}[codec]
    assert links["links/gradient_bytes/mean"] > least * links["links/gradient_sent_bytes/mean"]
    trained(tmp_path, "cut", *how, "algorithm.steps=2")
    assert trained(tmp_path, "cut", *how)[0] == weights
