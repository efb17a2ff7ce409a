"""Training on single labelled answers: whole runs."""

from __future__ import annotations

import json
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.controller.interrupt import Interruption
from rillflow.errors import Interrupted

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 60
held_out = 6
[policy]
lr = 3e-3
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=-" }
[rollout]
max_tokens = 4
[algorithm]
name = "kto"
steps = 6
prompts_per_step = 9
minibatches = 2
"""


def ran(folder: Path, run: str, *settings: str) -> Path:
    (folder / "run.toml").write_text(RECIPE)
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(folder / run))}", *settings])
    return Path(launch(loaded, quiet=True).run)


def numbers(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in metrics.items() if k != "run/step_seconds/mean"} for metrics in found]


def test_a_run_tells_good_answers_from_bad_ones_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of nine are more than one epoch: then a prompt meets another prompt's answer."""
    whole = ran(tmp_path, "whole")
    steps = numbers(whole)
    assert all(step["answers/accuracy/mean"]["count"] == 9 for step in steps)
    gap = [
        step["answers/good_reward/mean"]["mean"] - step["answers/bad_reward/mean"]["mean"] for step in steps
    ]
    assert gap[-1] > gap[0]
    judged = [json.loads(line) for line in (whole / "evaluations.jsonl").read_text().splitlines()]
    assert [line["count"] for line in judged] == [6, 6] and judged[0]["correct"] == 0
    assert judged[0]["good_reward_mean"] == judged[0]["bad_reward_mean"] == 0 != judged[1]["good_reward_mean"]

    asked = chain([False] * 5, repeat(True))  # read before and after each step
    monkeypatch.setattr(Interruption, "requested", property(lambda _: next(asked), lambda *_: None), False)
    with pytest.raises(Interrupted, match="after step 3"):
        ran(tmp_path, "cut")
    monkeypatch.undo()
    assert numbers(ran(tmp_path, "cut")) == steps


def test_a_warm_start_imitates_good_answers_alone(tmp_path: Path) -> None:
    """Only the one good answer is trained, whatever the number of bad ones."""
    rows = [
        {"prompt": f"1+{n}=", "completion": str(n + 1 if n == 4 else 9), "label": n == 4} for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = (
        'task.source="rows.jsonl"',
        "task.held_out=0",
        "algorithm.steps=1",
        "algorithm.prompts_per_step=4",
    )
    warm = ("warm_start.steps=60", "warm_start.prompts_per_step=4", "warm_start.lr=1e-2")
    steps = numbers(ran(tmp_path, "warm", *settings, *warm))
    assert steps[59]["supervised/nll/mean"]["mean"] < 0.1
    assert steps[60]["answers/bad_logprob/mean"]["mean"] < -2


def test_ranks_share_the_answers_and_one_divergence(tmp_path: Path) -> None:
    few = ("policy.lr=1e-4", "evaluate.problems=0", "algorithm.steps=3")
    alone = numbers(ran(tmp_path, "alone", *few))
    both = numbers(ran(tmp_path, "ranks", *few, 'placement.backend="inline"', "placement.pools.main=2"))
    for one, other in zip(alone, both, strict=True):
        for name in ("answers/loss/mean", "answers/divergence/mean", "answers/good_logprob/mean"):
            assert other[name]["mean"] == pytest.approx(one[name]["mean"], rel=1e-4, abs=1e-6)
        assert other["answers/accuracy/mean"]["count"] == 9, "each answer once, on one rank"
