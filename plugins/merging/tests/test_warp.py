"""WARP in small: what is merged is what was trained, and the next round really begins with it."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import rillflow
from rillflow.cli.main import main

RECIPE = Path(__file__).parents[3] / "recipes" / "warp"
SMALL = {
    "algorithm.steps": 1,
    "algorithm.prompts_per_step": 4,
    "algorithm.samples_per_prompt": 2,
    "algorithm.minibatches": 1,
    "policy.warmup_steps": 0,
    "rollout.max_rows": 8,
    "evaluate.problems": 0,
    "reward.function": "reward.py:small",
}
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The recipe's script, with a start of two batches."""
    spec = importlib.util.spec_from_file_location("warp_recipe", RECIPE / "warp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("start.toml", "run.toml"):
        text = (
            (RECIPE / name)
            .read_text()
            .replace("steps = 80", "steps = 2")
            .replace("hidden = 48", "hidden = 16")
        )
        (tmp_path / name).write_text(text.replace("held_out = 20", "held_out = 0"))
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def weights(folder: Path) -> torch.Tensor:
    held = load_file(folder / "model.safetensors")
    return torch.cat([held[name].double().flatten() for name in sorted(held)])


def test_every_round_begins_with_what_the_last_one_made(recipe: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "warp"
    starts = recipe.warp(folder, rounds=2, policies=2, eta=0.25, settings=SMALL, quiet=True)
    assert [path.name for path in starts] == ["start-1", "start-2", "start-3"]
    for number, (start, after) in enumerate(itertools.pairwise(starts), 1):
        runs = [rillflow.open_run(folder / f"round-{number}" / f"policy-{policy}") for policy in (1, 2)]
        began = weights(start)
        for run in runs:
            assert Path(str(run.settings["policy"]["model"]["path"])) == start.absolute()
            assert torch.equal(weights(run.path / "reference"), began)
        trained = [weights(run.checkpoint()) for run in runs]
        assert not torch.equal(trained[0], trained[1])
        merged = weights(folder / f"{after.name}-merged")
        assert all(float((merged - each).norm()) > 0 for each in trained)
        assert float((merged - began).norm()) >= 0.9 * min(float((each - began).norm()) for each in trained)
        torch.testing.assert_close(weights(after), 0.75 * began + 0.25 * merged, rtol=0, atol=1e-7)
        assert not torch.equal(weights(after), began)
    out = tmp_path / "of-runs"  # a run stands for its newest policy
    assert main(["merge", *(str(run.path) for run in runs), "--out", str(out)]) == 0
    torch.testing.assert_close(weights(out), (trained[0] + trained[1]) / 2, rtol=0, atol=1e-7)
    again = recipe.warp(folder, rounds=2, policies=2, eta=0.25, settings=SMALL, quiet=True)
    assert again == starts
