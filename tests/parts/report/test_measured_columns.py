"""Waiting times from columns of spans are those from their records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rillflow.runs.reader import SpanRecord, read_spans
from rillflow.runs.run_directory import RunDirectory
from rillflow.runs.span_columns import SpanColumns, covered_s
from rillflow_parts.report.measured import Wait, covered, measured_of, waits_of, works_of
from tests.unit.runs.test_curves import spans


def waited(wait: Wait) -> tuple[object, ...]:
    cause = wait.cause and (wait.cause.on, wait.cause.stage, wait.cause.step)
    return wait.on, wait.start_s, wait.end_s, wait.before, wait.step, cause


def test_columns_of_spans_and_records_of_a_window_agree(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for span in spans(200):
            run.log_span(span)
    columns = SpanColumns(tmp_path / "run")
    columns.update()
    every = read_spans(tmp_path / "run")
    found = measured_of(columns, 50, 53)
    works = works_of(every)
    whole = waits_of(works, found.start_s, found.end_s)
    assert [waited(each) for each in found.waits] == [waited(each) for each in whole], (
        "far steps change no wait"
    )
    inside = [work for work in works if work.start_s < found.end_s and work.end_s > found.start_s]
    assert list(map(vars, found.works)) == list(map(vars, inside))


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8),
    st.integers(0, 10),
    st.integers(0, 15),
)
def test_covered_time_of_columns_and_records_agrees(
    times: list[tuple[int, int]], low: int, length: int
) -> None:
    made = [
        SpanRecord(step=1, stage="a", start_s=start, duration_s=took, rows=0, tokens=0)
        for start, took in times
    ]
    starts = np.array([span.start_s for span in made], dtype=np.float64)
    ends = np.array([span.end_s for span in made], dtype=np.float64)
    assert covered_s(starts, ends, low, low + length) == covered(made, low, low + length)
