"""Records of a growing run directory: each once, in order, also after lines were dropped or cut off."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rillflow.records.metrics import Histogram, Max, Mean, Sum
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow_parts.trackers.records import GrowingFile, Position, RunRecords
from rillflow_parts.trackers.tracker import TrackerError
from rillflow_parts.trackers.worker import Sent


def log(run: RunDirectory, step: int) -> None:
    metrics = {
        "a/mean": Mean(total=float(step), count=2),
        "b/max": Max(value=math.nan),
        "c/sum": Sum(value=1.0),
        "d/histogram": Histogram(edges=(0.0,), counts=(1, 2)),
    }
    run.log_metrics(step, "p", metrics)


def test_each_record_comes_once_and_a_rewind_doubles_nothing(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"a": 1}) as run:
        records, position = RunRecords(run.path), Position()
        seen = list[tuple[int, str | None]]()

        def take() -> None:
            for record in records.new(position):
                position.add(record)
                seen.append((record.step, record.set))

        take()
        run.log_evaluation(0, Evaluation(count=4, mean_reward=0.5, correct=2))
        log(run, 1)
        take()
        log(run, 2)
        run.log_evaluation(2, Evaluation(count=4, mean_reward=0.5, set="hard", is_accuracy=False))
        run.log_evaluation(2, Evaluation(count=4, mean_reward=0.5))
        take()
        run.rewind(1)
        log(run, 2)
        run.log_evaluation(2, Evaluation(count=4, mean_reward=0.5))
        log(run, 3)
        take()
    assert seen == [(0, ""), (1, None), (2, None), (2, ""), (2, "hard"), (3, None)]


def test_values_are_flat_numbers(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"a": 1}) as run:
        log(run, 1)
        more = {"length_mean": 2.0, "pass@2": 0.5, "text": "x"}
        ends = (0.1, 0.9)
        run.log_evaluation(1, Evaluation(count=4, mean_reward=0.5, correct=2, interval=ends, more=more))
        step, evaluation = RunRecords(run.path).new(Position())
    assert step.values.keys() == {"a/mean", "b/max", "c/sum"}
    assert step.values["a/mean"] == 0.5 and math.isnan(step.values["b/max"])
    assert evaluation.values == {
        "evaluation/mean_reward": 0.5,
        "evaluation/accuracy": 0.5,
        "evaluation/interval_low": 0.1,
        "evaluation/interval_high": 0.9,
        "evaluation/length_mean": 2.0,
        "evaluation/pass@2": 0.5,
    }


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    growing = GrowingFile(file)
    assert list(growing.lines()) == []
    file.write_bytes(b'{"step": 1}\n{"st')
    assert list(growing.lines()) == [{"step": 1}]
    with file.open("ab") as more:
        more.write(b'ep": 2}\nno json\n{"step": 3}\n')
    assert list(growing.lines()) == [{"step": 2}, {"step": 3}]
    file.write_bytes(b'{"step": 1}\n')
    assert list(growing.lines()) == [{"step": 1}]


def test_other_settings_begin_again_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    Sent(settings={"a": 1}, kept={"id": "x"}, position=Position(step=4, evaluated={"": 2})).write(file)
    assert Sent.read(file, {"a": 1, "wait_s": 3}).position == Position(step=4, evaluated={"": 2})
    assert Sent.read(file, {"a": 2}).position == Position() and not Sent.read(file, {"a": 2}).kept
    for text in ("", "{}", '{"settings": {"a": 1}, "position": {"steps": 1}}'):
        file.write_text(text)
        with pytest.raises(TrackerError, match="is damaged"):
            Sent.read(file, {"a": 1})
