"""The Python API: the command's numbers, callbacks, stop, resume, reading back."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rillflow
from rillflow.app.recipe import load_recipe
from rillflow.app.standing import standing_of
from rillflow.errors import CallbackError, ConfigError, DataError, Interrupted, RewardError, RunDirectoryError
from rillflow.runs.bases import bases_of
from rillflow.runs.layout import rollout_files
from tests.flows.conftest import Tiny

REST = """steps = 6
[task]
source = "prompts.jsonl"
held_out = 4
[evaluate]
problems = 4
"""
NEW = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "context": 16, "alphabet": "0123456789+="}
RECIPE: dict[str, Any] = {
    "run": {"seed": 3, "threads": 1},
    "policy": {"lr": 1e-3, "model": {"new": NEW}},
    "rollout": {"max_tokens": 3},
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 2, "steps": 6},
    "evaluate": {"problems": 4},
}
PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]


def made() -> Any:
    """Return a function that is in no module; the command's file has the same."""

    def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [len(text) / 3 for text in completions]

    return length


LENGTH = made()
TWO_RANKS = {"algorithm.steps": 2, "placement.pools": {"main": 2}, "placement.backend": "inline"}
"""The parts of each function come from both ranks."""


def train(folder: Path, *callbacks: Any, **more: Any) -> rillflow.Run:
    how: dict[str, Any] = {"prompts": PROMPTS, "reward": LENGTH, "settings": {"task.held_out": 4}}
    return rillflow.train(RECIPE, dir=folder, quiet=True, **how | {"callbacks": callbacks} | more)


def test_python_and_the_command_have_the_same_bits_whether_stopped_or_not(tiny: Tiny) -> None:
    """Rows and the reward given in Python, compared with files; stopped twice, by a callback and Ctrl-C."""
    tiny.write(REST)
    tiny.write_rows(12)
    assert tiny.run("command") == 0
    seen: list[tuple[int, str, float]] = []

    def see(result: rillflow.StepResult) -> None:
        seen.append((result.step, result.phase, result.metrics["reward/score/mean"]))
        if result.step == 2:
            result.run.stop()
        if result.step == 4:
            signal.raise_signal(signal.SIGINT)

    run = train(tiny.folder / "python", see)
    assert (run.is_finished, len(run.metrics)) == (False, 2)
    with pytest.raises(Interrupted, match="stopped after step 4, as requested"):
        train(tiny.folder / "python", see)
    run = train(tiny.folder / "python", see)
    assert run.is_finished
    tiny.assert_same("command", "python")
    assert seen == [(row["step"], row["phase"], row["reward/score/mean"]) for row in run.metrics]
    assert [each.step for each in run.evaluations] == [0, 6]
    (kept,) = (run.path / "sources").iterdir()
    assert kept.name.startswith("reward.length-")
    assert "return [len(text) / 3 for text in completions]" in kept.read_text()


def test_rows_given_in_python_replace_what_the_recipe_holds_out(tiny: Tiny) -> None:
    tiny.write(REST)
    tiny.write_rows(12)
    how: dict[str, Any] = {"reward": LENGTH, "dir": tiny.folder / "run", "quiet": True}
    run = rillflow.train(tiny.recipe, prompts=["1+1=", "2+1="], settings={"algorithm.steps": 1}, **how)
    assert (run.settings["task"]["held_out"], run.evaluations) == (0, [])  # type: ignore[index,call-overload]
    file = str(tiny.folder / "prompts.jsonl")
    for recipe, settings, judged in (
        (tiny.recipe, {"task.held_out": 2}, 2),
        (tiny.recipe, {"task.held_out_source": file}, 4),
        (RECIPE | {"task": {"held_out": 3}}, {}, 3),
    ):
        rows = [{"prompt": f"2{n}+1=", "answer": ""} for n in range(4)]
        how |= {"settings": {"algorithm.steps": 1, **settings}, "fresh": True}
        assert rillflow.train(recipe, prompts=rows, **how).evaluations[0].count == judged


def test_numbers_of_numpy_are_numbers_and_a_run_starts_from_another_one(tiny: Tiny) -> None:
    rows = [{"prompt": f"{n}+1=", "n": np.int64(n), "of": [np.float32(0.5)]} for n in range(4)]
    one = {"algorithm.steps": 1}
    first = train(tiny.folder / "first", prompts=rows, settings=one)
    assert {type(row.columns["n"]) for row in first.rollouts()} == {int}
    start = {"policy.model": {"path": str(first.path)}, **one}
    second = train(tiny.folder / "second", prompts=rows, settings=start)
    assert second.settings["policy"]["model"]["path"] == str(first.checkpoint())  # type: ignore[index,call-overload]
    assert [base.path for base in bases_of(second.path)["policy"]] == [str(first.checkpoint())]
    critic = {**one, "algorithm.name": "ppo", "critic.path": str(first.path)}
    ppo = load_recipe(RECIPE, critic)
    assert standing_of(ppo, None).places["critic.path"] == str(first.checkpoint())
    beside = Path(str(first.checkpoint())).with_name("critic")
    shutil.copytree(str(first.checkpoint()), beside)
    assert standing_of(ppo, None).places["critic.path"] == str(beside)
    empty = tiny.folder / "empty"
    shutil.copytree(first.path, empty, ignore=shutil.ignore_patterns("step-*"))
    with pytest.raises(RunDirectoryError, match="empty has no checkpoint"):
        train(tiny.folder / "third", settings={"policy.model": {"path": str(empty)}, **one})


