"""Computations of benchmarks outside Rillflow's runs: predictions of rungs, counts of wrong rows."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "streaming"))

if find_spec("rillflow_planner") is None:
    pytest.skip("the planner is not installed", allow_module_level=True)

import computing
import rungs
import watched

from rillflow.runs.reader import read_rollouts
from tests.unit.written_rollouts import write_rollouts

KNOWN = computing.Calibration(
    pass_s=0.035,
    row_s=0.002,
    stages_s={"reward.score": 0.01, "policy.update": 3.0, "policy.publish": 0.4},
    rest_s=0.1,
)
SIZE = computing.SIZES["computing"]


@pytest.fixture
def told(tmp_path: Path) -> dict[str, float]:
    """Return the predicted seconds of a step by rung."""
    recipe = computing.written(tmp_path, SIZE, "ray")
    every = rungs.rungs_of(computing.RUNGS, computing.MINIBATCHES, 5)
    predicted = {rung.name: computing.simulated(recipe, KNOWN, SIZE, rung) for rung in every}
    return {rung.name: sum(predicted[rung.name][rung.skipped :]) / 5 for rung in every}


def test_a_step_in_sequence_is_predicted_as_the_sum_of_its_stages(told: dict[str, float]) -> None:
    lengths = computing.lengths_of(SIZE.longest)
    generation = KNOWN.pass_s * computing.passes(lengths, SIZE.at_once) + KNOWN.row_s * sum(lengths)
    assert told["in sequence"] == pytest.approx(generation + 0.01 + 3.0 + 0.4 + 0.1, rel=0.02)


def test_rungs_ahead_are_predicted_faster_and_no_faster_than_their_longest_pool(
    told: dict[str, float],
) -> None:
    assert told["in sequence"] > told["by parts"] > told["1 ahead"] > 3.0
    assert told["1 ahead"] >= told["4 ahead, ready first"] >= 3.0


def test_rows_of_a_run_have_the_given_lengths(tmp_path: Path) -> None:
    recipe = computing.written(tmp_path, computing.SIZES["computing-tiny"], "inline")
    run = rungs.run_of(
        recipe, tmp_path / "run", 'schedule={mode="streamed",stream_chunks=4}', "algorithm.steps=2"
    )
    lengths = computing.lengths_of(computing.SIZES["computing-tiny"].longest)
    for step in (1, 2):
        assert [len(each.sampled) for each in read_rollouts(run, step)] == list(lengths)


def test_the_model_has_100_million_parameters() -> None:
    assert SIZE.parameters >= 100e6


@pytest.mark.parametrize(("at_once", "passes"), [(1, 10), (2, 6), (4, 4)])
def test_a_row_that_ends_makes_room_for_the_next(at_once: int, passes: int) -> None:
    assert computing.passes([4, 1, 3, 2], at_once) == passes


def test_rungs_count_whole_bursts_of_steps_in_flight() -> None:
    (rung,) = rungs.rungs_of(["4 ahead, ready first"], 4, 6)
    assert (rung.bound, rung.skipped, rung.steps) == (4, 18, 28)


def test_steps_per_minute_of_a_watched_run_are_those_between_two_times() -> None:
    assert watched.per_minute([0.0, 10.0, 20.0, 40.0], [0, 5, 10, 10], 10.0, 40.0) == pytest.approx(10.0)


def test_repeated_steps_count_once() -> None:
    """Ten steps, a restart from the fifth and ten more are five steps of progress after the tenth second."""
    times, steps = [0.0, 10.0, 10.1, 20.0, 30.0], [0, 10, 5, 10, 15]
    assert watched.per_minute(times, steps, 10.0, 30.0) == pytest.approx(15.0)


def _rows(*ids: tuple[int, int, int]) -> list[dict[str, int]]:
    return [{"epoch": epoch, "prompt_id": prompt, "sample": sample} for epoch, prompt, sample in ids]


def test_rows_that_are_doubled_missing_or_never_trained_are_counted(tmp_path: Path) -> None:
    """Epochs of two prompts with two rows; no step trains prompt 1 of the first epoch."""
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path, 1, _rows((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)))
    write_rollouts(tmp_path, 2, _rows((1, 1, 0), (1, 1, 1), (2, 0, 0), (2, 0, 1)))
    assert watched.wrong_rows(tmp_path, 2, 2, 2) == {"doubled": 0, "missing": 0, "never trained": 2}
    write_rollouts(tmp_path, 3, _rows((0, 1, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1)))
    assert watched.wrong_rows(tmp_path, 2, 2, 2) == {"doubled": 1, "missing": 1, "never trained": 0}
