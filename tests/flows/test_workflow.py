"""The workflow of recipes/workflow: all stages in small, and a merge of two of its checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rillflow.app.plugins import installed, missing
from rillflow.runs.reader import read_evaluations

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "workflow" / "workflow.py"
pytestmark = pytest.mark.slow


def ran(*words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the workflow runs."""
    return tmp_path_factory.mktemp("workflow")


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    """Return the output of the workflow's first run."""
    return ran(str(SCRIPT), "--quick", folder=folder)


def test_every_stage_runs_once_and_the_policies_meet(folder: Path, said: str) -> None:
    runs = folder / "runs" / "workflow"
    assert {"sft", "collect", "reward", "judge", "online", "after"} <= {each.name for each in runs.iterdir()}
    assert [each.step for each in read_evaluations(runs / "online")] == [0, 1, 2, 3]
    assert said.count("win rate") >= 3
    kept = {path: path.stat().st_mtime_ns for path in runs.glob("*/metrics.jsonl")}
    again = ran(str(SCRIPT), "--quick", folder=folder)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert again.partition("iteration")[2] == said.partition("iteration")[2]


def test_two_of_its_checkpoints_are_merged(folder: Path, said: str) -> None:
    if "merging" not in installed():
        pytest.skip(str(missing("rillflow merge", "merging")))
    runs = folder / "runs" / "workflow"
    command = "import sys; from rillflow.cli.main import main; sys.exit(main())"
    out = runs / "merged"
    ran("-c", command, "merge", str(runs / "sft"), str(runs / "online"), "--out", str(out), folder=folder)
    assert (out / "model.safetensors").is_file()
