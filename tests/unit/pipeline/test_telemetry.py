"""What a step's journal says: shares count the right rows, and flat groups are found."""

from __future__ import annotations

import torch

from rillflow.pipeline.telemetry import cost_metrics, reward_metrics, rollout_metrics, rollout_rows
from rillflow.records.batch import Batch, row_ids
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId

IDS = row_ids([RowId(0, prompt, sample) for prompt in range(3) for sample in range(2)])


def test_rewards_are_means_over_valid_rows_alone() -> None:
    scores = Batch(
        ids=IDS,
        fields={
            "rewards": torch.tensor([1.0, 0.0, 0.5, 0.5, 2.0, 0.0]),
            "valid": torch.tensor([True, True, True, True, True, False]),
            "outcome": torch.tensor([0, 0, 0, 0, 0, 2], dtype=torch.int8),
        },
    )
    metrics = reward_metrics(scores)
    assert metrics["reward/score/mean"].value == 4.0 / 5
    assert metrics["reward/score/max"].value == 2.0
    assert metrics["reward/score/min"].value == 0.0
    assert metrics["reward/flat_groups/share"].value == 2 / 3
    assert metrics["reward/timeout/share"].value == 1 / 6
    assert metrics["reward/score/share"].value == 5 / 6


def test_no_valid_row_is_no_number() -> None:
    scores = Batch(
        ids=IDS[:1],
        fields={
            "rewards": torch.zeros(1),
            "valid": torch.tensor([False]),
            "outcome": torch.tensor([1], dtype=torch.int8),
        },
    )
    metrics = reward_metrics(scores)
    assert metrics["reward/score/mean"].value != metrics["reward/score/mean"].value
    assert "reward/score/max" not in metrics
    assert metrics["reward/abstain/share"].value == 1.0


def test_lengths_count_sampled_tokens() -> None:
    rows = [
        Rollout.start(RowId(0, 0, 0), [1, 2]).sampled([3, 0], [-0.1, -0.2], 1, Finish.STOP),
        Rollout.start(RowId(0, 0, 1), [1, 2]).sampled([3, 3, 3, 3], [-0.1] * 4, 1, Finish.LENGTH),
    ]
    metrics = rollout_metrics(rollout_batch(rows))
    assert metrics["rollout/length/mean"].value == 3.0
    assert metrics["rollout/length/max"].value == 4.0
    assert metrics["rollout/stopped/share"].value == 0.5
    assert metrics["rollout/tokens/sum"].value == 6.0


def test_costs_are_means_over_rows_that_have_one() -> None:
    costs = Batch(
        ids=IDS[:3],
        fields={"costs": torch.tensor([1.0, 3.0, 0.0]), "valid": torch.tensor([True, True, False])},
    )
    metrics = cost_metrics(costs)
    assert metrics["cost/value/mean"].value == 2.0
    assert metrics["cost/value/max"].value == 3.0
    assert metrics["cost/valid/share"].value == 2 / 3


def test_a_row_keeps_the_rewards_verdict_beside_its_cost() -> None:
    columns = '{"prompt": "1+1="}'
    rows = [
        Rollout.start(RowId(0, 0, sample), [1, 2], columns=columns).sampled([3], [-0.1], 1, Finish.STOP)
        for sample in range(2)
    ]
    rollouts = rollout_batch(rows)

    def verdict(name: str, values: list[float], valid: list[bool], outcome: int) -> Batch:
        fields = {
            name: torch.tensor(values),
            "valid": torch.tensor(valid),
            "outcome": torch.full((2,), outcome, dtype=torch.int8),
        }
        return Batch(ids=rollouts.ids, fields=fields)

    rewards = verdict("rewards", [1.0, 0.5], [True, True], 0)
    costs = verdict("costs", [2.0, 0.0], [True, False], 3)
    found = list(rollout_rows([rollouts], [rollouts, rewards, costs], lambda tokens: ["x"] * len(tokens)))
    assert [(row["outcome"], row["reward"], row["cost"]) for row in found] == [
        ("score", 1.0, 2.0),
        ("score", 0.5, None),
    ]
