"""``evaluate.patience``: a run whose held-out result no longer improves ends as a finished run."""

from __future__ import annotations

import json

import pytest

from rillflow.app.resume import run_state
from rillflow.controller.cadence import Cadence
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from tests.flows.conftest import SUMS, Tiny

FLAT = "def reward(prompts, completions, **_):\n    return [0.5] * len(completions)\n"
AHEAD = ('schedule={mode="ahead",freshness=1}',)


@pytest.mark.parametrize("settings", [(), pytest.param(AHEAD, marks=pytest.mark.slow)], ids=["now", "ahead"])
def test_a_run_ends_when_its_patience_is_over(
    tiny: Tiny, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(f"steps = 7\n{SUMS}\n[evaluate]\nevery = 2\npatience = 2\n", FLAT)
    assert tiny.run("run", *settings) == 0
    said = capsys.readouterr().out
    assert "stopped early: the 2 evaluations after step 0 are not better than held-out mean reward" in said
    made = len(tiny.lines("run"))
    assert made in range(4, 7), "open steps are finished, and no other"
    mark = json.loads((tiny.folder / "run/finished.json").read_text())
    assert mark["steps"] == 7 and mark["patience"] == 2 and "evaluations" in mark["early"]
    assert tiny.steps_kept("run")[-1] == made
    assert tiny.run("run", *settings) == 0
    assert "is finished" in capsys.readouterr().out and len(tiny.lines("run")) == made
    assert "ended early: the 2 evaluations" in run_state(tiny.folder / "run")
    assert tiny.run("run", *settings, "evaluate.patience=0") == 0
    assert len(tiny.lines("run")) == 7


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tiny: Tiny) -> None:
    tiny.write(f"steps = 7\n{SUMS}\n[evaluate]\nevery = 2\n", FLAT)
    assert tiny.run("run", "evaluate.patience=2") == tiny.run("run") == tiny.run("whole") == 0
    assert len(tiny.lines("run")) == 7
    tiny.assert_same("run", "whole")


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        ([0.1, 0.2, 0.3], False),
        ([0.3, 0.1], False),
        ([0.3, 0.1, 0.2], True),
        ([0.3, 0.3, 0.3], True),
        ([0.1, 0.1, 0.2], False),
        ([float("nan")] * 5, False),
        ([], False),
    ],
)
def test_an_equal_result_is_no_better_one(tiny: Tiny, rewards: list[float], ends: bool) -> None:
    cadence = Cadence(
        **dict.fromkeys(("evaluate_every", "checkpoint_every", "keep_checkpoints", "max_skipped"), 1),
        checkpoint_s=0.0,
        patience=2,
    )
    with RunDirectory.open(tiny.folder / "run", {"a": 1}) as run:
        for step, reward in enumerate(rewards):
            run.log_evaluation(step, Evaluation(count=4, mean_reward=reward, is_accuracy=False))
            run.log_evaluation(step, Evaluation(count=4, mean_reward=9.0 + step, set="other"))
        assert bool(cadence.exhausted(run.path)) is ends
