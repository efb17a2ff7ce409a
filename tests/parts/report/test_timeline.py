"""The timeline: every bar on its lane, no loss by merging, a run's spans as measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.runs.run_data import load
from rillflow_parts.report.html import COLOURS, markup, style
from rillflow_parts.report.measured import last_steps, measured_bars
from rillflow_parts.report.timeline import (
    LEFT,
    RIGHT,
    SHOWN_STEPS,
    WIDTH,
    Bar,
    colours_of,
    draw_timeline,
    merged,
)
from rillflow_parts.report.write import write_report

MakeRun = Callable[..., Path]
BAR = Bar(pool="main", lane="policy", stage="policy.update", start_s=10.0, end_s=12.0, step=1)


@st.composite
def bars(draw: st.DrawFn) -> Bar:
    start = draw(st.floats(0, 50))
    return Bar(
        pool=draw(st.sampled_from(["a", "b"])),
        lane=draw(st.sampled_from(["x", "y"])),
        stage=draw(st.sampled_from(["policy.update", "policy.generate", "critic.values"])),
        start_s=start,
        end_s=start + draw(st.floats(0, 9)),
        step=draw(st.integers(0, 2)),
        is_idle=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(bars(), min_size=1, max_size=12))
def test_every_bar_lies_between_the_axes_and_each_lane_is_there(found: list[Bar]) -> None:
    svg = str(markup(draw_timeline(found)))
    boxes = re.findall(r'class="span [^"]*" height="[\d]+" x="([\d.]+)" width="([\d.]+)"', svg)
    assert boxes
    for x, width in boxes:
        assert LEFT - 0.1 <= float(x) <= float(x) + float(width) <= WIDTH - RIGHT + 0.6
    assert svg.count('class="lane"') == len({(bar.pool, bar.lane) for bar in found})


@settings(max_examples=60, deadline=None)
@given(st.lists(bars(), max_size=12), st.floats(0, 5))
def test_merging_loses_no_time_and_mixes_no_stages(found: list[Bar], gap_s: float) -> None:
    joined = merged(found, gap_s)
    for bar in found:
        assert any(
            (one.stage, one.step) == (bar.stage, bar.step)
            and one.start_s <= bar.start_s
            and bar.end_s <= one.end_s
            for one in joined
        )
    assert len(joined) <= len(found)


def test_bars_of_one_stage_without_a_gap_are_one() -> None:
    later = Bar(pool="main", lane="policy", stage="policy.update", start_s=12.0, end_s=13.0, step=1)
    other = Bar(pool="main", lane="policy", stage="policy.update", start_s=13.0, end_s=14.0, step=2)
    assert [(bar.start_s, bar.end_s) for bar in merged([BAR, later, other], 0.1)] == [(10, 13), (13, 14)]


def test_the_longest_stages_have_colours_of_their_own() -> None:
    found = [replace(BAR, stage=f"s{place}", end_s=10.5 + place) for place in range(2 * COLOURS)]
    colours = colours_of(found)
    assert len({colours[f"s{place}"] for place in range(COLOURS, 2 * COLOURS)}) == COLOURS
    assert colours_of([replace(BAR, is_idle=True)]) == {}


def test_every_colour_of_a_page_is_another() -> None:
    rules = dict(re.findall(r"\.k(\d+) \{--kc:([^}]+)\}", style()))
    shades = {name: re.findall(rf"--k{name}:(#\w+)", style()) for name in rules}
    assert list(map(int, rules)) == list(range(COLOURS))
    assert len({str(shades[name] or rules[name]) for name in rules}) == COLOURS


def test_names_are_escaped_and_what_is_idle_says_why() -> None:
    idle = Bar(pool="<b>", lane="x", stage="waits for weights", start_s=12.0, end_s=13.0, is_idle=True)
    svg = str(markup(draw_timeline([BAR, idle])))
    assert "&lt;b&gt;" in svg and "<b>" not in svg
    assert "waits for weights: 1.0 s from 2.0 s" in svg
    assert "policy.update, step 1: 2.0 s from 0 ms" in svg
    assert "idle, with its cause" in svg
    assert draw_timeline([]) == []


def test_a_runs_last_steps_are_drawn_as_they_were_measured(make_run: MakeRun) -> None:
    data = load(make_run())
    found = [bar for bar in measured_bars(last_steps(data, SHOWN_STEPS)) if not bar.is_idle]
    assert {bar.step for bar in found} == set(range(60 - SHOWN_STEPS + 1, 61))
    spans = [span for span in data.spans if span.step > 60 - SHOWN_STEPS]
    assert sum(bar.end_s - bar.start_s for bar in found) == pytest.approx(
        sum(span.duration_s for span in spans)
    )
    assert {bar.lane for bar in found} == {"rank  0"}
    page = write_report(data.path).read_text("utf-8")
    assert "Steps 57 to 60, rank by rank" in page and 'class="timeline"' in page
