"""A recipe small enough to run end to end in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    """The path of a recipe in a folder of its own."""
    return written(tmp_path)


@pytest.fixture(scope="module")
def shared_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the same recipe, for all tests of a file."""
    return written(tmp_path_factory.mktemp("shared"))


def written(folder: Path) -> Path:
    """The recipe as a file."""
    path = folder / "tiny" / "run.toml"
    path.parent.mkdir()
    path.write_text(RECIPE)
    return path
