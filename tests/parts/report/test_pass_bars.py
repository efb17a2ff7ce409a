"""Bars and text of the passes of pipelines."""

from __future__ import annotations

import pytest

from rillflow_parts.report.pass_bars import BUBBLE, pass_bars, pass_lines
from tests.unit.runs.test_passes import alone, fused


def test_bars_show_every_pass_and_the_idle_time_between() -> None:
    bars = pass_bars([alone("policy")])
    assert {bar.lane for bar in bars} == {"rank  0 passes", "rank  1 passes"}
    for lane in ("rank  0 passes", "rank  1 passes"):
        own = sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: bar.start_s)
        assert sum(bar.end_s - bar.start_s for bar in own) == pytest.approx(9)
        idle = [bar for bar in own if bar.is_idle]
        assert sum(bar.end_s - bar.start_s for bar in idle) == pytest.approx(3)
        assert {bar.stage for bar in idle} == {BUBBLE}
    assert not [bar for bar in pass_bars(fused()) if bar.is_idle]


def test_the_text_has_measured_and_predicted_idle_time_and_a_drawing() -> None:
    told = "\n".join(pass_lines([alone("critic"), alone("policy", 20.0)]))
    assert "critic.update" in told and told.count("33%") == 4
    assert "CCCCCCCCCCC" in told and "P p policy forward, backward" in told
    drawn = [line for line in told.splitlines() if line.startswith("  main")]
    assert len(drawn) == 4 and drawn[0].count(".") == pytest.approx(32, abs=2)
    together = "\n".join(pass_lines(fused()))
    assert "critic.update + policy.update" in together and "33%" in together and "40%" in together
    assert pass_lines([]) == []


def test_roles_of_one_initial_get_other_letters() -> None:
    told = "\n".join(pass_lines([alone("critic"), alone("cost_critic", 20.0)]))
    assert "A a critic forward, backward; B b cost_critic forward, backward" in told
