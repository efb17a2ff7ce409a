"""Truncated rows in whole runs: masked, bootstrapped, and penalised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.main import main
from rillflow.runs.reader import read_rollouts

SMALL = ("steps=2", "prompts_per_step=3", "samples_per_prompt=2", "epochs=1", "loss.kl=0")


def ran(recipe: Path, name: str, *settings: str) -> list[dict[str, Any]]:
    """Return the metrics of every step of the algorithm."""
    given = [f"algorithm.{each}" for each in SMALL] + ["evaluate.every=0", *settings]
    options = [word for setting in given for word in ("--set", setting)]
    assert main(["run", str(recipe), "--dir", str(recipe.parent / name), "--quiet", *options]) == 0
    lines = [json.loads(line) for line in (recipe.parent / name / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["phase"] != "warm_start"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_in_which_every_row_was_cut_off_learns_from_demonstrations_alone(
    recipe: Path, ranks: int
) -> None:
    settings = ["algorithm.name=ppo", "algorithm.truncated=mask", "algorithm.pretrain_weight=1"]
    settings += ["rollout.max_tokens=1", f"placement.pools.main={ranks}", 'placement.backend="inline"']
    for line in ran(recipe, "run", "warm_start.steps=20", *settings):
        assert line["rollout/stopped/share"]["mean"] == 0.0
        assert line["supervised/nll/mean"]["count"] > 0 and line["train/grad_norm/mean"]["mean"] > 0
        assert not any(name in line for name in ("policy/ratio/mean", "critic/value/mean"))


def test_rows_cut_off_are_scored_and_not_learnt_from(recipe: Path) -> None:
    """Only tokens of rows that ended are loss tokens."""
    (recipe.parent / "reward.py").write_text(
        "def low(prompts, completions, **_):\n    return [float(text[:1] < '5') for text in completions]\n"
    )
    seen = {
        how: ran(
            recipe,
            how,
            f"algorithm.truncated={how}",
            "algorithm.minibatches=1",
            'reward.function="reward.py:low"',
        )
        for how in ("keep", "mask")
    }
    sampled = {True: 0, False: 0}
    for row in read_rollouts(recipe.parent / "mask", 7):
        sampled[row.finish == "length"] += len(row.sampled)
        assert row.advantage is not None and row.reward is not None
    assert sampled[True] and sampled[False], "some ended, some did not"
    assert seen["keep"][0]["policy/ratio/mean"]["count"] == sum(sampled.values())
    assert seen["mask"][0]["policy/ratio/mean"]["count"] == sampled[False]


def test_a_row_that_goes_on_into_the_critics_value_has_another_return(recipe: Path) -> None:
    """The critic starts at 0 everywhere; from the second step on, its values separate the two."""
    settings = ("algorithm.name=ppo", "algorithm.minibatches=1", "critic.lr=1e-2")
    kept, gone_on = (
        ran(recipe, how, *settings, f"algorithm.truncated={how}", "algorithm.missing_end_penalty=1")
        for how in ("keep", "bootstrap")
    )
    assert kept[0]["critic/return/mean"] == gone_on[0]["critic/return/mean"]
    assert kept[1]["critic/return/mean"] != gone_on[1]["critic/return/mean"]
