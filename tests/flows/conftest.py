"""Recipes that run end to end in seconds, and helpers for tests of whole runs."""

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
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 20

[policy]
lr = 1e-3
model.new = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }

[rollout]
max_rows = 64
max_tokens = 4

[warm_start]
steps = 6
prompts_per_step = 32
lr = 3e-3

[algorithm]
name = "grpo"
steps = 6
prompts_per_step = 6
samples_per_prompt = 4
epochs = 2
minibatches = 2
loss.kl = 0.01

[evaluate]
problems = 20
every = 3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return the path of a recipe in a new folder."""
    return written(tmp_path)


@pytest.fixture(scope="module")
def shared_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the same recipe, shared by all tests of a file."""
    return written(tmp_path_factory.mktemp("shared"))


def written(folder: Path) -> Path:
    """Write the recipe as a file; return its path."""
    path = folder / "tiny" / "run.toml"
    path.parent.mkdir()
    path.write_text(RECIPE)
    return path


TINY = """
[run]
seed = 3
threads = 1
[reward]
function = "scores.py:reward"
[policy]
lr = 1e-3
model.new = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[algorithm]
name = "grpo"
prompts_per_step = 4
samples_per_prompt = 2
"""
"""The head of a recipe whose runs take a second; the rest of its algorithm and the task follow."""
SUMS = """[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 60
held_out = 10
"""
"""Its task, for recipes with sums."""
SAMPLER_ON_RAY = """[placement]
backend = "ray"
pools = { main = 1, answers = 1 }
roles = { sampler = "answers" }
"""
"""Its placement, for a sampler on its own rank on Ray."""
REWARD = "def reward(prompts, completions, **_):\n    return [len(text) / 3 for text in completions]\n"
TIMES = {"run/step_seconds/mean"}


class Tiny:
    """A folder with a tiny recipe, its reward, and its runs by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "run.toml"

    def write(self, rest: str, reward: str = REWARD) -> None:
        """Write the recipe with ``rest`` after its head, and the reward."""
        self.recipe.write_text(TINY + rest)
        (self.folder / "scores.py").write_text(reward)

    def write_rows(self, count: int, **other: str) -> None:
        """Write the prompts ``0+1=``, ``1+1=`` ... into prompts.jsonl; ``p3`` is another at place 3."""
        prompts = [other.get(f"p{n}", f"{n}+1=") for n in range(count)]
        rows = [{"prompt": prompt, "answer": str(n + 1)} for n, prompt in enumerate(prompts)]
        (self.folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(self, name: str, *settings: str) -> int:
        """Return the exit code of ``rillflow run`` in the run's directory."""
        words = [word for setting in settings for word in ("--set", setting)]
        return main(["run", str(self.recipe), "--dir", str(self.folder / name), *words])

    def lines(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Return the records of a run's file."""
        return [json.loads(line) for line in (self.folder / name / file).read_text().splitlines()]

    def numbers(self, name: str) -> list[dict[str, Any]]:
        """Return every step's metrics without times."""
        found = [line["metrics"] for line in self.lines(name)]
        return [{key: value for key, value in each.items() if key not in TIMES} for each in found]

    def steps_kept(self, name: str) -> list[int]:
        """Return the steps of a run's checkpoints."""
        found = (self.folder / name / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def assert_same(self, one: str, other: str) -> None:
        """Check that two runs have the same numbers, and bit-identical final weights and moments."""
        assert self.numbers(one) == self.numbers(other)
        self.assert_same_weights(one, other)

    def assert_same_weights(self, one: str, other: str) -> None:
        """Check that two runs end with bit-identical weights and moments."""
        newest = [max((self.folder / run / "checkpoints").glob("step-*")) for run in (one, other)]
        assert newest[0].name == newest[1].name
        is_adapter = (newest[0] / "policy" / "adapter_config.json").exists()
        weights = f"policy/{'adapter_' * is_adapter}model.safetensors"
        for file in (weights, "policy.optimizer/rank-00000.safetensors"):
            first, second = (load_file(folder / file) for folder in newest)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first), file


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """Return a folder for tiny runs."""
    return Tiny(tmp_path)