def test_a_run_is_opened_by_its_path_and_read(tiny: Tiny) -> None:
    def right(completions: list[str], answer: list[str]) -> list[float | None]:
        pairs = zip(completions, answer, strict=True)
        return [None if text == "" else float(text.startswith(right)) for text, right in pairs]

    trained = train(tiny.folder / "run", reward=[LENGTH, (right, 0.5)], settings=TWO_RANKS)
    run = rillflow.open_run(str(trained.path))
    assert repr(run) == f"<run {trained.path}: 2 steps, finished>"
    assert (run.settings["task"]["source"], run.settings["task"]["held_out"]) == ("<prompts>", 0)  # type: ignore[index,call-overload]
    first, last = run.rollouts(1), run.rollouts()
    assert [len(first), len(last), last[0].row.epoch] == [8, 8, 0]
    columns = run.columns(1)
    assert columns["completion"] == [row.completion for row in first]
    assert [tuple(tokens) for tokens in columns["tokens"]] == [row.tokens for row in first]
    assert {len(column) for column in columns.values()} == {8}
    for row in first:
        said = [row.parts["length"], *([row.parts["right"]] if "right" in row.parts else [])]
        assert row.reward == pytest.approx(said[0] + (0.5 * said[1] if len(said) > 1 else 0))
        assert said[0] == pytest.approx(len(row.completion) / 3)
    parts = [row.parts["length"] for row in first]
    assert run.metrics[0]["rewards/length/mean"] == pytest.approx(sum(parts) / len(parts))
    assert (run.checkpoint(), run.checkpoint(2)) == (run.path / "checkpoints/step-000002/policy",) * 2
    assert run.ask("1+1=") == run.ask("1+1=", step=2)
    assert "<iframe" in run._repr_html_() and "data-chart" in run._repr_html_()
    assert run.report() == run.path / "report.html"
    with pytest.raises(RunDirectoryError, match="this object does not train"):
        run.stop()
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        rillflow.open_run(tiny.folder / "nothing")


def test_a_callback_that_raises_ends_the_run_with_its_step_saved_and_a_second_one_is_told_too(
    tiny: Tiny,
) -> None:
    called: list[str] = []

    def first(result: rillflow.StepResult) -> None:
        if result.step == 2:
            raise KeyError("loss")

    def second(result: rillflow.StepResult) -> None:
        called.append(f"second {result.step}")
        if result.step == 2:
            raise ValueError("no disk")

    def third(result: rillflow.StepResult) -> None:
        called.append(f"third {result.step}")

    few = {"task.held_out": 4, "run.rollouts_every": 2, "run.rollouts_share": 0.9}
    with pytest.raises(CallbackError) as caught:
        train(tiny.folder / "run", first, second, third, settings=few)
    assert "first failed after step 2: KeyError: 'loss'" in caught.value.what
    assert "test_python.py" in caught.value.why and 'raise KeyError("loss")' in caught.value.why
    assert isinstance(caught.value.__cause__, KeyError)
    (note,) = caught.value.__notes__
    assert "second failed after step 2: ValueError: no disk" in note
    assert called == ["second 1", "third 1", "second 2", "third 2"]
    assert tiny.steps_kept("run") == [2]
    again = train(tiny.folder / "run", third, settings=few)
    assert again.is_finished and called[-1] == "third 6"
    assert list(rollout_files(again.path)) == [2, 4, 6], "every second step, whatever is drawn of it"
    train(tiny.folder / "other")
    tiny.assert_same("run", "other")


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"prompts": {"train": ["a"]}}, DataError, "the prompts are one object with the keys 'train'"),
        ({"prompts": ["1+1=", 3]}, DataError, "<prompts>, row 2: the prompt is 3"),
        ({"prompts": ["1+1=", {"text": "b"}]}, DataError, "row 2: there is no column 'prompt'"),
        ({"prompts": [{"prompt": "1", "when": LENGTH}]}, DataError, "column 'when' has a function"),
        ({"prompts": [{"prompt": "1", "x": float("nan")}]}, DataError, "column 'x' has nan"),
        ({"prompts": [{"prompt": "1", "prompts": "2"}]}, DataError, "there is a column 'prompts'"),
        ({"prompts": []}, DataError, "<prompts> has no rows"),
        ({"prompts": Path("no.jsonl")}, DataError, "no.jsonl is not there"),
        ({"callbacks": [3]}, ConfigError, "callback 1 is 3"),
        ({"reward": []}, RewardError, "the rewards have the names []"),
        ({"reward": [LENGTH, LENGTH]}, RewardError, "the rewards have the names ['length', 'length']"),
        ({"reward": lambda completion: [1.0] * len(completion)}, RewardError, "needs a column 'completion'"),
        ({"reward": "no.py:f"}, RewardError, "is in a file that does not exist"),
        ({"settings": {"policy.lrr": 1}}, ConfigError, "has no key 'lrr'"),
        ({"settings": {"policy.lr": -1}}, ConfigError, "policy.lr is -1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    more: dict[str, Any], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"prompts": ["1+1="], "reward": LENGTH, "settings": {}, **more}
    with pytest.raises(error) as caught:
        train(tmp_path / "run", **how)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
