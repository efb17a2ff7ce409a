"""Written records are read back; torn ends are tolerated, invalid content is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Histogram, LargestShare, Max, Mean, Metric, Min, Sum, Variance
from rillflow.records.row import RowId
from rillflow.runs.json_lines import encode, read_lines
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import (
    Evaluation,
    RankSpan,
    SpanRecord,
    read_config,
    read_evaluations,
    read_metrics,
    read_rollouts,
    read_spans,
    read_starts,
    rollout_columns,
)
from rillflow.runs.run_directory import RunDirectory
from tests.unit.written_rollouts import write_rollouts

ROW = {
    "epoch": 1,
    "prompt_id": 17,
    "sample": 3,
    "prompt": "17+25=",
    "columns": {"answer": 42},
    "tokens": [7, 4, 2, 0],
    "token_texts": ["=", "4", "2", ""],
    "logprobs": [0.0, -0.5, -0.25, -0.125],
    "versions": [-1, 3, 3, 4],
    "finish": "stop",
    "completion": "42",
    "message": "",
    "outcome": "score",
    "reward": 1.0,
    "advantage": 0.5,
}
SPAN = {"step": 1, "stage": "policy.generate", "start_s": 0.0, "duration_s": 1.5, "rows": 2, "tokens": 9}


def strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_metrics_come_back_with_their_reductions(tmp_path: Path) -> None:
    metrics: dict[str, Metric] = {
        "a": Mean(total=3.0, count=4),
        "b": Sum(value=7.0),
        "c": Max(value=1e300),
        "d": Min(value=-2.5),
        "e": Variance(squares=8.0, mean=-1.5, count=4),
        "f": Histogram(edges=(0.0, 1.5), counts=(3, 0, 2)),
        "g": LargestShare(most=3.0, total=8.0),
    }
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_metrics(5, "grpo", metrics)
    (record,) = read_metrics(tmp_path / "run")
    assert (record.step, record.phase, record.metrics) == (5, "grpo", metrics)


def test_numbers_json_does_not_have_become_null_with_a_note_and_come_back(tmp_path: Path) -> None:
    metrics: dict[str, Metric] = {
        "nan": Mean(total=math.nan, count=2),
        "none": Mean(total=0.0, count=0),
        "inf": Max(value=math.inf),
        "low": Min(value=-math.inf),
        "good": Sum(value=1.0),
    }
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_metrics(1, "grpo", metrics)
        write_rollouts(run.path, 1, [{**ROW, "reward": math.nan, "logprobs": [0.0, -0.5, -math.inf, -0.1]}])
        run.log_evaluation(1, Evaluation(correct=0, count=0, mean_reward=math.nan, interval=(0.0, 1.0)))
    line = strict((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["metrics"]["nan"] == {"mean": None, "count": 2}
    assert line["notes"] == {
        "metrics.nan.mean": "nan",
        "metrics.none.mean": "nan",
        "metrics.inf.max": "inf",
        "metrics.low.min": "-inf",
    }
    read = read_metrics(tmp_path / "run")[0].metrics
    assert math.isnan(read["nan"].value) and read["inf"].value == math.inf and read["low"].value == -math.inf
    merged = read["none"].merge(Mean(total=3.0, count=4))  # type: ignore[arg-type]
    assert merged.value == 0.75
    (row,) = read_rollouts(tmp_path / "run", 1)
    assert row.logprobs == (0.0, -0.5, -math.inf, -0.1)
    assert row.reward is None
    (evaluation,) = read_evaluations(tmp_path / "run")
    assert math.isnan(evaluation.mean_reward) and math.isnan(evaluation.accuracy)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and not math.isfinite(one):
        return other is None
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b"]), json_values))
def test_any_record_is_one_line_of_strict_json_that_says_the_same(record: dict[str, Any]) -> None:
    line = encode(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    back = strict(line.decode("utf-8"))
    back.pop("notes", None)
    normal = json.loads(json.dumps(record))
    assert same(normal, back)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(), min_size=1, max_size=4), st.data())
def test_a_file_cut_anywhere_gives_the_lines_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    lines = [encode({"value": value}) for value in values]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    file.write_bytes(whole[:cut])
    found = read_lines(file)
    complete = [index for index in range(len(lines)) if len(b"".join(lines[: index + 1])) <= cut]
    assert [line.data["value"] for line in found.lines] == [values[index] for index in complete]
    ends_well = cut in (0, *(len(b"".join(lines[: index + 1])) for index in range(len(lines))))
    assert (found.torn_at is None) == ends_well


def test_a_rollout_comes_back(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        write_rollouts(run.path, 12, [ROW, {**ROW, "outcome": "timeout", "reward": None, "message": "10 s"}])
    assert (tmp_path / "run" / "rollouts" / "step-000012-0001-of-0001.safetensors").is_file()
    first, second = read_rollouts(tmp_path / "run", 12)
    assert first.row == RowId(epoch=1, prompt=17, sample=3)
    assert (first.prompt, first.completion, first.tokens) == ("17+25=", "42", (7, 4, 2, 0))
    assert (first.sampled, first.token_texts) == ((1, 2, 3), ("=", "4", "2", ""))
    assert (first.versions, first.finish, first.reward, first.advantage) == ((-1, 3, 3, 4), "stop", 1.0, 0.5)
    assert (second.outcome, second.reward, second.message) == ("timeout", None, "10 s")


def test_an_older_run_s_rollouts_are_lines_of_json(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        (run.path / "rollouts").mkdir()
        (run.path / "rollouts" / "step-000001.jsonl").write_bytes(encode(ROW))
        write_rollouts(run.path, 2, [ROW])
        (older,), (newer,) = (read_rollouts(run.path, step) for step in (1, 2))
    assert older == newer
    assert rollout_columns(run.path, 1)["prompt"] == rollout_columns(run.path, 2)["prompt"] == ["17+25="]


def test_an_older_run_s_row_whose_reward_is_no_number_has_no_reward(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        (run.path / "rollouts").mkdir()
        row = {**ROW, "reward": math.nan, "logprobs": [0.0, -math.inf, -0.25, -0.125]}
        (run.path / "rollouts" / "step-000001.jsonl").write_bytes(encode(row))
        (record,) = read_rollouts(run.path, 1)
        assert record.reward is None and record.logprobs[1] == -math.inf
        assert rollout_columns(run.path, 1)["reward"] == [None]


def test_a_step_of_which_a_file_is_missing_is_as_if_it_had_none(tmp_path: Path) -> None:
    """A run was killed while ranks wrote; a resume removes the written part."""
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in (1, 2):
            write_rollouts(run.path, step, [ROW])
        kept = run.path / "rollouts" / "step-000002-0001-of-0001.safetensors"
        cut = kept.rename(kept.with_name("step-000002-0001-of-0002.safetensors"))
        assert list(rollout_files(run.path)) == [1]
        run.rewind(1)
        assert not cut.exists() and list(rollout_files(run.path)) == [1]


def test_a_damaged_file_of_rollouts_is_named(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        write_rollouts(run.path, 1, [ROW])
        file = run.path / "rollouts" / "step-000001-0001-of-0001.safetensors"
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(RunDirectoryError, match=r"cannot read .*step-000001-0001-of-0001"):
            read_rollouts(run.path, 1)


def test_a_span_covers_its_ranks_and_counts_the_rows_of_those_that_are_taken(tmp_path: Path) -> None:
    late = RankSpan(rank=1, start_s=2.5, duration_s=2.0, rows=3, tokens=12)
    early = RankSpan(rank=0, start_s=2.25, duration_s=1.0, rows=4, tokens=15)
    copy = RankSpan(rank=2, start_s=2.5, duration_s=0.5, rows=4, tokens=15)
    how = {"step": 1, "stage": "reward.score", "pool": "main", "after": ["policy.generate"]}
    made = SpanRecord.of_ranks([late, early, copy], 2, **how)  # type: ignore[arg-type]
    assert (made.start_s, made.duration_s, made.rows, made.tokens) == (2.25, 2.25, 7, 27)
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_span(made)
        assert read_spans(run.path) == [replace(made, ranks=(early, late, copy), after=("policy.generate",))]


def test_spans_of_an_older_version_say_nothing_of_ranks(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        (run.path / "spans.jsonl").write_bytes(encode(SPAN))
        (span,) = read_spans(run.path)
    assert (span.ranks, span.after, span.pool, span.duration_s) == ((), (), "", 1.5)


def test_a_step_that_sampled_nothing_has_no_file(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        write_rollouts(run.path, 1, iter([]))
        assert not (run.path / "rollouts").exists()


def test_a_chat_prompt_is_read_as_text(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    with RunDirectory.open(tmp_path / "run", {}) as run:
        write_rollouts(run.path, 1, [{**ROW, "prompt": chat}])
    assert read_rollouts(tmp_path / "run", 1)[0].prompt == "system: Be brief.\n\nuser: 2+2?"


def test_files_that_are_not_there_are_empty_and_a_missing_step_names_those_there_are(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        assert read_metrics(run.path) == read_spans(run.path) == read_evaluations(run.path) == []
        assert read_starts(run.path) == []
        with pytest.raises(RunDirectoryError, match="no rollouts of step 3") as caught:
            read_rollouts(run.path, 3)
        assert "it has no rollouts" in caught.value.why
        for step in (2, 12):
            write_rollouts(run.path, step, [ROW])
        with pytest.raises(RunDirectoryError, match="steps 2 to 12"):
            read_rollouts(run.path, 3)


BAD: list[tuple[Callable[[Path], Any], str, bytes, str]] = [
    (read_metrics, "metrics.jsonl", b"hello", "line 1 is not a JSON object: 'hello'"),
    (read_metrics, "metrics.jsonl", b"[1, 2]", "line 1 is not a JSON object: '[1, 2]'"),
    (read_metrics, "metrics.jsonl", b"[" * 100_000, "line 1 is not a JSON object"),
    (read_metrics, "metrics.jsonl", b"\xff\xfe{}", "line 1 is not a JSON object: '\ufffd\ufffd{}'"),
    (read_metrics, "metrics.jsonl", b'{"step": 1, "phase": "a"}', "field 'metrics' is missing"),
    (read_metrics, "metrics.jsonl", b'{"step": "x", "metrics": {}}', "field 'step' is 'x'"),
    (
        read_metrics,
        "metrics.jsonl",
        b'{"step": 1, "phase": "a", "time_s": 0, "metrics": {"m": {"median": 1}}}',
        "metric 'm' is {'median': 1}",
    ),
    (read_spans, "spans.jsonl", encode({**SPAN, "duration_s": "1"}).strip(), "field 'duration_s' is '1'"),
    (read_spans, "spans.jsonl", encode({**SPAN, "rows": True}).strip(), "field 'rows' is 'True'"),
    (read_spans, "spans.jsonl", encode({**SPAN, "ranks": [0]}).strip(), "'ranks' is '[0]'"),
    (read_spans, "spans.jsonl", encode({**SPAN, "ranks": [{"rank": 0}]}).strip(), "'start_s' is missing"),
    (read_spans, "spans.jsonl", encode({**SPAN, "after": "a"}).strip(), "field 'after' is 'a'"),
    (
        read_evaluations,
        "evaluations.jsonl",
        b'{"step": 1, "correct": 1, "count": 2, "mean_reward": 0, "interval": [1]}',
        "interval has 1 ends",
    ),
    (
        lambda run: read_rollouts(run, 1),
        "rollouts/step-000001.jsonl",
        encode({**ROW, "versions": [1]}).strip(),
        "1 versions for 4 tokens",
    ),
]


@pytest.mark.parametrize(("read", "name", "line", "word"), BAD)
def test_garbage_is_named_with_file_and_line(
    tmp_path: Path, read: Callable[[Path], Any], name: str, line: bytes, word: str
) -> None:
    RunDirectory.open(tmp_path / "run", {}).close()
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).write_bytes(line + b"\n" + encode(SPAN))
    with pytest.raises(RunDirectoryError) as caught:
        read(tmp_path / "run")
    assert word in str(caught.value)
    assert f"{name} line 1" in str(caught.value)


def test_a_resume_over_garbage_stops_and_changes_nothing(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", {}).close()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"hello\n" + encode(SPAN))
    with pytest.raises(RunDirectoryError, match="line 1 is not a JSON object"):
        RunDirectory.open(tmp_path / "run", {})
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b"hello\n" + encode(SPAN)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        read_config(tmp_path / "none")
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        read_config(tmp_path)
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.write_json("environment.json", {"format": 1})
    with pytest.raises(RunDirectoryError, match="has no list of starts"):
        read_starts(tmp_path / "run")
