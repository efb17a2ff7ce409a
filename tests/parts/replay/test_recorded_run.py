"""Every step belongs to the settings of the start that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.app.resume import digest
from rillflow_parts.replay.recorded_run import RecordedRun, _resumed, kept_functions, settings_by_step


def start(after: int, *changes: tuple[str, Any, Any]) -> dict[str, Any]:
    return {
        "after_step": after,
        "changes": [{"key": key, "old": old, "new": new} for key, old, new in changes],
    }


def recorded(lr: float, *starts: dict[str, Any]) -> RecordedRun:
    return RecordedRun(
        path=Path("run"), config={"policy": {"lr": lr, "clip": [1, 2]}}, starts=starts, steps={}
    )


def rates(run: RecordedRun, first: int, last: int) -> list[tuple[float, int]]:
    found: list[Any] = settings_by_step(run, first, last)
    assert all(config["policy"]["clip"] == [1, 2] for config, _ in found)
    return [(config["policy"]["lr"], end) for config, end in found]


CHANGED = recorded(
    3.0, start(0), start(4, ("policy.lr", 1.0, 2.0)), start(6), start(9, ("policy.lr", 2.0, 3.0))
)


@pytest.mark.parametrize(
    ("run", "first", "last", "wanted"),
    [
        (recorded(1.0), 0, 5, [(1.0, 5)]),
        (recorded(1.0, start(0), start(3)), 0, 5, [(1.0, 5)]),
        (CHANGED, 0, 12, [(1.0, 4), (2.0, 9), (3.0, 12)]),
        (CHANGED, 4, 9, [(2.0, 9)]),
        (CHANGED, 2, 3, [(1.0, 3)]),
        # the second start made steps 5 to 8; the third one repeated all after step 2
        (
            recorded(3.0, start(0), start(4, ("policy.lr", 1.0, 2.0)), start(2, ("policy.lr", 2.0, 3.0))),
            0,
            6,
            [(1.0, 2), (3.0, 6)],
        ),
    ],
)
def test_a_step_has_the_settings_of_the_start_that_made_it(
    run: RecordedRun, first: int, last: int, wanted: list[tuple[float, int]]
) -> None:
    assert rates(run, first, last) == wanted


def test_steps_right_after_a_resume_may_differ_and_those_after_the_start_may_not() -> None:
    run = recorded(1.0, start(0), start(4))
    assert [bool(_resumed(run, step, 2)) for step in range(1, 8)] == [False] * 4 + [True] * 2 + [False]


def test_a_scorer_of_an_older_run_imports_the_modules_of_today(tmp_path: Path) -> None:
    text = b"from rillflow.rewards.built_in.check_calls import passes\ndef code_tests(completions): ...\n"
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / f"reward-{digest(text)}.py").write_bytes(text)
    data = RecordedRun(path=tmp_path, config={}, starts=[], steps={})
    sections = {"algorithm": {"name": "grpo", "steps": 1}, "rollout": {"max_tokens": 4}}
    named = {"policy": {"model": {"new": {}}}, "reward": {"function": "code-tests"}}
    recipe = load_recipe({**sections, **named}).recipe
    changed = kept_functions(recipe, data, {"sources": {"reward": digest(text)}}, tmp_path / "old")
    file, _, name = changed["reward.function"].rpartition(":")
    assert name == "code_tests"
    assert Path(file).read_bytes().startswith(b"from rillflow_parts.scorers.check_calls import passes\n")
