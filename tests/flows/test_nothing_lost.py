"""Nothing is lost by default: what a run has made before an error is saved, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.cli.main import main
from rillflow.observe.reader import best_step
from rillflow.pipeline import loop

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 60
held_out = 10
[reward]
function = "scores.py:reward"
[policy]
lr = 1e-3
model.new = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[algorithm]
name = "grpo"
steps = 6
prompts_per_step = 4
samples_per_prompt = 2
[evaluate]
problems = 4
"""
REWARD = """
from pathlib import Path
FAILS_AT = Path(__file__).with_name("fails_at")
calls = 0

def reward(prompts, completions, **_):
    global calls
    calls += 1
    if FAILS_AT.exists() and calls >= int(FAILS_AT.read_text()):
        raise ConnectionError("the judge is down")
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
TIMES = {"run/step_seconds/mean"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "scores.py").write_text(REWARD)
    return tmp_path / "run.toml"


def run(recipe: Path, folder: str, *settings: str) -> int:
    words = [word for setting in settings for word in ("--set", setting)]
    return main(["run", str(recipe), "--dir", str(recipe.parent / folder), *words])


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line["metrics"].items() if k not in TIMES} for line in lines]


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def assert_same(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    newest = [max((run / "checkpoints").glob("step-*")) / "policy/model.safetensors" for run in (one, other)]
    first, second = map(load_file, newest)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_outage_of_the_reward_loses_no_step_and_the_same_command_goes_on(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, folder = recipe.parent / "fails_at", recipe.parent / "late"
    assert run(recipe, "whole") == 0
    failing.write_text("6")  # the first call is the evaluation before step 1
    assert run(recipe, "late") == 1
    said = capsys.readouterr()
    assert "the judge is down" in said.err
    failure, saved = said.out.index("the judge is down"), said.out.index("; saving step 4 first")
    assert failure < saved < said.out.index("step 4 is saved: the same command goes on from there")
    assert steps_kept(folder) == [4]
    assert "what there is so far" in said.out and (folder / "report.html").is_file()
    assert json.loads((folder / "summary.json").read_text())["is_finished"] is False
    failing.unlink()
    assert run(recipe, "late") == 0
    assert "resuming after step 4" in capsys.readouterr().out
    assert_same(recipe.parent / "whole", folder)


def test_an_outage_in_an_evaluation_loses_neither_the_step_nor_the_evaluation(recipe: Path) -> None:
    failing, folder = recipe.parent / "fails_at", recipe.parent / "late"
    assert run(recipe, "whole", "evaluate.every=2") == 0
    failing.write_text("4")  # before step 1, steps 1 and 2, then the evaluation after step 2
    assert run(recipe, "late", "evaluate.every=2") == 1
    assert steps_kept(folder) == [2]
    failing.unlink()
    assert run(recipe, "late", "evaluate.every=2") == 0
    seen = [
        [(line["step"], line["mean_reward"]) for line in map(json.loads, text.splitlines())]
        for text in ((recipe.parent / name / "evaluations.jsonl").read_text() for name in ("whole", "late"))
    ]
    assert seen[0] == seen[1]
    assert [step for step, _ in seen[0]] == [0, 2, 4, 6]


def test_an_error_after_an_optimiser_step_saves_no_mixture(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = loop.Loop._record

    def failing(self: loop.Loop, phase: loop.Phase, step: int) -> Any:
        found = record(self, phase, step)
        if step == 5:
            raise OSError("the disk went away")
        return found

    monkeypatch.setattr(loop.Loop, "_record", failing)
    assert run(recipe, "late", "run.checkpoint_every=3") == 1
    assert "step 3 is saved; 1 steps after it are made again" in capsys.readouterr().out
    assert steps_kept(recipe.parent / "late") == [3]


def test_an_error_of_the_checkpoint_after_an_error_hides_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError("no space for it")

    (recipe.parent / "fails_at").write_text("4")
    monkeypatch.setattr(loop, "save_checkpoint", full)
    assert run(recipe, "late") == 1
    said = capsys.readouterr()
    assert "the judge is down" in said.err and "no space for it" not in said.err
    assert "no checkpoint could be written after the error: no space for it" in said.out
    assert "no step is saved" in said.out


def test_checkpoints_come_by_the_clock_and_the_best_one_stays(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6])
    judged = loop.Loop._evaluate

    def told(self: loop.Loop, phase: loop.Phase, step: int) -> bool:
        judge, score = self._judge, next(scores)
        assert judge is not None
        self._judge = lambda executor: _with_reward(judge(executor), score)
        try:
            return judged(self, phase, step)
        finally:
            self._judge = judge

    monkeypatch.setattr(loop.Loop, "_evaluate", told)
    tiny = ("run.checkpoint_minutes=1e-9", "run.keep_checkpoints=1", "evaluate.every=1")
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", 1e9)
    assert run(recipe, "run", *tiny) == 0
    assert steps_kept(recipe.parent / "run") == [2, 6]
    assert best_step(recipe.parent / "run") == 2
    assert main(["ask", str(recipe.parent / "run"), "1+1=", "--best"]) == 0


def _with_reward(found: loop.Evaluation, reward: float) -> loop.Evaluation:
    from dataclasses import replace

    return replace(found, mean_reward=reward)


def test_a_failed_start_leaves_nothing_that_refuses_the_corrected_command(recipe: Path) -> None:
    assert run(recipe, "run", "policy.model.new.architecture=bert") == 2
    assert (recipe.parent / "run" / "config.json").is_file()
    assert run(recipe, "run", "algorithm.steps=1") == 0
