"""The command line starts within half a second and imports nothing heavy."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "rich",
    "ray",
    "vllm",
    "pyarrow",
    "safetensors",
    "pydantic",
)
HELP_S = 0.5
ERROR_S = 2.0
CHECK_S = 2.0
"""Limit for checking a recipe with all rows as tokens; an idle core needs half of it."""


def imported_by(code: str) -> set[str]:
    """Return the modules of a new interpreter after some code."""
    script = f"{code}\nimport sys\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("MODULES", 1)[1].split())


def best_of(times: int, *arguments: str, code: int) -> float:
    """Return the least CPU seconds of several runs of a command; other load can only add to them."""
    command = [str(Path(sys.executable).with_name("rillflow")), *arguments]
    taken = []
    for _ in range(times):
        began = processor_s()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        taken.append(processor_s() - began)
        assert done.returncode == code, done.stderr
    return min(taken)


def processor_s() -> float:
    """Return the CPU seconds of ended children."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"from rillflow.cli.main import main\ntry: main({arguments})\nexcept SystemExit: pass"
    assert imported_by(code) & set(HEAVY) == set()


def test_importing_the_package_imports_nothing_heavy_and_its_door_no_torch() -> None:
    assert imported_by("import rillflow") & {*HEAVY, "rillflow.errors"} == set()
    opened = imported_by("import rillflow\nrillflow.train, rillflow.open_run, rillflow.Run")
    assert opened & {"torch", "transformers", "ray"} == set()


def test_the_scan_can_fail() -> None:
    assert "numpy" in imported_by("import numpy")


def test_help_takes_less_than_half_a_second() -> None:
    assert best_of(5, "--help", code=0) < HELP_S


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_wrong_setting_is_found_before_torch_is_loaded(command: str, root: Path) -> None:
    arguments = [command, str(root / "recipes/arithmetic/run.toml"), "--set", "policy.lr=-1"]
    assert (
        imported_by(f"from rillflow.cli.main import main\nassert main({arguments}) == 2") & {"torch"} == set()
    )
    assert best_of(3, *arguments, code=2) < ERROR_S


def test_a_graph_is_drawn_without_torch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    arguments = ["graph", "recipes/remax/run.toml"]
    there = imported_by(f"from rillflow.cli.main import main\nassert main({arguments}) == 0")
    assert there & {"torch", "transformers", "ray"} == set()


def test_a_recipe_of_a_new_model_is_checked_without_torch_and_transformers(root: Path) -> None:
    """The ``tokenizers`` library alone tokenizes its rows."""
    arguments = ["check", str(root / "recipes/arithmetic/run.toml")]
    there = imported_by(f"from rillflow.cli.main import main\nassert main({arguments}) == 0")
    assert "tokenizers" in there and there & {"torch", "transformers"} == set()
    assert best_of(2, *arguments, code=0) < CHECK_S
