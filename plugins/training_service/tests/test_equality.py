"""Equality: training through the service gives the bits of ``rillflow run`` on the same rows.

Divisors are powers of two, or the division is the client's in float32, so that the operations are the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.models.adapters import file_name
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model
from rillflow.runs import layout
from rillflow.runs.reader import read_metrics, rollout_columns
from rillflow_training_service.losses import LOSSES
from rillflow_training_service.shared_base import SharedBase
from rillflow_training_service.tenant import AdamParams, Tenant

sys.path.insert(0, str(Path(__file__).parent))
from toys import SMALL, Datum, datum, saved_model, weighted

ROWS, CONSTANT = 16, 4
RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "rows.jsonl"
held_out = 0
[policy]
lr = 1e-2
model.path = "base"
model.adapter = { rank = 4 }
[rollout]
max_rows = 32
max_tokens = 4
"""
GRPO = """
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 4
samples_per_prompt = 4
loss.kl = 0
loss.aggregation = "constant"
loss.constant = 4
[reward]
function = "reward.py:small"
"""
SFT = """
[algorithm]
name = "sft"
steps = 3
prompts_per_step = 8
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)


def ran(folder: Path, algorithm: str) -> Path:
    """Run a recipe; return its directory."""
    saved_model(folder / "base")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{index}+1=", "completion": f"{index + 1}"} for index in range(8)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "run.toml").write_text(RECIPE + algorithm)
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(folder / 'run'))}"])
    launch(loaded, quiet=True)
    return folder / "run"


def tenant(folder: Path) -> Tenant:
    """Return a new adapter as a client with the run's seed creates it."""
    base = load_model(ModelConfig(path=str(folder / "base")), seed=0, device=torch.device("cpu"), base=Path())
    return Tenant.new("a", SharedBase(base), SMALL, seed=3)


def trained(run: Path) -> dict[str, Tensor]:
    newest = max((run / layout.CHECKPOINTS).iterdir())
    return load_file(newest / "policy" / "adapter_model.safetensors")


def require_same(found: Tenant, run: Path) -> None:
    expected = trained(run)
    for name, weight in found.weights.items():
        assert torch.equal(weight.detach(), expected.pop(file_name(name))), name
    assert not expected


def losses(run: Path, name: str) -> list[float]:
    """Return a loss of every step."""
    return [each.metrics[name].value for each in read_metrics(run)]


def test_grpo_has_the_bits_of_a_run(tmp_path: Path) -> None:
    run = ran(tmp_path, GRPO)
    client, found = tenant(tmp_path), list[float]()
    for step in layout.rollout_files(run):
        columns: Any = rollout_columns(run, step)
        names = ("epoch", "prompt_id", "sample", "tokens", "versions", "advantage")
        kept = sorted(zip(*(columns[name] for name in names), strict=True))  # the order in which a run adds
        rows = [row(tokens, versions, advantage) for *_, tokens, versions, advantage in kept]
        assert len(rows) == ROWS
        known = client.run(rows, LOSSES["ppo"], {**LOSSES["ppo"].settings}, learns=False).logprobs
        own = [
            Datum(tokens=each.tokens, targets=each.targets, inputs={**each.inputs, "logprobs": now})
            for each, now in zip(rows, known, strict=True)
        ]
        found.append(client.run(own, LOSSES["ppo"], {**LOSSES["ppo"].settings}, learns=True).loss)
        client.step(ADAM)
    require_same(client, run)
    assert found == losses(run, "policy/loss/mean")


def row(tokens: list[int], versions: list[int], advantage: float) -> Datum:
    """Return a row with the advantage at its sampled tokens, divided as the run divides."""
    shares = [advantage / (ROWS * CONSTANT) if version >= 0 else 0.0 for version in versions[1:]]
    return datum(tokens, advantages=shares, logprobs=[0.0] * len(shares))


def test_supervised_training_has_the_bits_of_a_run(tmp_path: Path) -> None:
    run = ran(tmp_path, SFT)
    client = tenant(tmp_path)
    tokenizer = client.base.model.tokenizer
    texts = [(f"{index}+1=", f"{index + 1}") for index in range(8)]
    rows = [
        weighted(
            [*tokenizer.encode(prompt), *tokenizer.encode(answer), min(tokenizer.stop_tokens)], len(prompt)
        )
        for prompt, answer in texts
    ]
    count = sum(float(each.inputs["weights"].sum()) for each in rows)
    for each in rows:
        each.inputs["weights"].div_(count)
    found = list[float]()
    for _ in range(3):
        found.append(client.run(rows, LOSSES["cross_entropy"], {}, learns=True).loss)
        client.step(ADAM)
    require_same(client, run)
    assert found == pytest.approx(losses(run, "supervised/loss/mean"), rel=1e-6)
