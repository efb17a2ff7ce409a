"""An algorithm in a file of one's own: examples/best_of_n.py runs, resumes and learns."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
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


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("best_of_n", EXAMPLES / "best_of_n.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["best_of_n"] = module
    spec.loader.exec_module(module)
    return module


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
