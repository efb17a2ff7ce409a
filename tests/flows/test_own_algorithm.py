"""An algorithm in a file of one's own: examples/best_of_n.py runs, resumes and learns."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest
import torch

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.assembly.recipe import Recipe, load_recipe
from rillflow.cli.main import main
from rillflow.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = EXAMPLES / "best_of_n.toml"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded("best_of_n")


def run(example: ModuleType, folder: Path, *settings: str) -> list[float]:
    """The mean reward of every step of the example's recipe."""
    words = [word for setting in settings for word in ("--set", setting)]
    words = ["run", str(RECIPE), "--dir", str(folder), "--quiet", *words]
    assert main(words, algorithms=[example.ALGORITHM]) == 0
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/score/mean"]["mean"] for line in lines if "reward/score/mean" in line]


def test_the_reward_rises(example: ModuleType, tmp_path: Path) -> None:
    seen = run(example, tmp_path / "run", "algorithm.steps=16")
    assert len(seen) == 16
    assert mean(seen[-4:]) > mean(seen[:4]) + 0.05


@pytest.mark.slow
def test_the_same_command_goes_on_from_a_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    small = ["algorithm.steps=4", "algorithm.prompts_per_step=8", "warm_start.steps=2"]
    small += ["run.checkpoint_every=2", "evaluate.problems=2"]
    seen = run(example, tmp_path / "run", *small)
    (tmp_path / "run" / "finished.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    assert run(example, tmp_path / "run", *small) == seen


def test_the_file_is_a_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "best_of_n.py"), "graph", str(RECIPE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "controller.is_best" in done.stdout


def test_best_is_the_first_of_the_highest_of_each_prompt(example: ModuleType) -> None:
    found = example.is_best(
        torch.tensor([0.0, 2.0, 1.0, 1.0, 9.0, 5.0]),
        torch.tensor([True, True, True, True, False, False]),
        torch.tensor([7, 7, 3, 3, 3, 1]),
    )
    assert found.tolist() == [False, True, True, False, False, False]


def test_only_who_brings_it_may_name_it(example: ModuleType) -> None:
    recipe = load_recipe(RECIPE, algorithms=[example.ALGORITHM]).recipe
    assert isinstance(recipe, Recipe)
    assert recipe.chosen is example.ALGORITHM
    with pytest.raises(ConfigError, match=r'algorithm\.name is "best_of_n"'):
        load_recipe(RECIPE)
    assert "best_of_n" not in Recipe.algorithms
    assert Recipe.algorithms is ALGORITHMS


def test_its_settings_and_its_graph_are_checked_like_any(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["graph", str(RECIPE), "--set", "warm_start=none"]
    assert main(words, algorithms=[example.ALGORITHM]) == 0
    assert "controller.is_best" in capsys.readouterr().out
    assert main([*words, "--set", "algorithm.samples=3"], algorithms=[example.ALGORITHM]) == 2
    assert "[algorithm] has no key 'samples'" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_a_file_run_as_a_script_updates_by_its_own_settings(backend: str, tmp_path: Path) -> None:
    """Classes of __main__ travel to ranks whose __main__ is another file."""
    if backend == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    small = ["algorithm.name=ranked", "algorithm.steps=2", "algorithm.prompts_per_step=4", "warm_start=none"]
    small += ["algorithm.strength=0.5", "evaluate.problems=2", f"placement.backend={backend}"]
    words = [word for setting in small for word in ("--set", setting)]
    command = [sys.executable, str(EXAMPLES / "ranked.py"), "run", str(RECIPE), "--dir", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"]["policy/version/max"]["max"] for line in lines] == [1, 2]


def test_advantages_by_rank_are_as_by_hand() -> None:
    """Of three answers the best beats two, ties beat nobody, and a row without a reward is left out."""
    ranked = loaded("ranked")
    found = ranked.rank_advantages(
        torch.tensor([5.0, 90.0, 6.0, 1.0, 1.0, 0.0, 0.0]),
        torch.tensor([True, True, True, True, True, False, True]),
        torch.tensor([7, 7, 7, 3, 3, 3, 1]),
        strength=2.0,
    )
    assert found.tolist() == [-2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
