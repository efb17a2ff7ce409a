"""Whole runs through vLLM: in the trainer's process, and in a pool of the sampler's own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rillflow.assembly.launch import launch
from rillflow.assembly.recipe import load_recipe
from rillflow.errors import WeightError
from rillflow.observe import layout
from rillflow.observe.reader import read_metrics, rollout_columns

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
sys.path.insert(0, str(Path(__file__).parent))
from damaged import KINDS

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
)
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
lr = 1e-3
model.new = { hidden = 128, layers = 2, heads = 4, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 8
samples_per_prompt = 3
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


def ran(folder: Path, *settings: str) -> list[Any]:
    """The tokens of every rollout."""
    folder.mkdir()
    written(folder)
    run = folder / "run"
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(run))}", *settings])
    launch(loaded.recipe, loaded.base, quiet=True)
    return tokens(run)


def written(folder: Path) -> None:
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)


def tokens(run: Path) -> list[Any]:
    return [rollout_columns(run, step)["tokens"] for step in layout.rollout_files(run)]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ran(tmp_path_factory.mktemp("native") / "run")


def share_alike(found: list[Any], expected: list[Any]) -> float:
    """Of the rows of all steps, those with the same tokens."""
    pairs = [
        pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


def test_a_run_in_the_trainers_process_samples_what_the_native_engine_samples(
    tmp_path: Path, native: list[Any]
) -> None:
    """Every step's weights arrive: rounding, which training carries on, turns few tokens."""
    found = ran(tmp_path / "run", 'rollout.engine="vllm"')
    assert found[0] == native[0] and share_alike(found, native) > 0.9
    gaps = [each.metrics["mismatch/logprob_gap/max"].value for each in read_metrics(tmp_path / "run/run")]
    assert len(gaps) == 3 and max(gaps) < 1e-5


APART = ['placement.roles={ sampler = "answers" }', "placement.pools={ main = 1, answers = 1 }"]


def test_a_sampler_apart_samples_by_it(tmp_path: Path, native: list[Any]) -> None:
    found = ran(tmp_path / "run", 'rollout.engine="vllm"', *APART, "placement.backend=inline")
    assert found[0] == native[0] and share_alike(found, native) > 0.9


@pytest.mark.parametrize("damage", [each.capitalize() for each in KINDS])
def test_weights_that_did_not_arrive_whole_sample_nothing(damage: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="does not sample with version 1: a token of a fixed text"):
        ran(tmp_path / "run", f'rollout.engine="damaged_engine:{damage}"', "policy.lr=0.03")


def test_ready_first_rows_run_on_through_publishes(tmp_path: Path) -> None:
    ahead = ["algorithm.freshness=1", 'algorithm.order="ready_first"', "placement.backend=inline"]
    assert len(ran(tmp_path / "run", 'rollout.engine="vllm"', *APART, *ahead)) == 3


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("answers", [1, 2])
def test_it_has_a_pool_of_its_own_on_ray(answers: int, tmp_path: Path, native: list[Any]) -> None:
    """A process of its own begins it: vLLM, here already, has imported Ray before it could be protected."""
    written(tmp_path)
    pools = f"placement.pools={{ main = 1, answers = {answers} }}"
    settings = [f"run.dir={json.dumps(str(tmp_path / 'run'))}", 'rollout.engine="vllm"', APART[0], pools]
    command = [sys.executable, "-c", "from rillflow.cli.main import main; main()", "run"]
    given = [part for each in settings for part in ("--set", each)]
    subprocess.run([*command, str(tmp_path / "run.toml"), *given], check=True, timeout=280)
    found = tokens(tmp_path / "run")
    assert found[0] == native[0] and share_alike(found, native) > 0.9
