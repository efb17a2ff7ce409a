"""What a step's journal says: shares count the right rows, and flat groups are found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rillflow.observe.reader import read_rollouts
from rillflow.pipeline.telemetry import record, rollout_rows
from rillflow.records.batch import Batch, row_ids
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId
from rillflow.roles.reward import cost_metrics, reward_metrics
from rillflow.roles.sampler import rollout_metrics

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


def test_scores_of_other_rows_than_the_sampled_ones_are_no_reward(tmp_path: Path) -> None:
    """ReMax scores greedy answers too: their rewards are a baseline, and no measure of what was sampled."""

    def rolled(sample: int) -> Batch:
        start = Rollout.start(RowId(0, 0, sample), [1, 2], columns='{"prompt": "1+1="}')
        return rollout_batch([start.sampled([3], [-0.1], 1, Finish.STOP)])

    def scored(rows: Batch, reward: float) -> Batch:
        outcome = torch.zeros(1, dtype=torch.int8)
        fields = {"rewards": torch.tensor([reward]), "valid": torch.tensor([True]), "outcome": outcome}
        return Batch(ids=rows.ids, fields=fields)

    tokenizer = SimpleNamespace(pieces=lambda tokens: ["x"] * len(tokens))
    lead: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer))
    sampled, greedy = rolled(0), rolled(-1)
    batches = (sampled, greedy, scored(sampled, 0.25), scored(greedy, 1.0))
    measures = (rollout_metrics, None, reward_metrics, reward_metrics)
    metrics = record(lead, tmp_path, 1, measures, *batches)
    assert (metrics["reward/score/mean"].value, metrics["reward/score/max"].value) == (0.25, 0.25)
    (row,) = read_rollouts(tmp_path, 1)
    assert (row.row, row.reward) == (RowId(0, 0, 0), 0.25)


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


def test_a_step_of_several_rounds_is_measured_and_recorded_whole(tmp_path: Path) -> None:
    """Two rounds of one group each; of the second alone rows are kept and have advantages."""
    rounds, scores = [], []
    for prompt, rewards in ((0, [1.0, 1.0]), (1, [0.0, 1.0])):
        rows = [
            Rollout.start(RowId(0, prompt, sample), [1], columns='{"prompt": "p"}').sampled(
                [2] * (prompt + sample + 1), [-0.1] * (prompt + sample + 1), 1, Finish.STOP
            )
            for sample in range(2)
        ]
        rounds.append(rollout_batch(rows))
        fields = {
            "rewards": torch.tensor(rewards),
            "valid": torch.ones(2, dtype=torch.bool),
            "outcome": torch.zeros(2, dtype=torch.int8),
        }
        scores.append(Batch(ids=rounds[-1].ids, fields=fields))
    advantages = Batch(ids=rounds[1].ids, fields={"advantages": torch.tensor([-1.0, 1.0])})
    measures = [rollout_metrics, reward_metrics] * 2 + [None]
    batches = [rounds[0], scores[0], rounds[1], scores[1], advantages]
    tokenizer = SimpleNamespace(pieces=lambda tokens: [str(token) for token in tokens])
    lead: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer))
    metrics = record(lead, tmp_path, 1, measures, *batches)
    assert metrics["rollout/rows/sum"].value == 4 and metrics["rollout/tokens/sum"].value == 1 + 2 + 2 + 3
    assert metrics["reward/score/mean"].value == 0.75
    assert metrics["reward/flat_groups/share"].value == 0.5
    (file,) = tmp_path.rglob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("advantage") for line in lines] == [None, None, -1.0, 1.0]
    assert [line["reward"] for line in lines] == [1.0, 1.0, 0.0, 1.0]


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
    assert metrics["cost/none/sum"].value == 0
    assert cost_metrics(costs.select([2]))["cost/none/sum"].value == 1
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


def test_a_row_keeps_its_raw_reward_and_the_penalised_one_beside_it() -> None:
    """One step puts the price into a field of its own, another back into the rewards, as GRPO and RLOO do."""
    columns = '{"prompt": "1+1="}'
    rows = [
        Rollout.start(RowId(0, 0, sample), [1, 2], columns=columns).sampled([3], [-0.1], 1, Finish.STOP)
        for sample in range(3)
    ]
    rollouts = rollout_batch(rows)
    valid = torch.tensor([True, True, False])
    fields = {"rewards": torch.tensor([1.0, 0.5, 0.0]), "valid": valid}
    scores = Batch(ids=rollouts.ids, fields=fields | {"outcome": torch.tensor([0, 0, 1], dtype=torch.int8)})
    price = torch.tensor([0.75, 0.5, -0.25])
    apart = scores.with_fields(penalised=price)
    for steps in ([apart], [scores.with_fields(rewards=price)]):
        told = [*steps, steps[-1].with_fields(advantages=torch.zeros(3))]
        batches = [rollouts, scores, *told, told[-1].select([0])]
        found = list(rollout_rows([rollouts], batches, lambda tokens: ["x"] * len(tokens)))
        assert [row["reward"] for row in found] == [1.0, 0.5, None]
        assert [row.get("penalised_reward") for row in found] == [0.75, None, None]
