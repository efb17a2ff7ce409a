"""A data kind and a loss kind from outside the package: checked, trained, evaluated, replayed."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import rillflow
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.check import check
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.errors import DataError
from rillflow.formulas.preferences import AnswerTotals, PairLossConfig, pair_loss
from tests.flows import own_kinds

NEW = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "context": 16, "alphabet": "0123456789+="}
RECIPE: dict[str, Any] = {
    "run": {"seed": 3, "threads": 1},
    "policy": {"lr": 1e-2, "model": {"new": NEW}},
    "rollout": {"max_tokens": 4},
    "algorithm": {"name": "listwise", "steps": 2, "prompts_per_step": 7, "minibatches": 2},
}
ROWS = [
    {"prompt": f"{a}+{b}=", "ranked": [str(a + b), str(a + b + 1), str(a + b + 3)]}
    for a in range(4)
    for b in range(4)
]
OWN = [own_kinds.ALGORITHM]


def train(folder: Path, **settings: Any) -> rillflow.Run:
    how: dict[str, Any] = {"prompts": ROWS, "algorithms": OWN, "quiet": True}
    return rillflow.train(RECIPE, dir=folder, settings={"task.held_out": 4, **settings}, **how)


def test_two_steps_learn_the_order_of_lists(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    assert run.metrics[0]["lists/loss/mean"] == pytest.approx(math.log(6), rel=1e-2)
    assert len(run.metrics) == 2
    assert [(each.step, each.count) for each in run.evaluations] == [(0, 4), (2, 4)]
    before, after = (each.more["spread_mean"] for each in run.evaluations)
    assert isinstance(before, float) and isinstance(after, float) and after > before


def test_ranks_share_whole_lists(tmp_path: Path) -> None:
    two = {"placement.backend": "inline", "placement.pools": {"main": 2}}
    alone, both = train(tmp_path / "alone"), train(tmp_path / "both", **two)
    for one, other in zip(alone.metrics, both.metrics, strict=True):
        assert other["lists/loss/mean"] == pytest.approx(one["lists/loss/mean"], rel=1e-4)


def test_check_and_graph_speak_of_lists(tmp_path: Path) -> None:
    file = tmp_path / "lists.jsonl"
    settings = {"task.source": str(file), "task.held_out": 0}
    loaded = load_recipe(RECIPE, settings, OWN)
    (graph,) = loaded.graphs
    assert [stage.name for stage in graph.stages][:2] == ["reference.totals", "policy.update"]
    file.write_text('{"prompt": "1+1=", "ranked": ["2", "3", 4]}')
    said = check(loaded)
    assert any("lists.jsonl, line 1: the answer is 4" in str(problem) for problem in said.problems)
    with pytest.raises(DataError, match=r"task.source is .arithmetic.") as caught:
        rillflow.train(RECIPE, dir=tmp_path / "made", algorithms=OWN, quiet=True)
    assert "the algorithm needs ranked lists" in (caught.value.why or "")


def test_a_skipped_update_is_replayed_by_the_file_that_has_its_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", **{"algorithm.loss.beta": 1e308, "run.max_skipped": 9})
    (bundle,) = list((run.path / "bundles").iterdir())[:1]
    main(["replay", str(bundle)], algorithms=OWN)
    said = capsys.readouterr().out
    assert said.startswith("policy\n") and "the run found  " in said


def test_a_list_of_two_is_a_pair() -> None:
    totals, known = (torch.tensor(each, dtype=torch.float64) for each in ([-1.0, -3.0], [-2.0, -2.5]))
    pair = AnswerTotals(totals, torch.ones(2), known)
    chosen, rejected = pair.places(2)
    dpo = pair_loss(chosen, rejected, config=PairLossConfig(beta=0.3)).losses
    rewards = 0.3 * pair.ratios
    assert float(rewards.logsumexp(0) - rewards[0]) == pytest.approx(float(dpo))


def test_orders_of_a_list_have_probabilities_that_add_up() -> None:
    totals = torch.tensor([-1.0, -4.0, 2.0], dtype=torch.float64)
    config = own_kinds.PlackettLuceConfig(beta=0.7)
    losses = [
        float(config.losses(AnswerTotals(totals[list(order)], torch.ones(3)), {}).losses)
        for order in permutations(range(3))
    ]
    assert sum(math.exp(-each) for each in losses) == pytest.approx(1.0)


def test_the_package_does_not_know_them() -> None:
    assert "listwise" not in ALGORITHMS
