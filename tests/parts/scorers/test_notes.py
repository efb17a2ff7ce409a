"""Notes of ``check``: rewards that compare rows, tests that an answer can cheat, the level of code-tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.check_report import Report
from rillflow.app.facts import RecipeFacts
from rillflow.cli.main import main
from rillflow.isolation.sandbox import SENTENCES, Level
from rillflow_parts.scorers.plugin import look
from tests.unit.app.test_bias_notes import READY, loaded

ROOT = Path(__file__).parents[3]
BEST = """
def reward(prompts, completions, **columns):
    scores = [len(each) for each in completions]
    return [float(score == max(scores)) for score in scores]
"""
ALONE = """
def reward(prompts, completions, **columns):
    return [float(len(each)) for each in completions]
"""


def notes(*settings: str, **sections: object) -> list[str]:
    report = Report()
    report.attempt(look, RecipeFacts(resolved=loaded(*settings, **sections)))
    assert not report.problems
    return report.notes


def comparisons(folder: Path, text: str, *settings: str) -> list[str]:
    (folder / "rewards.py").write_text(text)
    return notes(*settings, reward={"function": f"{folder / 'rewards.py'}:reward"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["reward.sandbox=true"], "the sandbox calls it with one row at a time"),
        (["reward.workers=2", "reward.sandbox=false"], "reward.workers is 2: each child gets a share"),
        ([*READY, "reward.sandbox=false"], "ready first calls it with the answers to one prompt"),
        (["reward.sandbox=false"], None),
    ],
)
def test_a_reward_that_compares_rows_is_told_how_its_rows_are_divided(
    tmp_path: Path, settings: list[str], said: str | None
) -> None:
    found = comparisons(tmp_path, BEST, *settings)
    assert len(found) == (said is not None)
    assert all("compares rows with each other (max(scores), rewards.py:4)" in each for each in found)
    assert all(str(said) in each for each in found)
    assert comparisons(tmp_path, ALONE, *settings) == []


def test_check_prints_the_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "arithmetic" / "run.toml"
    (tmp_path / "rewards.py").write_text(BEST)
    named = f'--set=reward.function="{tmp_path}/rewards.py:reward"'
    words = ["check", str(recipe), named, "--set=reward.sandbox=true", "--dir", str(tmp_path / "run")]
    for more in ([], ["--no-code"]):
        assert main([*words, *more]) == 0
        assert "note: warning: rewards.py:reward compares rows" in capsys.readouterr().out


@pytest.mark.parametrize("weights", [None, {"code-tests": 0.5}])
def test_rows_whose_tests_an_answer_can_cheat_are_counted(
    tmp_path: Path, weights: dict[str, float] | None
) -> None:
    tests = [["assert f(1) == 1"], ["assert f(1) == 1", "assert f(1) > 2"], ["assert f(2) == 2"]]
    rows = [json.dumps({"prompt": f"{number}", "tests": each}) for number, each in enumerate(tests)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    reward = {"function": "code-tests"} if weights is None else {"functions": weights}
    (note,) = notes(task={"source": str(tmp_path / "rows.jsonl"), "held_out": 0}, reward=reward)
    assert note.startswith(
        "code-tests: 1 of 3 rows have tests that run in the process of the answer's program"
    )


def test_check_names_the_level_of_the_code_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "code" / "run.toml"
    assert main(["check", str(recipe), "--dir", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    begins = "note: code_tests.py:code_tests runs text or starts processes (code_tests.py:"
    (note,) = [line for line in lines if line.startswith(begins)]
    assert any(note.endswith(f"{level}: {SENTENCES[level]}") for level in (Level.FULL, Level.SHARED_USER))
