"""Shares of time: stages, and time outside stages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.runs.reader import SpanRecord
from rillflow.runs.run_data import load
from rillflow_parts.report.measured import covered
from rillflow_parts.report.shares import REST, draw_stages, outcome_counts, stage_times

MakeRun = Callable[..., Path]


def span(start: float, length: float) -> SpanRecord:
    return SpanRecord(step=1, stage="a", start_s=start, duration_s=length, rows=0, tokens=0)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_overlapping_spans_are_counted_once(spans: list[tuple[int, int]]) -> None:
    seconds = {second for start, length in spans for second in range(start, start + length)}
    inside = [second for second in seconds if 5 <= second < 25]
    assert covered([span(*one) for one in spans], 5.0, 25.0) == len(inside)


def test_the_stages_and_the_rest_are_the_phase(make_run: MakeRun) -> None:
    data = load(make_run())
    assert [(phase.name, phase.first, phase.last) for phase in data.phases] == [
        ("warm_start", 1, 20),
        ("grpo", 21, 60),
    ]
    for card in draw_stages(data):
        shares = re.findall(r"<td>([\d.]+)%</td>", card)
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.3)
        assert REST in card
    titles = re.findall(r'<i class="\S+" style="width:[\d.]+%" title="([^"]*)"', draw_stages(data)[1])
    assert sorted(titles) == sorted(["policy.generate", "policy.update", REST, "reward.score"])
    longest_first = ("policy.update", "policy.generate", "reward.score")
    places = [draw_stages(data)[1].index(f">{stage}<") for stage in longest_first]
    assert places == sorted(places)
    grpo = {one.stage: one for one in stage_times(data, 21, 60)}
    assert set(grpo) == {"policy.update", "policy.generate", "reward.score"}
    assert grpo["policy.generate"].tokens == 40 * 9000
    assert 0.4 <= grpo["policy.generate"].median_s <= 0.65


def test_outcomes_are_counted_over_the_run(make_run: MakeRun) -> None:
    assert outcome_counts(load(make_run(steps=22))) == {
        "score": 2028,
        "abstain": 0,
        "timeout": 12,
        "error": 8,
    }
    assert outcome_counts(load(make_run(steps=20))) == {}
