"""Figures of a page are those of its results: how far off each factor set is on steps left out of its fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from rillflow_planner.hardware import shipped_stacks

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "plugins/planner/docs/planner.md").read_text()
RESULTS = (ROOT / "benchmarks/results/planner.md").read_text()
FITS: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks/results/fits.json").read_text())
PARTS = [
    (name, what)
    for name, fit in FITS.items()
    for what, part in fit.items()
    if isinstance(part, dict) and "ratios" in part
]


def section(title: str) -> str:
    """A section of the results."""
    return next(part for part in RESULTS.split("\n## ") if part.startswith(title))


@pytest.mark.parametrize(("name", "what"), PARTS)
def test_errors_of_rows_left_out_are_those_of_the_fits(name: str, what: str) -> None:
    errors = [abs(ratio - 1) for ratio in FITS[name][what]["ratios"]]
    told = f"| {len(errors)} | {median(errors):.0%} | {max(errors):.0%} |"
    assert f"| `{name}` | {what} {told}" in PAGE
    assert f"| {what} | {FITS[name][what]['fits']} {told}" in RESULTS


def claimed(measured_over_predicted: list[float]) -> tuple[float, ...]:
    """Median and worst error, and what one in ten is under and over."""
    low, high = np.quantile(measured_over_predicted, [0.1, 0.9])
    errors = sorted(abs(1 / ratio - 1) for ratio in measured_over_predicted)
    return round(median(errors), 2), round(errors[-1], 2), round(float(low), 2), round(float(high), 2)


def of_stack(name: str) -> tuple[float, ...]:
    """What a shipped factor set claims."""
    accuracy = shipped_stacks()[name].accuracy
    assert accuracy is not None
    return accuracy.median, accuracy.worst, accuracy.low, accuracy.high


@pytest.mark.parametrize("name", FITS)
def test_a_stack_claims_the_errors_of_all_rows_left_out(name: str) -> None:
    ratios = [ratio for one, what in PARTS if one == name for ratio in FITS[name][what]["ratios"]]
    assert of_stack(name) == claimed([1 / ratio for ratio in ratios])


def test_the_processors_factors_claim_the_errors_of_runs_that_other_runs_predicted() -> None:
    results = (ROOT / "benchmarks/results/self_prediction.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `?[\w.]+=[^|]* \| [^|]+ \| ([^|]+) \|", results, flags=re.MULTILINE)
    errors = [float(cell.strip(" %")) / 100 for row in rows for cell in row.split(",")]
    assert len(errors) >= 10
    assert of_stack("rillflow") == claimed([1 / (1 + error) for error in errors])


@pytest.mark.parametrize("name", FITS)
def test_shipped_factors_are_those_that_were_fitted(name: str) -> None:
    values, factors = FITS[name]["values"], vars(shipped_stacks()[name].factors)
    for key in set(values) & set(factors) - {"refit", "refit_apart"}:
        assert factors[key] == pytest.approx(values[key], rel=5e-3), key
    told = ", ".join(FITS[name]["at_bound"]) or "none"
    assert f"`{name}`: {told}" in PAGE


def test_all_fitted_rows_and_signs() -> None:
    for name, title in (("nemo-rl", "NeMo-RL"), ("verl", "verl")):
        found = re.search(r"\| nothing: all fitted \| 1 \| (\d+) \| (\d+%) \| (\d+%)", section(title))
        assert found is not None
        assert f"| `{name}` | nothing: all fitted | {found[1]} | {found[2]} | {found[3]} |" in PAGE
    verdicts = re.findall(r"\| (yes|\*\*no\*\*) \|$", section("NeMo-RL"), flags=re.MULTILINE)
    assert f"{verdicts.count('yes')} of {len(verdicts)} signs" in PAGE


def test_placements() -> None:
    found = re.search(r"Of (\d+) published, the same of the three wins in (\d+)", RESULTS)
    assert found is not None
    assert f"best of three placements: {found[2]} of {found[1]}" in PAGE
