"""Calibrated: what a calibration fitted, as lines of text and as data.

Calibration ─┬─ calibration_lines ─> every stage, measured and fitted; the factors
             └─ calibration_data ──> JSON
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rillflow.observe.wording import number
from rillflow.planner.calibration import Calibration
from rillflow.view.columns import columns, seconds


def calibration_lines(found: Calibration) -> list[str]:
    """What a person wants to know of it."""
    rows = [("stage", "phase", "measured", "fitted", "error")]
    rows += [
        (one.stage, one.phase, seconds(one.measured_s), seconds(one.fitted_s), f"{one.error:+.1%}")
        for one in found.stages
    ]
    factors = [("factor", "value")]
    factors += [
        (name, f"{number(value)} s" if name.endswith("_s") else number(value))
        for name, value in asdict(found.factors).items()
    ]
    limits = [
        f"note: {name} came out at 1: the device does as much as its description says, or more"
        for name in found.at_limit
    ]
    return [*columns(rows, left=2), "", *columns(factors), *limits]


def calibration_data(found: Calibration) -> dict[str, Any]:
    """The same as JSON has it."""
    stages = [{**asdict(one), "error": one.error} for one in found.stages]
    return {"factors": asdict(found.factors), "stages": stages, "at_limit": list(found.at_limit)}
