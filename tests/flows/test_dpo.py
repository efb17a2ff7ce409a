"""Training on pairs without a reward: whole runs, with and without a reference."""

from __future__ import annotations

import json
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rillflow.app.check import check
from rillflow.controller.interrupt import Interruption
from rillflow.errors import Interrupted
from tests.flows.whole_runs import lines, loaded, numbers, ran

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "pairs.jsonl"
held_out = 4
[policy]
lr = 2e-3
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
[algorithm]
name = "dpo"
steps = 5
prompts_per_step = 8
minibatches = 2
[evaluate]
every = 3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write twenty-five sums, each with its answer and one that is off by one; return the recipe."""
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
        for a in range(5)
        for b in range(5)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    (tmp_path / "run.toml").write_text(RECIPE)
    return tmp_path / "run.toml"


def test_a_run_computes_every_row_s_reference_once_and_resumes_bit_for_bit(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 pairs in 5 steps of 8 are two epochs; the second part of the run reads the first part's totals."""
    assert check(loaded(recipe, "whole")).problems == []
    whole = ran(recipe, "whole")
    kept = [tuple(row) for line in lines(whole, "reference_totals.jsonl") for row in line["rows"]]
    assert len(kept) == len(set(kept)) == 2 * (21 + 4), "each of two answers, trained or held out, once"
    first, last = numbers(whole)[0], numbers(whole)[-1]
    assert first["pairs/accuracy/mean"]["count"] == 8
    assert last["pairs/margin/mean"]["mean"] > first["pairs/margin/mean"]["mean"]
    judged = [(line["step"], line["count"]) for line in lines(whole, "evaluations.jsonl")]
    assert judged == [(0, 4), (3, 4), (5, 4)]
    assert lines(whole, "evaluations.jsonl")[0]["correct"] == 0, "at first the policy is the reference"

    asked = chain([False] * 5, repeat(True))  # read before and after each step
    monkeypatch.setattr(Interruption, "requested", property(lambda _: next(asked), lambda *_: None), False)
    with pytest.raises(Interrupted, match="after step 3"):
        ran(recipe, "cut")
    monkeypatch.undo()
    before = lines(recipe.parent / "cut", "reference_totals.jsonl")
    cut = ran(recipe, "cut")
    assert lines(cut, "reference_totals.jsonl")[: len(before)] == before
    assert numbers(cut) == numbers(whole)
    one, other = (load_file(run / "checkpoints/step-000005/policy/model.safetensors") for run in (cut, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_a_kind_without_a_reference_makes_none(recipe: Path, kind: str) -> None:
    chosen = (f"algorithm.loss.kind={kind}", "algorithm.steps=2", "evaluate.every=0")
    (graph,) = loaded(recipe, "run", *chosen).graphs
    assert [f"{stage.role}.{stage.endpoint}" for stage in graph.stages] == ["policy.update", "policy.publish"]
    run = ran(recipe, "run", *chosen)
    assert not (run / "reference").exists() and not (run / "reference_totals.jsonl").exists()
    assert {line["stage"] for line in lines(run, "spans.jsonl")} == {"policy.update", "policy.publish"}
    assert numbers(run)[0]["pairs/loss/mean"]["mean"] > 0
    assert lines(run, "evaluations.jsonl")[-1]["count"] == 4


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_share_the_pairs_and_take_the_same_steps(recipe: Path, ranks: int) -> None:
    """The ranks do not divide the pairs; rows move to other ranks in the second epoch."""
    few = ("algorithm.prompts_per_step=5", "policy.lr=1e-4", "evaluate.problems=0")
    alone = numbers(ran(recipe, "alone", *few))
    run = ran(recipe, "ranks", *few, 'placement.backend="inline"', f"placement.pools.main={ranks}")
    for one, other in zip(alone, numbers(run), strict=True):
        for name in ("pairs/loss/mean", "pairs/margin/mean", "pairs/chosen_logprob/mean"):
            assert other[name]["mean"] == pytest.approx(one[name]["mean"], rel=1e-4, abs=1e-6)
        assert other["pairs/accuracy/mean"]["count"] == 5, "each pair once, on one rank"
    kept = [tuple(row) for line in lines(run, "reference_totals.jsonl") for row in line["rows"]]
    assert len(kept) == len(set(kept)) == 2 * 21
