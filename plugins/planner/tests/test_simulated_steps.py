"""Simulated steps of measured runs: their seconds, and their lanes in the report and the timeline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.runs.report.measured import bars_with, measured, measured_bars
from rillflow.runs.report.timeline import Bar
from rillflow.runs.report.write import write_report
from rillflow.runs.run_data import load
from rillflow_planner.simulated_report import LANE, SimulatedSteps
from rillflow_planner.simulated_run import simulate_steps
from tests.flows.test_timeline import STEPS, ahead, in_step, on_ray, worked

__all__ = ["ahead", "in_step", "on_ray"]


@pytest.mark.slow
def test_predicted_steps_on_ray_take_at_least_the_seconds_of_the_pool_that_trains(on_ray: Path) -> None:
    found = simulate_steps(load(on_ray), 1, STEPS)
    assert isinstance(found, SimulatedSteps)
    assert 0.9 * worked(on_ray, "main") < sum(found.steps_s[1:]) < 1.1 * worked(on_ray)


def test_predicted_steps_in_step_are_the_stages_one_after_another_and_stand_on_the_measured_lanes(
    in_step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load(in_step)
    found = simulate_steps(data, 2, STEPS)
    assert isinstance(found, SimulatedSteps) and (found.first, len(found.steps_s)) == (2, 2)
    assert sum(found.steps_s) == pytest.approx(worked(in_step), rel=0.05), "rows differ in length by little"
    shown = measured(data, 2, STEPS)
    bars = bars_with(shown, measured_bars(shown), found)
    lanes = {(bar.pool, bar.lane): list[Bar]() for bar in bars}
    for bar in bars:
        lanes[bar.pool, bar.lane].append(bar)
    assert list(lanes) == [
        (pool, lane)
        for pool, ranks in (("answers", 1), ("main", 2))
        for lane in (*(f"rank {rank:>2}" for rank in range(ranks)), LANE)
    ]
    assert {bar.stage for bar in lanes["answers", LANE] if not bar.is_idle} == {"policy.generate"}
    assert lanes["answers", LANE][0].start_s == pytest.approx(lanes["answers", "rank  0"][0].start_s)
    assert main(["timeline", str(in_step), "--steps", "2-3"]) == 0
    seconds = sum(record.metrics["run/step_seconds/mean"].value for record in data.steps[1:]) / 2
    error = sum(found.steps_s) / 2 / seconds - 1
    told = next(line for line in capsys.readouterr().out.splitlines() if "predicts" in line)
    assert told.startswith("steps 2 to 3: the simulator predicts ") and told.endswith(f"({error:+.0%})")


def test_predicted_steps_ahead_take_less_than_their_stages_and_no_less_than_the_busiest_pool(
    ahead: Path,
) -> None:
    found = simulate_steps(load(ahead), 2, STEPS)
    assert isinstance(found, SimulatedSteps)
    busiest = max(worked(ahead, pool) for pool in ("main", "answers", "scores"))
    assert 0.95 * busiest < sum(found.steps_s) < 0.97 * worked(ahead)
    assert f"{LANE}</text>" in write_report(ahead, simulate_steps).read_text("utf-8")


def test_where_a_run_cannot_be_simulated_it_says_why(in_step: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(in_step, run)
    config = json.loads((run / "config.json").read_text())
    config["algorithm"]["name"] = "of_my_own"
    (run / "config.json").write_text(json.dumps(config))
    assert main(["timeline", str(run)]) == 0
    page = write_report(run, simulate_steps).read_text("utf-8")
    assert "not predicted: " in page and "of_my_own" in page
