"""Nothing is lost by default: work before an error is saved and reported."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.main import main
from rillflow.controller import cadence, loop, run_checkpoint
from rillflow.controller.open_step import OpenStep, Phase
from rillflow.errors import ModelError
from rillflow.roles import saving
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.reader import best_step, read_rollouts
from rillflow.training.trainer import Trainer
from tests.flows.conftest import SUMS, Tiny

REST = f"""
steps = 6
{SUMS}[evaluate]
problems = 4
"""
REWARD = """
from pathlib import Path

FAILS_AT = Path(__file__).with_name("fails_at")
FAILS_ON = Path(__file__).with_name("fails_on")
calls = 0

def reward(prompts, completions, **_):
    global calls
    calls += 1
    if FAILS_AT.exists() and calls >= int(FAILS_AT.read_text()):
        raise ConnectionError("the judge is down")
    if FAILS_ON.exists() and FAILS_ON.read_text() in prompts:
        raise ConnectionError("the judge of this rank is down")
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST, REWARD)
    return tiny


def test_an_outage_of_the_reward_loses_no_step_and_the_same_command_goes_on(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, folder = tiny.folder / "fails_at", tiny.folder / "late"
    assert tiny.run("whole") == 0
    failing.write_text("6")  # the first call is the evaluation before step 1
    assert tiny.run("late") == 1
    said = capsys.readouterr()
    assert "the judge is down" in said.err
    failure, saved = (
        said.out.index("the judge is down"),
        said.out.index("; the finished steps were saved first"),
    )
    assert failure < saved < said.out.index("step 4 is saved: run the same command to resume")
    assert tiny.steps_kept("late") == [4]
    assert "report so far: " in said.out and (folder / "report.html").is_file()
    assert json.loads((folder / "summary.json").read_text())["is_finished"] is False
    failing.unlink()
    assert tiny.run("late") == 0
    assert "resuming after step 4" in capsys.readouterr().out
    tiny.assert_same("whole", "late")


def test_an_outage_in_an_evaluation_loses_neither_the_step_nor_the_evaluation(tiny: Tiny) -> None:
    failing = tiny.folder / "fails_at"
    assert tiny.run("whole", "evaluate.every=2") == 0
    failing.write_text("4")  # before step 1, steps 1 and 2, then the evaluation after step 2
    assert tiny.run("late", "evaluate.every=2") == 1
    assert tiny.steps_kept("late") == [2]
    failing.unlink()
    assert tiny.run("late", "evaluate.every=2") == 0
    seen = [
        [(line["step"], line["mean_reward"]) for line in tiny.lines(name, "evaluations.jsonl")]
        for name in ("whole", "late")
    ]
    assert seen[0] == seen[1]
    assert [step for step, _ in seen[0]] == [0, 2, 4, 6]


APART = ("reward.max_failures=0", "placement.pools={main=2}", "placement.train_parallel={main={dp=2}}")
BOTH = (*APART, "placement.backend=inline")


def prompt_of(tiny: Tiny, name: str, step: int) -> str:
    """Return a prompt of the last rank's part of a step; the reward's trial uses other prompts."""
    return read_rollouts(tiny.folder / name, step)[-3].prompt


def test_an_outage_at_one_rank_of_several_loses_no_step(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank has its rewards, and does not wait when the step before is saved."""
    assert tiny.run("whole", *BOTH) == 0
    (tiny.folder / "fails_on").write_text(prompt_of(tiny, "whole", 3))
    assert tiny.run("late", *BOTH) == 1
    said = capsys.readouterr()
    assert "the judge of this rank is down" in said.err
    assert "step 2 is saved: run the same command to resume" in said.out
    assert tiny.steps_kept("late") == [2]
    (tiny.folder / "fails_on").unlink()
    assert tiny.run("late", *BOTH) == 0
    assert "resuming after step 2" in capsys.readouterr().out
    tiny.assert_same("whole", "late")


def test_an_error_of_one_rank_in_the_update_saves_the_step_before_it(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits in the sum of the gradients, and has made no optimiser step either."""
    step = Trainer.step

    def failing(self: Trainer, *aims: Any) -> Any:
        if self.optimizer.steps == 2 and self._ranks.rank == 1:
            raise ArithmeticError("a bit of this rank fell over")
        return step(self, *aims)

    assert tiny.run("whole", *BOTH) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", failing)
        assert tiny.run("late", *BOTH) == 1
    said = capsys.readouterr()
    assert "a bit of this rank fell over" in said.err
    assert "step 2 is saved: run the same command to resume" in said.out
    assert tiny.run("late", *BOTH) == 0
    tiny.assert_same("whole", "late")


@pytest.mark.slow
def test_an_outage_at_one_rank_on_ray_loses_no_step(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    where = (*APART, "placement.backend=ray", "run.checkpoint_every=2")
    assert tiny.run("whole", *BOTH, "run.checkpoint_every=2") == 0
    (tiny.folder / "fails_on").write_text(prompt_of(tiny, "whole", 4))
    assert tiny.run("late", *where) == 1
    assert "step 3 is saved: run the same command to resume" in capsys.readouterr().out
    (tiny.folder / "fails_on").unlink()
    assert tiny.run("late", *where) == 0
    tiny.assert_same("whole", "late")


def test_an_error_after_an_optimiser_step_saves_no_mixture(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = OpenStep.finish

    def failing(self: OpenStep, *given: Any) -> Any:
        found = finish(self, *given)
        if self.number == 5:
            raise OSError("the disk went away")
        return found

    monkeypatch.setattr(OpenStep, "finish", failing)
    assert tiny.run("late", "run.checkpoint_every=3") == 1
    assert "step 3 is saved; 1 steps after it will run again" in capsys.readouterr().out
    assert tiny.steps_kept("late") == [3]


def test_an_error_of_the_checkpoint_after_an_error_hides_nothing(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError("no space for it")

    (tiny.folder / "fails_at").write_text("4")
    monkeypatch.setattr(run_checkpoint, "save_checkpoint", full)
    assert tiny.run("late") == 1
    said = capsys.readouterr()
    assert "the judge is down" in said.err and "no space for it" not in said.err
    assert "no checkpoint could be written after the error: no space for it" in said.out
    assert "no step is saved" in said.out


@pytest.mark.parametrize("fails", ["its copy", "the thread"])
def test_a_checkpoint_that_fails_beside_training_ends_the_run_with_the_last_step_saved(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The error names the step; unfinished files are removed."""
    calls, write, begin = [0], saving.write_tensors, saving.Saving._copied

    def failing(act: Callable[..., Any], *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == (2 if fails == "its copy" else 3):  # step 4's
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return act(*given)

    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    assert tiny.run("whole", "run.checkpoint_every=2") == 0
    with monkeypatch.context() as patch:
        if fails == "its copy":
            patch.setattr(saving.Saving, "_copied", lambda self: failing(begin, self))
        else:
            patch.setattr(saving, "write_tensors", lambda *given: failing(write, *given))
        assert tiny.run("late", "run.checkpoint_every=2") == 1
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    if fails == "the thread":
        assert ".step-000004.begun cannot be written" in said.err
    assert tiny.steps_kept("late")[0] == 2 and tiny.steps_kept("late")[-1] in (4, 5)
    assert not list((tiny.folder / "late/checkpoints").glob(".step-*"))
    assert tiny.run("late", "run.checkpoint_every=2") == 0
    tiny.assert_same("whole", "late")


def test_checkpoints_come_by_the_clock_and_the_best_one_stays(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6])
    judged = loop.Loop._evaluate

    def told(self: loop.Loop, phase: Phase, step: int) -> float:
        judge, score = self._evaluator, next(scores)
        assert judge is not None
        self._evaluator = lambda executor: [_with_reward(each, score) for each in judge(executor)]
        try:
            return judged(self, phase, step)
        finally:
            self._evaluator = judge

    monkeypatch.setattr(loop.Loop, "_evaluate", told)
    often = ("run.checkpoint_minutes=1e-9", "run.keep_checkpoints=1", "evaluate.every=1")
    monkeypatch.setattr(cadence, "CHECKPOINT_SHARE", 1e9)
    assert tiny.run("run", *often) == 0
    assert tiny.steps_kept("run") == [2, 6]
    assert best_step(tiny.folder / "run") == 2
    assert main(["ask", str(tiny.folder / "run"), "1+1=", "--best"]) == 0


def _with_reward(found: loop.Evaluation, reward: float) -> loop.Evaluation:
    from dataclasses import replace

    return replace(found, mean_reward=reward)


def test_a_failed_start_leaves_nothing_that_refuses_the_corrected_command(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ModelError("the engine refuses the model")

    with monkeypatch.context() as patched:
        patched.setattr(NativeEngine, "__init__", refuses)
        assert tiny.run("run") != 0
    assert (tiny.folder / "run" / "config.json").is_file()
    assert tiny.run("run", "algorithm.steps=1") == 0
