"""Predicted beside measured: a run is compared with a plan as long as it is placed as the plan says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rillflow.app.planned import open_plan
from rillflow.cli.main import main
from rillflow.runs import layout
from tests.flows.conftest import written

CLUSTER = '[[machine_type]]\nname = "cores"\ndevice = "cpu"\ndevices = 2\nper_machine = 2\n'
TITLE = "predicted and measured, medians of"
LEFT = "does not match the placement"
TWO = ("--set", "placement.backend=inline", "--set", "placement.pools.main=2")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The path of a recipe in a folder of its own."""
    return written(tmp_path)


def forget(run: Path, step: int) -> None:
    """Take a finished run back to the checkpoint of a step."""
    (run / layout.FINISHED).unlink()
    for entry in (run / layout.CHECKPOINTS).glob("step-*"):
        if int(entry.name.removeprefix("step-")) > step:
            shutil.rmtree(entry)


def test_a_resumed_run_is_compared_only_where_it_lies_as_planned(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, run = tmp_path / "cluster.toml", tmp_path / "run"
    cluster.write_text(CLUSTER)
    small = ("--set", "warm_start=none", "--set", "evaluate.problems=2")
    often = (*small, "--set", "run.checkpoint_every=2", "--set", "run.keep_checkpoints=9")

    def ran(*words: str) -> str:
        typed = ["run", str(recipe), "--dir", str(run), *often, *words]
        monkeypatch.setattr("sys.argv", ["rillflow", *typed])
        assert main(typed) == 0
        captured = capfd.readouterr()
        return captured.out + captured.err

    out = ran("--cluster", str(cluster))
    assert f"{TITLE} 5 steps" in out and "largest error: " in out and "assumed: responses" in out
    assert f"--cluster {cluster} --set algorithm.steps=12" in out, "the command that trains longer has it too"
    plan = open_plan(run / layout.PLAN)
    assert plan.predicted_step_s > 0 and list(plan.units) == ["policy", "reference"]

    forget(run, 2)
    out = ran(*TWO)
    assert TITLE not in out and LEFT in out
    assert f"--plan {run / layout.PLAN}" in out.replace("\n", "")
    assert "Predicted and measured" not in (run / layout.REPORT).read_text()

    forget(run, 2)
    out = ran()
    assert f"{TITLE} 3 steps" in out and LEFT not in out, "steps 3 to 6 without the first"
    starts = json.loads((run / layout.ENVIRONMENT).read_text())["starts"]
    assert [(start["after_step"], start["is_planned"]) for start in starts] == [
        (0, True),
        (2, False),
        (2, True),
    ]
