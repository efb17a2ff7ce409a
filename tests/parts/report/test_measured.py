"""Waits and their causes, on a step and a half with numbers worked out by hand.

            0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20
answers 0   generate........                            generate........
scores 0                      score.                                    score
main 0                                update....      publish               update..........
main 1                                update........  publish               update..........
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.cli.main import main
from rillflow.runs import layout
from rillflow.runs.reader import RankSpan, SpanRecord, read_spans
from rillflow.runs.run_data import load
from rillflow.runs.run_directory import RunDirectory
from rillflow_parts.report.html import markup
from rillflow_parts.report.measured import (
    END,
    RankName,
    measured,
    measured_bars,
    measured_lines,
    rank_times,
    trace_of,
    waits_of,
    works_of,
)
from rillflow_parts.report.timeline import MOST_LANES, draw_timeline

UPDATED = ("policy.generate", "reward.score")
MAIN, SECOND = RankName("main", 0), RankName("main", 1)
ANSWERS, SCORES = RankName("answers", 0), RankName("scores", 0)


def span(
    step: int, stage: str, pool: str, *times: tuple[float, float], after: tuple[str, ...] = ()
) -> SpanRecord:
    """Return a stage's span in which each rank of a pool worked between two times."""
    ranks = [
        RankSpan(rank=rank, start_s=start, duration_s=end - start, rows=4, tokens=9)
        for rank, (start, end) in enumerate(times)
    ]
    return SpanRecord.of_ranks(ranks, len(ranks), step=step, stage=stage, pool=pool, after=after)


