"""Forty runs of known outcome, as series that the judgement reads (``benchmarks/algorithms/outcomes.py``)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rillflow.records.metrics import Max, Mean, Metric, Min, Sum
from rillflow.runs.outcome import OutcomeKind
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow.runs.summary import Summary, summarise

KEPT = Path(__file__).parents[3] / "benchmarks" / "results" / "outcomes.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in KEPT.read_text("utf-8").splitlines()]
LEAST = {"fitted": 20, "unseen": 18}
"""Runs of each half of 20 that are judged right."""


def metric(reduction: str, value: float | None, count: float | None) -> Metric:
    real = math.nan if value is None else value
    if reduction == "mean":
        return (
            Mean(total=0.0, count=0) if value is None else Mean(total=real * (count or 1), count=count or 1)
        )
    return {"sum": Sum, "max": Max, "min": Min}[reduction](value=real)


def restored(case: dict[str, Any], folder: Path) -> Summary:
    """Write the kept series into a run directory, and return its summary."""
    settings: dict[str, Any] = {}
    for key, value in case["settings"].items():
        section, name = key.split(".")
        settings.setdefault(section, {})[name] = value
    series = case["metrics"]
    with RunDirectory.open(folder, settings) as run:
        for number in range(max(len(one["values"]) for one in series.values())):
            there = {name: one for name, one in series.items() if number < len(one["values"])}
            metrics = {
                name: metric(one["reduction"], one["values"][number], one["count"])
                for name, one in there.items()
            }
            run.log_metrics(number + 1, case["phase"], metrics)
        for look in case["evaluations"]:
            ends = look.get("interval")
            mean = look["mean_reward"]
            found = Evaluation(
                count=look["count"],
                mean_reward=math.nan if mean is None else mean,
                correct=look.get("correct"),
                is_accuracy=look["measure"] == "accuracy",
                interval=(ends[0], ends[1]) if ends else None,
            )
            run.log_evaluation(look["step"], found)
        run.write_json("finished.json", {})
    return summarise(folder)


def is_right(case: dict[str, Any], summary: Summary) -> bool:
    """Return whether the summary says what the case's label says."""
    outcome = summary.outcome
    said = " ".join([*outcome.sentences, *summary.warnings, *(each.text for each in outcome.advice)])
    kind = outcome.kind is not OutcomeKind.COLLAPSED if case["kind"] is None else outcome.kind == case["kind"]
    return kind and outcome.is_destroyed is case["is_destroyed"] and case["needs"] in said


@pytest.mark.parametrize("half", LEAST)
def test_runs_of_known_outcome_are_judged_right(half: str, tmp_path: Path) -> None:
    cases = [case for case in CASES if case["half"] == half]
    assert len(cases) == 20
    wrong = [case["name"] for case in cases if not is_right(case, restored(case, tmp_path / case["name"]))]
    assert len(cases) - len(wrong) >= LEAST[half], wrong


def test_a_wrong_label_is_noticed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case["name"] == "high_rate-0")
    summary = restored(case, tmp_path / "run")
    assert is_right(case, summary)
    assert not is_right({**case, "kind": "rose"}, summary)
    assert not is_right({**case, "is_destroyed": False}, summary)
    assert not is_right({**case, "needs": "three times"}, summary)
