"""The core works without any plugin or part: a copy of the repository loses one's folder and still works.

    repository ─ copy, with an environment ─┬─ remove plugins/NAME         ─> imports, commands, tests
                                            ├─ remove rillflow_parts/NAME  ─> the same
                                            └─ remove rillflow_parts       ─> the same

To Python this looks like an editable install whose folder was deleted: only its metadata is left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.plugins import PARTS, SHIPPED
from rillflow.cli.main import COMMANDS
from tests.architecture.test_layers import modules

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "mutation"))
from copies import copy_files, interpreter, make_environment

ROOT = Path(__file__).parents[2]
EVERY_PART = "rillflow_parts"
"""Name of the case without any part."""
RECIPE = "recipes/arithmetic/run.toml"


@dataclass(frozen=True, kw_only=True)
class Without:
    """A copy of the repository without some plugins or parts."""

    names: frozenset[str]
    """Names of those that are gone."""
    copy: Path
    """Root of the copy."""

    def run(self, *words: str, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command of the copy's environment."""
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [str(interpreter(self.copy).with_name(words[0])), *words[1:]]
        return subprocess.run(
            command,
            cwd=self.copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )


CASES = [*sorted(SHIPPED), EVERY_PART, *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS)]
"""What a copy lacks; the everyday tests lose all parts together."""


@pytest.fixture(scope="module", params=CASES)
def without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Without:
    """Return a copy of the repository without each plugin and part in turn, then without every part."""
    name, copy = str(request.param), tmp_path_factory.mktemp("copies") / "copy"
    copy_files(ROOT, copy)
    make_environment(copy)
    folders = {EVERY_PART: copy / EVERY_PART, **{part: copy / EVERY_PART / part for part in PARTS}}
    shutil.rmtree(folders.get(name, copy / "plugins" / name))
    return Without(names=frozenset(PARTS if name == EVERY_PART else {name}), copy=copy)


def test_every_folder_of_plugins_is_shipped() -> None:
    assert {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")} == SHIPPED.keys()


def test_the_package_is_imported_and_the_other_plugins_are_found(without: Without) -> None:
    code = (
        "import rillflow; from rillflow.app.plugins import installed; print(rillflow.__file__, *installed())"
    )
    done = without.run("python", "-c", code)
    file, *found = done.stdout.split()
    assert Path(file).is_relative_to(without.copy)
    assert set(found) == {*SHIPPED, *PARTS} - without.names


def test_help_names_every_command(without: Without) -> None:
    done = without.run("rillflow", "--help")
    assert done.returncode == 0, done.stderr
    first_words = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ")]
    brought = {**SHIPPED, **PARTS}
    assert {*COMMANDS, *(name for names in brought.values() for name in names)} <= set(first_words)
    absent = sum(len(brought[name]) for name in without.names)
    assert " ".join(done.stdout.split()).count("not installed)") == absent


def test_a_recipe_is_checked(without: Without) -> None:
    done = without.run("rillflow", "check", RECIPE)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("ready"), done.stderr


def test_a_command_of_the_plugin_names_the_line_that_installs_it(without: Without) -> None:
    for plugin in without.names:
        line = "pip install -e ." if plugin in PARTS else f"pip install ./plugins/{plugin}"
        for name in {**SHIPPED, **PARTS}[plugin]:
            done = without.run("rillflow", name, RECIPE, "--option", "value")
            assert done.returncode == 2 and f"rillflow {name} needs the" in done.stderr
            assert done.stderr.rstrip().endswith(line)


def test_a_run_ends_without_any_part_and_names_its_missing_report(without: Without) -> None:
    if without.names != set(PARTS):
        pytest.skip("the parts are there")
    settings = ("warm_start.steps=1", "policy.warmup_steps=0", "algorithm.steps=1", "evaluate.problems=2")
    words = [word for setting in (*settings, "algorithm.prompts_per_step=4") for word in ("--set", setting)]
    done = without.run("rillflow", "run", RECIPE, "--dir", "run", *words)
    assert done.returncode == 0, done.stderr
    assert "the report needs the part report" in done.stdout + done.stderr
    assert (without.copy / "run/finished.json").exists()


def test_predicting_a_run_needs_the_planner(without: Without) -> None:
    if "planner" not in without.names:
        pytest.skip("the planner is there")
    done = without.run("rillflow", "run", RECIPE, "--cluster", "clusters/laptop.toml")
    assert done.returncode == 2 and "pip install ./plugins/planner" in done.stderr
    assert not (without.copy / "runs").exists()


def test_no_test_of_the_core_imports_a_plugin_or_a_part(everything: list[Any]) -> None:
    core = [source for source in everything if re.match(r"tests/(?!parts/|vllm/)", source.path)]
    assert len(core) > 100 and [line for source in core for line in imports_of_plugins(source)] == []


def imports_of_plugins(source: Any) -> list[str]:
    """Return the imports of a file that only a folder of a plugin, or of parts, provides."""
    found = [name for name in modules(source.tree) if re.match(r"rillflow_|plugins\.", name)]
    return [f"{source.path} imports {name}" for name in found]


def test_the_scan_can_fail(source: Any) -> None:
    text = "def f():\n    from rillflow_planner.search import search\nimport plugins.a.tests, rillflow.app"
    assert len(imports_of_plugins(source("tests/a.py", text))) == 2


@pytest.mark.slow
def test_all_tests_of_the_core_are_collected(without: Without) -> None:
    done = without.run(
        "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "tests",
        "--ignore=tests/parts",
        "--ignore=tests/vllm",
        limit_s=280.0,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_unit_tests_of_the_core_pass(without: Without) -> None:
    words = ("pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/unit")
    done = without.run("python", "-m", *words, limit_s=3600.0)
    assert done.returncode == 0, done.stdout[-5000:]