SPANS = [
    span(1, "policy.generate", "answers", (0, 4)),
    span(1, "reward.score", "scores", (4.5, 6), after=("policy.generate",)),
    span(1, "policy.update", "main", (6.5, 9), (6.5, 10), after=UPDATED),
    span(1, "policy.publish", "main", (10, 10.5), (10, 10.5)),
    span(2, "policy.generate", "answers", (11, 15)),
    span(2, "reward.score", "scores", (15, 16), after=("policy.generate",)),
    span(2, "policy.update", "main", (16, 20), (16, 20), after=UPDATED),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory.open(tmp_path / "run", {}) as made:
        for each in SPANS:
            made.log_span(each)
        for step in (1, 2):
            made.log_metrics(step, "grpo", {})
    return tmp_path / "run"


def test_every_second_of_every_rank_has_its_cause() -> None:
    works = works_of(SPANS)
    found = {one.on: one for one in rank_times(works, waits_of(works, 0.0, 20.0), 0.0, 20.0)}
    assert list(found) == [ANSWERS, MAIN, SECOND, SCORES]
    assert {on: (one.busy_s, one.else_s) for on, one in found.items()} == {
        ANSWERS: (8.0, 1.5),
        MAIN: (7.0, 1.5),
        SECOND: (8.0, 1.5),
        SCORES: (2.5, 1.5),
    }
    generated, scored = "policy.generate on answers", "reward.score on scores"
    updated, published = "policy.update on main", "policy.publish on main"
    assert found[MAIN].waited_s == {generated: 8.0, scored: 2.5, updated: 1.0}, "the other rank is slower"
    assert found[SECOND].waited_s == {generated: 8.0, scored: 2.5}
    assert found[ANSWERS].waited_s == {updated: 7.5, scored: 2.5, published: 0.5}
    assert found[SCORES].waited_s == {generated: 8.0, updated: 7.5, published: 0.5}


def test_a_window_cuts_what_reaches_over_its_ends() -> None:
    works = works_of(SPANS)
    waits = waits_of(works, 8.0, 12.0)
    assert {(wait.start_s, wait.end_s) for wait in waits if wait.on == MAIN} == {
        (9.0, 10.0),
        (10.5, 11.0),
        (11.0, 12.0),
    }
    one = next(one for one in rank_times(works, waits, 8.0, 12.0) if one.on == MAIN)
    assert (one.busy_s, one.else_s) == (1.5, 0.5)
    assert one.waited_s == {"policy.generate on answers": 1.0, "policy.update on main": 1.0}


def test_what_a_stage_was_given_counts_not_what_happened_to_end_then() -> None:
    """A stage of another pool that ends while the update waits for rows is not the cause."""
    stranger = span(1, "reference.logprobs", "beside", (2, 5.75))
    works = works_of(
        [SPANS[0], stranger, span(1, "policy.update", "main", (6, 7), after=("policy.generate",))]
    )
    waits = [wait for wait in waits_of(works, 0.0, 7.0) if wait.on == MAIN]
    assert [(wait.start_s, wait.end_s, wait.whom) for wait in waits] == [
        (4.0, 6.0, ""),
        (0.0, 4.0, "policy.generate on answers"),
    ]
    untold = works_of([SPANS[0], stranger, span(1, "policy.update", "main", (6, 7))])
    causes = [wait.whom for wait in waits_of(untold, 0.0, 7.0) if wait.on == MAIN]
    assert causes == ["", "reference.logprobs on beside", ""], "by end times nobody can tell"


def test_a_rank_that_is_done_waits_for_who_keeps_the_run_going() -> None:
    works = works_of(SPANS)
    last = [wait for wait in waits_of(works, 0.0, 20.0) if wait.on == SCORES and wait.before == END]
    assert [(wait.start_s, wait.end_s, wait.whom) for wait in last] == [(16.0, 20.0, "policy.update on main")]


def test_spans_of_an_older_version_are_one_rank_a_pool(run: Path) -> None:
    lines = [json.loads(line) for line in (run / layout.SPANS).read_text().splitlines()]
    for line in lines:
        del line["ranks"], line["after"]
    (run / layout.SPANS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = measured(load(run))
    assert {work.on for work in found.works} == {ANSWERS, MAIN, SCORES}
    assert any(line.startswith("causes: by end times only") for line in measured_lines(found))


ENDS = st.tuples(st.floats(0, 20), st.floats(0, 5), st.integers(0, 2), st.integers(0, 2), st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(ENDS, min_size=1, max_size=14))
def test_nobody_waits_while_at_work_nor_twice_at_once(
    found: list[tuple[float, float, int, int, int]],
) -> None:
    names = ("a", "b", "c")
    works = works_of(
        [
            span(step, names[stage], f"p{pool}", (start, start + took), after=names[:stage])
            for start, took, pool, stage, step in found
        ]
    )
    low, high = min(work.start_s for work in works), max(work.end_s for work in works)
    waits = waits_of(works, low, high)
    for one in rank_times(works, waits, low, high):
        own = sorted((wait.start_s, wait.end_s) for wait in waits if wait.on == one.on)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
        done = [(work.start_s, work.end_s) for work in works if work.on == one.on]
        assert all(end <= begun or start >= ended for begun, ended in own for start, end in done)
        idle_s = sum(end - start for start, end in own)
        assert one.busy_s + idle_s == pytest.approx(high - low, abs=1e-9), "every second is accounted for"


def test_the_command_says_who_waited_for_whom(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("steps 1 to 2: 20 s")
    assert "main 0 35% 57% 8% policy.generate on answers 40%, reward.score on scores 12%, " in told
    assert "main 1 40% 52% 8% policy.generate on answers 40%" in told
    assert (
        "policy.update main 5.25 s policy.generate on answers 4.00 s, reward.score on scores 1.25 s" in told
    )
    assert "causes: by recorded inputs" in told
    assert main(["timeline", str(run), "--steps", "2"]) == 0
    assert capsys.readouterr().out.startswith("step 2: 9.0 s")


def test_the_trace_has_a_process_for_each_pool_and_a_thread_for_each_rank(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert main(["timeline", str(run), "--out", str(file)]) == 0
    events: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["traceEvents"]
    names = {(one["name"], one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M"}
    processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    threads = {
        tid: (processes[pid], name) for (kind, pid, tid), name in names.items() if kind == "thread_name"
    }
    assert sorted(threads.values()) == [
        ("answers", "rank 0"),
        ("main", "rank 0"),
        ("main", "rank 1"),
        ("scores", "rank 0"),
    ]
    drawn = [one for one in events if one["ph"] == "X"]
    stages = [
        (*threads[one["tid"]], one["name"], one["ts"], one["dur"]) for one in drawn if one["cat"] == "stage"
    ]
    assert ("main", "rank 1", "policy.update", 6_500_000, 3_500_000) in stages
    assert len(stages) == sum(len(each.ranks) for each in read_spans(run))
    scored = next(one for one in drawn if one["name"] == "reward.score")
    assert scored["args"] == {"step": 1, "rows": 4, "tokens": 9, "after": ["policy.generate"]}
    waited = next(one for one in drawn if one["cat"] == "wait" and threads[one["tid"]] == ("main", "rank 0"))
    assert waited["name"].startswith("waits for ") and waited["args"]["before"] == "policy.update"


def test_the_drawing_shows_waits_beside_work_and_no_more_ranks_than_it_has_room_for(run: Path) -> None:
    svg = str(markup(draw_timeline(measured_bars(measured(load(run))))))
    assert svg.count('class="lane"') == 4 and "idle, with its cause" in svg
    assert "waits for policy.generate on answers: 4.0 s from 0 ms" in svg
    with RunDirectory.open(run, {}) as made:
        made.log_span(span(3, "policy.update", "main", *[(21, 22)] * 40))
    found = measured(load(run))
    assert {bar.lane for bar in measured_bars(found) if bar.pool == "main"} == {
        f"rank {rank:>2}" for rank in range(MOST_LANES)
    }
    assert "  ranks 16 to 39 of main are only in the trace" in measured_lines(found)
    assert sum(one["name"] == "thread_name" for one in trace_of(found)["traceEvents"]) == 42


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "there is no run directory"),
        (["RUN", "--steps", "3"], "has no span of step 3"),
        (["RUN", "--steps", "0-2"], "has spans of steps 1 to 2"),
        (["RUN", "--out", "no/such/folder/t.json"], "there is no folder no/such/folder"),
        (["RUN", "--out", "there.json"], "existing files are never overwritten"),
        (["EMPTY"], "has no spans"),
    ],
)
def test_what_cannot_be_shown_is_named(
    run: Path,
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    Path("there.json").write_text("mine")
    with RunDirectory.open(Path("empty"), {}):
        pass
    known = {"RUN": "run", "EMPTY": "empty"}
    assert main(["timeline", *(known.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""
    assert Path("there.json").read_text() == "mine"


@pytest.mark.parametrize("text", ["8-5", "a-b", "-", "5-", "1-2-3", ""])
def test_a_range_that_is_none_is_refused_with_its_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["timeline", "run", f"--steps={text}"])
    assert caught.value.code == 2
    assert f"{text!r} is not a range of steps, such as 5-8, or 5" in capsys.readouterr().err
