"""Errors name rows by the lines of the user's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.row_names import rows_named
from rillflow.cli.main import main
from rillflow.errors import RewardError
from rillflow.records.row import HELD_OUT_EPOCH, RowId
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.kinds import PROMPTS
from rillflow.tasks.task import Task, open_task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps({'prompt': f'{n}='})}\n\n" for n in range(6)))
    (tmp_path / "test.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = TaskConfig(source="rows.jsonl", held_out_source="test.jsonl")
    return open_task(config, PROMPTS, base=tmp_path, seed=0)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (RowId(2, 3, 1), "rows.jsonl line 7, epoch 2, sample 1"),
        (RowId(HELD_OUT_EPOCH, 1, 0), "test.jsonl line 2, held out, sample 0"),
        (RowId(0, 99, 0), "epoch 0 prompt 99 sample 0"),
    ],
)
def test_an_error_names_the_line(task: Task, row: RowId, name: str) -> None:
    with pytest.raises(RewardError) as caught, rows_named(task):
        raise RewardError(f"the first, row ({row}): error", why=f"row ({row}) failed")
    assert str(caught.value) == f"the first, row ({name}): error\n  why: row ({name}) failed"


RECIPE = """
task = { source = "prompts.jsonl", held_out = 2 }
policy.model.new = { hidden = 16, layers = 1, heads = 2, context = 16 }
rollout.max_tokens = 2
reward = { function = "reward.py:fails", max_failures = 0 }
algorithm = { name = "grpo", steps = 1, prompts_per_step = 2, samples_per_prompt = 2 }
"""


def test_a_reward_that_fails_in_a_run_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(
        "def fails(prompts, completions):\n    return [None if p != 'bad=' else 'x' for p in prompts]\n"
    )
    prompts = ["bad=" if n == 3 else f"{n}=" for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': p})}\n" for p in prompts))
    arguments = ["run", str(tmp_path / "run.toml"), "--dir", str(tmp_path / "run"), "--quiet"]
    assert main([*arguments, "--set", "task.held_out=5"]) == 1
    assert "row (prompts.jsonl line 4, held out, sample 0): error" in capsys.readouterr().err
