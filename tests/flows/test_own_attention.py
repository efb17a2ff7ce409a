"""A model with its own attention: reported, trained on padded rows, and refused for unsupported features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.check import check
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
lr = 1e-3
model.new = { architecture = "stablelm", hidden = 32, layers = 2, heads = 2, kv_heads = 2, context = 16 }
[rollout]
max_tokens = 4
[algorithm]
name = "sft"
steps = 2
prompts_per_step = 21
[evaluate]
problems = 0
"""


def loaded(folder: Path, *settings: str) -> Resolved:
    (folder / "run.toml").write_text(RECIPE)
    return load_recipe(folder / "run.toml", settings)


def losses(folder: Path, name: str, *settings: str) -> list[float]:
    chosen = loaded(folder, f"run.dir={json.dumps(str(folder / name))}", *settings)
    run = Path(launch(chosen, quiet=True).run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"]["supervised/loss/mean"]["mean"] for line in lines]


def test_it_is_said_and_the_cut_into_micro_batches_changes_nothing(tmp_path: Path) -> None:
    report = check(loaded(tmp_path))
    assert report.problems == []
    assert any("StableLmForCausalLM trains with its own attention, padded" in note for note in report.notes)
    whole = losses(tmp_path, "whole")
    cut = losses(tmp_path, "cut", "policy.tokens_per_micro_batch=30")
    assert len(whole) == 2 and whole == pytest.approx(cut, abs=1e-5) and whole[1] != whole[0]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("evaluate.problems=5", "the native engine cannot sample it"),
        (
            "placement={ pools = { main = 2 }, train_parallel = { policy = { tp = 2 } } }",
            "trains with its own attention, but tp, pp, fsdp or ep is above 1",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_the_run(tmp_path: Path, setting: str, says: str) -> None:
    problems = check(loaded(tmp_path, setting)).problems
    assert [says in str(problem) for problem in problems] == [True]
