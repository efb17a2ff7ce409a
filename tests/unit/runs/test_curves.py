"""Columns of metrics and spans: the values of the records, while a run grows, is rewound, or is damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.records.metrics import Histogram, LargestShare, Max, Mean, Metric, Min, Sum, Variance
from rillflow.runs import layout
from rillflow.runs.curves import Curve, MetricColumns, plain
from rillflow.runs.durable import append
from rillflow.runs.following import FollowedFile
from rillflow.runs.json_lines import encode
from rillflow.runs.reader import RankSpan, SpanRecord, read_metrics, read_spans
from rillflow.runs.run_directory import RunDirectory, metric_json
from rillflow.runs.span_columns import SpanColumns

numbers = st.floats(width=32)
counts = st.integers(0, 1000)
metrics = st.one_of(
    st.builds(lambda value, count: Mean(total=value * count, count=count), numbers, counts),
    st.builds(lambda value: Sum(value=value), numbers),
    st.builds(lambda value: Max(value=value), numbers),
    st.builds(lambda value: Min(value=value), numbers),
    st.builds(lambda value, count: Variance(squares=abs(value), mean=0.0, count=count), numbers, counts),
    st.builds(lambda value: LargestShare(most=abs(value), total=1.0), numbers),
)


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-6)


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), metrics, max_size=4), max_size=8))
def test_a_curve_has_the_values_of_the_records(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, Metric]]
) -> None:
    run = tmp_path_factory.mktemp("run")
    columns = MetricColumns(run)
    for step, found in enumerate(steps, 1):
        line = {"step": step, "phase": "warm" if step < 3 else "grpo", "time_s": 1.0 * step}
        values = {name: metric_json(metric) for name, metric in found.items()}
        append(run / layout.METRICS, encode({**line, "metrics": values}))
        columns.update()
    assert columns.damaged == []
    for name in "abcdef":
        points = [(each.step, each.metrics[name].value) for each in read_metrics(run) if name in each.metrics]
        curve = columns.curve(name)
        assert curve.x.tolist() == [step for step, _ in points]
        assert all(map(same, curve.y.tolist(), [value for _, value in points]))
    kept = [(each.step, {*each.metrics} & {"a", "b"}) for each in read_metrics(run)]
    told = list(columns.records("ab"))
    assert [each.step for each in told] == [step for step, _ in kept]
    assert all(set(each.metrics) <= names for each, (_, names) in zip(told, kept, strict=True))


def curve_of(values: list[float]) -> Curve:
    y = np.array(values, dtype=np.float64)
    return Curve(x=np.arange(len(y), dtype=np.float64), y=y, low=y, high=y, weights=np.ones(len(y)))


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=50), st.integers(1, 60))
def test_buckets_keep_the_mean_and_the_extremes(values: list[float], points: int) -> None:
    short = curve_of(values).shortened(points)
    finite = [value for value in values if math.isfinite(value)]
    assert len(short) == min(points, len(values))
    assert (np.diff(short.x) > 0).all() and short.weights.sum() == len(values)
    if finite:
        assert np.nanmin(short.low) == min(finite) and np.nanmax(short.high) == max(finite)
        is_number = np.isfinite(short.y)
        tolerance = 1e-9 * max(map(abs, finite))
        assert (short.low[is_number] <= short.y[is_number] + tolerance).all()
        assert (short.y[is_number] <= short.high[is_number] + tolerance).all()
    assert np.isnan(short.y).sum() <= len(values) - len(finite)


def test_a_part_of_a_curve_reaches_the_edges_of_the_window() -> None:
    curve = curve_of([0.0, 1.0, 2.0, 3.0, 4.0])
    assert curve.between(1.5, 2.5).x.tolist() == [1, 2, 3]
    assert curve.between(None, 1.0).x.tolist() == [0, 1, 2]
    assert curve.between(10.0, 20.0).x.tolist() == [4]
    assert curve.between(None, None).x.tolist() == curve.x.tolist()


def test_histograms_of_neighbouring_steps_are_added(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in range(1, 6):
            run.log_metrics(step, "grpo", {"ages": Histogram(edges=(0.0, 1.0), counts=(step, 1, 0))})
    columns = MetricColumns(tmp_path / "run")
    columns.update()
    found = list(columns.histograms("ages", 2))
    assert [first for first, _ in found] == [1, 3]
    assert [each.counts for _, each in found] == [(3, 2, 0), (12, 3, 0)]
    assert len(list(columns.histograms("ages", 60))) == 5
    assert columns.names["ages"] == "histogram"


def test_a_followed_file_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = FollowedFile(path)
    assert not file.is_rewound() and list(file.new_lines()) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert not file.is_rewound()
    assert [(line.text, line.offset, line.number) for line in file.new_lines()] == [
        (b"one\n", 0, 1),
        (b"two\n", 4, 2),
    ]
    with path.open("ab") as opened:
        opened.write(b"ee\n")
    assert not file.is_rewound() and [line.text for line in file.new_lines()] == [b"three\n"]
    for content in (b"one\n", b"two\nthree\nfour\n", b"new\nthree\n", b""):
        path.write_bytes(content)
        assert file.is_rewound()
        assert [line.number for line in file.new_lines()] == list(range(1, 1 + content.count(b"\n")))
    path.unlink()
    assert list(file.new_lines()) == []


def test_a_file_that_was_replaced_is_read_again_even_if_it_grew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    file = FollowedFile(path)
    file.is_rewound()
    assert len(list(file.new_lines())) == 2
    (tmp_path / "new").write_bytes(b"a\nb\nc\n")
    (tmp_path / "new").replace(path)
    assert file.is_rewound()
    assert len(list(file.new_lines())) == 3


def test_damaged_lines_are_named_and_the_others_kept(tmp_path: Path) -> None:
    huge, grpo = 10**400, {"phase": "grpo", "time_s": 1.0}
    mean, histogram = {"mean": 1.0, "count": 1}, {"histogram": [1, huge], "edges": [0]}
    lines = [
        {**grpo, "step": 1, "metrics": {"a": mean}},
        ["no object"],
        {**grpo, "step": huge, "metrics": {}},
        {**grpo, "step": 2, "time_s": huge, "metrics": {"a": {"mean": huge}, "b": {"what": 1}}},
        {**grpo, "step": 3, "time_s": None, "metrics": {"a": {"sum": "x"}, "h": histogram}},
        {**grpo, "step": 4, "metrics": {"h": {"histogram": [1], "edges": []}}},
    ]
    (tmp_path / layout.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = MetricColumns(tmp_path)
    columns.update()
    assert [each.what.partition("metrics.jsonl ")[2].partition(":")[0] for each in columns.damaged] == [
        "line 2 has no step, phase, time_s and metrics",
        "line 3 has step 1" + "0" * 400,
        "line 4 has metric 'b' without a known reduction",
        "line 5 has metric 'a' without a known reduction",
    ]
    assert columns.steps.tolist() == [1, 2, 3, 4]
    assert plain(columns.curve("a").y) == [1.0, None]


def spans(count: int) -> list[SpanRecord]:
    """Return spans of two stages on two pools, one step ahead of each other."""
    found = []
    for step in range(1, count + 1):
        for stage, pool, after, start in (
            ("policy.generate", "answers", (), 2.0 * step),
            ("policy.update", "main", ("policy.generate",), 2.0 * step + 1.5),
        ):
            ranks = [
                RankSpan(rank=rank, start_s=start, duration_s=1.0 + rank, rows=3, tokens=9) for rank in (0, 1)
            ]
            found.append(SpanRecord.of_ranks(ranks, 2, step=step, stage=stage, pool=pool, after=after))
    return found


def test_columns_of_spans_and_records_of_a_window_agree(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for span in spans(200):
            run.log_span(span)
    columns = SpanColumns(tmp_path / "run")
    columns.update()
    every = read_spans(tmp_path / "run")
    assert len(columns) == len(every) == 400 and columns.stages == ["policy.generate", "policy.update"]
    assert columns.of_steps(5, 6) == [span for span in every if 5 <= span.step <= 6]
    steps, seconds = columns.by_step(columns.rows_of(1, 3, "policy.update"))
    assert (steps.tolist(), seconds.tolist()) == ([1, 2, 3], [2.0, 2.0, 2.0])


def test_damaged_spans_are_named(tmp_path: Path) -> None:
    good = {"step": 1, "stage": "a", "start_s": 0, "duration_s": 1.0, "rows": 1, "tokens": 1}
    bad = [{**good, "step": "1"}, {**good, "start_s": 10**400}, {**good, "duration_s": math.nan}, 3]
    lines = [good, *bad, {**good, "step": 2, "rows": None}]
    (tmp_path / layout.SPANS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = SpanColumns(tmp_path)
    columns.update()
    assert [each.what.partition("line ")[2][:1] for each in columns.damaged] == ["2", "3", "4", "5"]
    assert columns.steps.tolist() == [1, 2]
