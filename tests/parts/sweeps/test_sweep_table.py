"""The table of a sweep: ranks, intervals over seeds, and the errors of runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.sections import Recipe
from rillflow_parts.sweeps.plan import SweepRun
from rillflow_parts.sweeps.sweep import error_in
from rillflow_parts.sweeps.table import RunResult, RunState, as_csv, as_json, as_text, ranked

RECIPE = Recipe.model_construct()


def result(case: str, seed: int, value: float | None, **more: Any) -> RunResult:
    run = SweepRun(
        case=case,
        seed=seed,
        settings={"policy.lr": case},
        words=(),
        recipe=RECIPE,
        path=Path("sweep") / case / f"seed-{seed}",
    )
    found = {"state": RunState.FINISHED, "measure": "accuracy", "step": 9, **more}
    return RunResult(run=run, value=value, **found)


def test_cases_are_ranked_by_the_mean_of_their_finished_runs() -> None:
    results = [
        *(result("low", seed, value) for seed, value in enumerate((0.1, 0.2, 0.3))),
        *(result("high", seed, value) for seed, value in enumerate((0.9, 0.97, 1.0))),
        result("mixed", 0, 0.5),
        result("mixed", 1, 0.99, state=RunState.STOPPED, why="below"),
        result("mixed", 2, None, state=RunState.FAILED, why="no room"),
        result("none", 0, None, state=RunState.FAILED, why="KeyError"),
    ]
    cases = ranked(results)
    assert [case.case for case in cases] == ["high", "mixed", "low", "none"]
    high, mixed, low, none = cases
    assert low.interval is not None and low.interval[0] == 0.0, "an accuracy is at least 0"
    assert high.interval is not None and high.interval[1] == 1.0
    assert mixed.interval is None and mixed.mean == 0.5 and none.mean is None
    text = as_text(cases).splitlines()
    assert text[1].startswith("1  high") and text[1].endswith("3/3") and "0.9567" in text[1]
    assert "mixed seed 1 stopped: below" in text and "none seed 0 failed: KeyError" in text
    assert text[4].split() == ["none", "-", "-", "0/1"]
    record: Any = as_json("lr", cases)
    assert [case["case"] for case in record["cases"]] == ["high", "mixed", "low", "none"]
    assert record["cases"][1]["runs"][2]["why"] == "no room"
    rows = list(csv.DictReader(as_csv(cases).splitlines()))
    assert len(rows) == 10 and rows[0]["policy.lr"] == "high" and rows[5]["value"] == ""


def test_mean_rewards_have_no_bounds() -> None:
    (case,) = ranked([result("a", 0, 1.0, measure="mean reward"), result("a", 1, 3.0, measure="mean reward")])
    assert case.interval is not None and case.interval[0] < 0 < 1 < case.interval[1]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "step 1\nerror: policy.lr is -1\n  why: it is positive\n  fix: try 1\n",
            "policy.lr is -1; it is positive",
        ),
        ("error: first\nmore\nerror: second\n", "second"),
        ("no error\nthe end\n\n", "the end"),
        ("", ""),
    ],
)
def test_the_error_of_a_log_is_its_last(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "log").write_text(text)
    assert error_in(tmp_path / "log") == error
    assert error_in(tmp_path / "none") == ""
