"""Published rows: each is a command of ``rillflow plan``, and the page's prediction is the command's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rillflow.cli.main import main

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "planner"))
from published import nemo  # noqa: E402  published rows lie beside the benchmarks

PAGE = (ROOT / "benchmarks/results/planner.md").read_text("utf-8")
ROWS = nemo.fitted()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_fitted_row_is_predicted_as_its_command_does(
    every: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for row in ROWS[::every]:
        assert main([*nemo.command(row), "--format", "json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["step_s"] == nemo.predict(row).step_s
        cells = f"| {row.name} | {row.ahead} | {row.devices} | {row.step_s:g} "
        assert f"{cells}| {shown['step_s'] / row.step_s - 1:+.0%} |" in PAGE


def test_the_page_has_the_command_of_every_fitted_row() -> None:
    assert len(ROWS) == 84
    commands = re.findall(r"^rillflow (plan .*)$", PAGE, re.MULTILINE)
    assert [" ".join(nemo.command(row)) for row in ROWS] == commands
