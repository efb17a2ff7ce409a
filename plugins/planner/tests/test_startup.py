"""A plan is there at once: nothing heavy is imported for it."""

from __future__ import annotations

from pathlib import Path

import pytest

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
