"""Recorded passes: written and read again, their idle time, and how they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.controller.pipeline_passes import passes_record
from rillflow.runs import layout
from rillflow.runs.passes import ALONE, PassesRecord, alone_bubble, read_passes, windows
from rillflow.runs.run_directory import RunDirectory
from rillflow.workers.arguments import Facts, PipelineRun, TimedPass
from rillflow.workers.backend import Place

STAGES, BATCHES, AHEAD_S = 2, 2, -1000.0


def timed(micro_batch: int, is_backward: bool, began: float, ended: float) -> TimedPass:
    return TimedPass(micro_batch=micro_batch, is_backward=is_backward, began=1000 + began, ended=1000 + ended)


def facts(rank: int, *runs: PipelineRun) -> Facts:
    return Facts(rows=-1, tokens=0, began=1000.0, ended=1030.0, place=Place("main", rank), runs=runs)


def one_f_one_b(stage: int, start: float = 0.0) -> tuple[TimedPass, ...]:
    """1F1B of two micro-batches on two stages: forward passes of 1 s, backward passes of 2 s."""
    order = ((0, False, 0), (1, False, 1), (0, True, 4), (1, True, 7))
    if stage:
        order = ((0, False, 1), (0, True, 2), (1, False, 4), (1, True, 5))
    return tuple(timed(batch, back, start + at, start + at + (2 if back else 1)) for batch, back, at in order)


def alone(name: str, start: float = 0.0, gain: float | None = None) -> PassesRecord:
    found = [
        facts(stage, PipelineRun(stage=stage, passes=one_f_one_b(stage, start), gain=gain))
        for stage in range(STAGES)
    ]
    record = passes_record(f"{name}.update", 3, found, AHEAD_S)
    assert record is not None
    return record


def fused() -> list[PassesRecord]:
    """Two models in opposite directions that leave no device idle between 0 and 12 s."""
    full = [
        [timed(batch, back, at, at + 1.5) for batch, back, at in order]
        for order in (
            ((0, False, 0), (1, False, 1.5), (0, True, 6), (1, True, 7.5)),
            ((0, False, 3), (1, False, 4.5), (0, True, 9), (1, True, 10.5)),
        )
    ]
    return [
        record
        for name, order in (("policy", full), ("critic", full[::-1]))
        if (
            record := passes_record(
                f"{name}.update",
                3,
                [
                    facts(rank, PipelineRun(stage=rank, passes=tuple(passes), gain=0.4, bubble=0.05))
                    for rank, passes in enumerate(order)
                ],
                AHEAD_S,
            )
        )
    ]


def test_a_pipeline_alone_has_the_bubble_of_its_schedule() -> None:
    (window,) = windows([alone("policy")])
    assert (window.start_s, window.end_s, window.ranks) == (0, 9, 2)
    assert window.bubble == pytest.approx(1 / 3) and window.predicted == pytest.approx(1 / 3, abs=1e-6)
    assert window.gain == ALONE and window.in_turn_s == pytest.approx(9)
    assert alone_bubble(None) == 0


def test_fused_passes_are_one_window_and_their_gain_is_measured() -> None:
    records = fused()
    (window,) = windows(records)
    assert window.stages == ("critic.update", "policy.update")
    assert window.bubble == pytest.approx(0) and window.predicted == 0.05
    assert window.in_turn_s == pytest.approx(2 * 9) and window.measured_gain == pytest.approx(1 - 12 / 18)


def test_passes_in_turn_have_a_window_each() -> None:
    records = [alone("critic", 0.0, 0.012), alone("policy", 20.0, 0.012)]
    assert [window.stages for window in windows(records)] == [("critic.update",), ("policy.update",)]


def test_a_stage_without_pipeline_has_no_record() -> None:
    assert passes_record("policy.update", 1, [facts(0), facts(1)], 0.0) is None
    assert passes_record("policy.update", 1, [facts(0, PipelineRun(stage=0, passes=()))], 0.0) is None


def test_records_are_read_as_written_and_go_with_their_step(tmp_path: Path) -> None:
    records = [alone("critic"), *fused()]
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for each in records:
            run.log_passes(each)
        assert read_passes(tmp_path / "run") == records
        run.rewind(2)
    assert read_passes(tmp_path / "run") == [] and layout.PASSES in layout.STEP_FILES
