"""A plan is there at once: nothing heavy is imported for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rillflow_planner
from rillflow.cli.main import main
from tests.architecture.test_startup import imported_by

ROOT = Path(__file__).parents[3]
MODEL = "examples/planning/qwen2.5-7b/config.json"
SHORT = [
    "--model",
    MODEL,
    "--gpus",
    "128xH100",
    "--algorithm",
    "safe_rlhf",
    "--response",
    "mean=1000,max=8192",
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipes/safe_rlhf/run.toml", "--cluster", "clusters/laptop.toml"],
        pytest.param(
            ["recipes/preference/run.toml", "--cluster", "clusters/laptop.toml"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["examples/planning/run.toml", "--cluster", "clusters/8xh100.toml"], marks=pytest.mark.slow
        ),
        SHORT,
    ],
    ids=["new model", "pairs", "named model", "short form"],
)
def test_a_plan_waits_for_no_torch(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    there = imported_by(f"from rillflow.cli.main import main\nassert main({['plan', *arguments]}) == 0")
    assert there & {"torch", "transformers", "ray"} == set()


def test_help_with_the_planner_imports_nothing_heavy() -> None:
    code = "from rillflow.cli.main import main\ntry: main(['plan', '--help'])\nexcept SystemExit: pass"
    there = imported_by(code)
    assert "rillflow_planner.plugin" in there and there & {"torch", "transformers", "ray", "numpy"} == set()


@pytest.mark.parametrize("command", ["plan", "simulate", "calibrate"])
def test_a_missing_part_is_named_with_its_installation(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "rillflow_planner.planning", raising=False)
    monkeypatch.delattr(rillflow_planner, "planning", raising=False)
    monkeypatch.setitem(sys.modules, "rillflow_parts.fusion.alignment", None)
    plan = ["--plan", "plan.toml", "--cluster", "cluster.toml"]
    words = {"plan": SHORT, "simulate": ["run.toml", *plan], "calibrate": [str(tmp_path)]}[command]
    assert main([command, *words]) == 2
    told = capsys.readouterr().err
    assert f"rillflow {command} needs the part fusion" in told and "pip install" in told
