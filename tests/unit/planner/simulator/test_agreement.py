"""Plan and simulator say the same of drawn problems: in step by the formulas, ahead as the plan is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from drawn_plans import compared

QUICK = (8, 12, 25)
"""Those of every day: in step and ahead, with light and heavy tails."""


@pytest.mark.parametrize("seed", QUICK)
def test_what_is_shown_of_a_plan_is_what_is_simulated(seed: int) -> None:
    found = compared(seed, times=1)
    assert found.shown_s == pytest.approx(found.simulated_s, rel=0.05)
