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
PARTS = [(name, what) for name, fit in FITS.items() for what in fit["left_out"]]
TITLES = {
    "nemo-rl": "NeMo-RL 0.3 to 0.7",
    "nemo-rl-dtensor": "NeMo-RL 0.3, DTensor",
    "verl": "verl",
    "gpu": "Rillflow",
}


def parts(name: str, what: str) -> list[dict[str, list[float]]]:
    """Predicted over measured of rows left out together, by row: of the step, then of stages."""
    return [part["ratios"] for part in FITS[name]["left_out"][what]]


def section(title: str) -> str:
    """A section of the results."""
    return next(part for part in RESULTS.split("\n## ") if part.startswith(title))


@pytest.mark.parametrize(("name", "what"), PARTS)
def test_errors_of_rows_left_out_are_those_of_the_fits(name: str, what: str) -> None:
    errors = [abs(row[0] - 1) for part in parts(name, what) for row in part.values()]
    told = f"| {len(errors)} | {median(errors):.0%} | {max(errors):.0%} |"
    assert f"| `{name}` | {what} {told}" in PAGE
    assert f"| {what} | {len(parts(name, what))} {told}" in section(TITLES[name])


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in PARTS))
def test_a_stack_claims_the_errors_of_all_rows_left_out(name: str) -> None:
    known = shipped_stacks()[name].published
    assert known is not None and known.placed is not None
    steps = [
        row[0] for one, what in PARTS if one == name for part in parts(name, what) for row in part.values()
    ]
    low, high = np.quantile([1 / ratio for ratio in steps], [0.1, 0.9])
    errors = [abs(ratio - 1) for ratio in steps]
    told = (known.placed.median, known.placed.worst, known.placed.low, known.placed.high)
    assert told == pytest.approx((median(errors), max(errors), low, high), abs=0.0051)


def test_the_bias_of_a_search_is_that_of_rows_left_out() -> None:
    ratios = [one[0] for part in FITS["nemo-rl"]["searched"] for one in part["ratios"].values() if one]
    known = shipped_stacks()["nemo-rl"].published
    assert known is not None and known.searched is not None
    assert known.searched.bias == pytest.approx(1 / median(ratios), abs=0.0051)
    inside = sum(known.searched.low <= 1 / ratio <= known.searched.high for ratio in ratios)
    assert inside / len(ratios) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("name", FITS)
def test_shipped_factors_are_those_that_were_fitted(name: str) -> None:
    values, factors = FITS[name]["values"], vars(shipped_stacks()[name].factors)
    for key in set(values) & set(factors) - {"refit", "refit_separate", "decode_token_s"}:
        assert factors[key] == pytest.approx(values[key], rel=5e-3), key
    bounds, loose = (", ".join(FITS[name][key]) or "none" for key in ("at_bound", "loose"))
    assert f"at a bound: {bounds}; hardly determined: {loose}." in section(TITLES[name])


def test_rillflows_own_plans_have_factors_of_its_own_steps_and_no_range() -> None:
    stacks, own = shipped_stacks(), FITS["gpu"]
    assert stacks["gpu"].published is None and not own["left_out"]
    theirs = {
        key: value for key, value in vars(stacks["nemo-rl"].factors).items() if key not in own["values"]
    }
    mine = {key: vars(stacks["gpu"].factors)[key] for key in theirs}
    assert mine == theirs | {"refit": 0.0, "refit_separate": 0.0, "step_s": 0.0}
    rows = re.findall(r"\| gpu \| 1 H200 \|.*\| ([+-]\d+)% \|$", section("Rillflow on"), flags=re.MULTILINE)
    worst = max(abs(int(error)) for error in rows)
    assert f"{len(rows)} seconds of 7 measurements are explained to within {worst}%" in " ".join(PAGE.split())


@pytest.mark.parametrize("name", ["nemo-rl", "verl", "areal"])
def test_the_page_says_how_far_off_other_stacks_and_devices_are(name: str) -> None:
    known = shipped_stacks()[name].published
    assert known is not None and known.unfitted is not None
    assert known.unfitted.text in " ".join(PAGE.split())


def test_signs_of_changes() -> None:
    known, page = shipped_stacks()["nemo-rl"].published, " ".join(PAGE.split())
    assert known is not None and known.doubled is not None and known.ahead is not None
    assert f"Twice the devices: {known.doubled.text}. Ahead: {known.ahead.text}." in page
    verdicts = re.findall(r"\| (yes|\*\*no\*\*) \|$", section(TITLES["nemo-rl"]), flags=re.MULTILINE)
    assert len(verdicts) == known.doubled.pairs + known.ahead.pairs
    assert verdicts.count("yes") == known.doubled.right + known.ahead.right


def test_placements() -> None:
    found = re.search(r"Of (\d+) published, the same of the three wins in (\d+)", RESULTS)
    assert found is not None
    assert f"with the factors of NeMo-RL's steps: {found[2]} of {found[1]}" in " ".join(PAGE.split())
