"""What a step's journal says: shares count the right rows, and rows are written where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.controller.telemetry import Telemetry, asked, write_part
from rillflow.formulas import group_advantages, seeing, whitened
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId
from rillflow.roles.reward import cost_metrics, reward_metrics
from rillflow.roles.sampler import rollout_metrics
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import read_rollouts, rollout_columns
from rillflow.workers.backend import Pool, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.transfer import DP

IDS = row_ids([RowId(0, prompt, sample) for prompt in range(3) for sample in range(2)])
ROLLOUT = ("tokens", "loss_mask", "sampler_logprobs", "versions", "finish", "columns")


class Policy:
    """Samples as many tokens as the row's numbers say."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP, writes=ROLLOUT, measures=rollout_metrics)
    def generate(self, prompts: Batch, samples: int) -> Batch:
        return self._rolled(prompts, range(samples))

    @endpoint(DP, writes=ROLLOUT)
    def greedy(self, prompts: Batch) -> Batch:
        return self._rolled(prompts, [-1])

    def _rolled(self, prompts: Batch, samples: Any) -> Batch:
        rows = [
            Rollout.start(RowId(0, row.prompt, sample), [1, 2], columns='{"prompt": "1+1="}').sampled(
                [3] * (1 + row.prompt + sample), [-0.1] * (1 + row.prompt + sample), 1, Finish.STOP
            )
            for row in prompts.row_ids()
            for sample in samples
        ]
        return rollout_batch(rows)


class Reward:
    """Gives the first group nothing but ones, and the others a one in three."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP, reads=("tokens",), writes=("rewards", "valid", "outcome"), measures=reward_metrics)
    def score(self, rollouts: Batch) -> Batch:
        _, prompt, sample = rollouts.ids.unbind(1)
        rewards = ((prompt == 0) | (sample == 1)).float()
        outcome = torch.zeros(len(rollouts), dtype=torch.int8)
        fields = {
            "rewards": rewards,
            "valid": torch.ones(len(rollouts), dtype=torch.bool),
            "outcome": outcome,
        }
        return Batch(ids=rollouts.ids, fields=fields)


def flow_on(policies: int, rewards: int) -> tuple[Flow, GroupExecutor, InlineBackend]:
    backend = InlineBackend(20.0)
    backend.open([Pool(name="a", size=policies), Pool(name="b", size=rewards)])
    groups = {}
    for name, kind, pool, size in (("policy", Policy, "a", policies), ("reward", Reward, "b", rewards)):
        groups[name] = Group(name, endpoints_of(kind), mesh=Mesh.of(dp=size), pool=pool, backend=backend)
        groups[name].start(kind)
    executor = GroupExecutor(groups, backend)
    return Flow(executor), executor, backend


def prompts(count: int) -> Batch:
    return Batch(ids=row_ids([RowId(0, prompt, 0) for prompt in range(count)]), fields={})


def metrics_of(told: Telemetry) -> dict[str, Metric]:
    found = [each.read(20.0) for each in told.measured]
    for each in told.written:
        each.read(20.0)
    return merge_metrics(part for each in found for part in (each if isinstance(each, list) else [each]))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 3), (4, 2)])
def test_rows_are_measured_and_written_wherever_they_lie(ranks: tuple[int, int], tmp_path: Path) -> None:
    """Five groups of three rows: on other ranks rewards are cut through groups, which are counted whole."""
    flow, executor, backend = flow_on(*ranks)
    rollouts = flow.policy.generate(prompts(5), samples=3)
    scores = flow.reward.score(rollouts)
    advantages = flow.compute(group_advantages, scores, into="advantages", scale="off")
    kept = flow.filter(advantages, "varied", by=flow.compute(varied, scores, into="varied"))
    flow.compute(shown, kept, into="penalised")
    metrics = metrics_of(asked(executor, flow.journal.stages, tmp_path, 4, 1.0))
    backend.close()
    assert metrics["rollout/rows/sum"].value == 15
    assert metrics["rollout/length/max"].value == 7
    assert metrics["reward/score/mean"].value == (3 + 4) / 15
    assert metrics["reward/flat_groups/share"].value == 1 / 5
    rows = read_rollouts(tmp_path, 4)
    assert [row.row for row in rows] == [RowId(0, place // 3, place % 3) for place in range(15)]
    assert [row.reward for row in rows] == [1.0] * 3 + [0.0, 1.0, 0.0] * 4
    assert [round(row.advantage or 0, 3) for row in rows] == [0.0] * 3 + [-0.333, 0.667, -0.333] * 4
    assert [row.penalised_reward for row in rows] == [None] * 3 + [-1.0] * 12
    assert [len(row.sampled) for row in rows][:4] == [1, 2, 3, 2]
    assert all(row.prompt == "1+1=" and row.finish == "stop" for row in rows)


@seeing("group")
def varied(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return torch.stack([rewards[groups == group].std() > 0 for group in groups])


@seeing("row")
def shown(rewards: torch.Tensor) -> torch.Tensor:
    return torch.full_like(rewards, -1.0)


def test_a_formula_that_sees_rows_or_groups_runs_on_every_rank_that_holds_some() -> None:
    flow, _, backend = flow_on(4, 2)
    rollouts = flow.policy.generate(prompts(6), samples=3)
    scores = flow.reward.score(rollouts)
    places = {}
    for formula in (shown, varied, whole):
        made: Any = flow.compute(formula, scores, into="made")
        found = made.read(20.0)
        places[formula.__name__] = [facts.place.rank for facts in made.facts()]
        assert torch.equal(found.ids, scores.read(20.0).ids)
    ragged: Any = flow.compute(ones, rollouts, into="advantages")
    advantages: Any = flow.compute(whitened, ragged, scores, into="advantages")
    assert places == {"shown": [0, 1], "varied": [0, 1], "whole": [0]}
    assert [facts.rows for facts in ragged.facts(20.0)] == [6, 6, 3, 3]
    assert len(advantages.facts(20.0)) == 1
    backend.close()


def whole(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


@seeing("row")
def ones(loss_mask: Ragged) -> Ragged:
    return loss_mask.with_values(loss_mask.values.float())


def test_scores_of_other_rows_than_the_sampled_ones_are_no_reward(tmp_path: Path) -> None:
    """ReMax scores greedy answers too: their rewards are a baseline, and no measure of what was sampled."""
    flow, executor, backend = flow_on(2, 1)
    for rows in (flow.policy.generate(prompts(2), samples=1), flow.policy.greedy(prompts(2))):
        flow.reward.score(rows)
    metrics = metrics_of(asked(executor, flow.journal.stages, tmp_path, 1, 1.0))
    backend.close()
    assert metrics["reward/score/mean"].value == 0.5 and metrics["rollout/rows/sum"].value == 2
    assert [row.row for row in read_rollouts(tmp_path, 1)] == [RowId(0, 0, 0), RowId(0, 1, 0)]


def test_a_share_of_prompts_is_kept_with_all_of_their_rows_on_any_ranks(tmp_path: Path) -> None:
    kept = []
    for index, ranks in enumerate(((1, 1), (4, 3))):
        (tmp_path / str(index)).mkdir()
        flow, executor, backend = flow_on(*ranks)
        flow.reward.score(flow.policy.generate(prompts(200), samples=2))
        metrics = metrics_of(asked(executor, flow.journal.stages, tmp_path / str(index), 1, 0.25))
        nothing = asked(executor, flow.journal.stages, tmp_path / str(index), 2, 0.0)
        assert metrics["rollout/rows/sum"].value == 400 and not nothing.written and nothing.measured
        backend.close()
        kept.append([row.row for row in read_rollouts(tmp_path / str(index), 1)])
        assert list(rollout_files(tmp_path / str(index))) == [1]
    assert kept[0] == kept[1]
    found = {row.prompt for row in kept[0]}
    assert len(kept[0]) == 2 * len(found) and 25 < len(found) < 75, (
        "200 draws of 0.25: four deviations are 25"
    )


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


def test_lengths_count_sampled_tokens_and_a_rank_without_rows_says_nothing_of_the_longest() -> None:
    rows = [
        Rollout.start(RowId(0, 0, 0), [1, 2]).sampled([3, 0], [-0.1, -0.2], 1, Finish.STOP),
        Rollout.start(RowId(0, 0, 1), [1, 2]).sampled([3, 3, 3, 3], [-0.1] * 4, 1, Finish.LENGTH),
    ]
    batch = rollout_batch(rows)
    metrics = merge_metrics([rollout_metrics(batch), rollout_metrics(batch.slice(0, 0))])
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


def rolled(count: int) -> Batch:
    columns = '{"prompt": "1+1="}'
    return rollout_batch(
        [
            Rollout.start(RowId(0, 0, sample), [1, 2], columns=columns).sampled([3], [-0.1], 1, Finish.STOP)
            for sample in range(count)
        ]
    )


def test_a_row_keeps_the_rewards_verdict_beside_its_cost(tmp_path: Path) -> None:
    rollouts = rolled(2)

    def verdict(name: str, values: list[float], valid: list[bool], outcome: int) -> Batch:
        fields = {
            name: torch.tensor(values),
            "valid": torch.tensor(valid),
            "outcome": torch.full((2,), outcome, dtype=torch.int8),
        }
        return Batch(ids=rollouts.ids, fields=fields)

    rewards = verdict("rewards", [1.0, 0.5], [True, True], 0)
    costs = verdict("costs", [2.0, 0.0], [True, False], 3)
    path = tmp_path / "rollouts" / "step-000001-0001-of-0001.safetensors"
    write_part(str(path), 1.0, ["", "", ""], rollouts, rewards, costs)
    found = rollout_columns(tmp_path, 1)
    assert (found["outcome"], found["reward"], found["cost"]) == (["score"] * 2, [1.0, 0.5], [2.0, None])


def test_a_row_keeps_its_raw_reward_and_the_penalised_one_beside_it(tmp_path: Path) -> None:
    """One step puts the price into a field of its own, another back into the rewards, as GRPO and RLOO do."""
    rollouts, valid = rolled(3), torch.tensor([True, True, False])
    fields = {"rewards": torch.tensor([1.0, 0.5, 0.0]), "valid": valid}
    scores = Batch(ids=rollouts.ids, fields=fields | {"outcome": torch.tensor([0, 0, 1], dtype=torch.int8)})
    price = torch.tensor([0.75, 0.5, -0.25])
    path = tmp_path / "rollouts" / "step-000001-0001-of-0001.safetensors"
    for name in ("penalised", "rewards"):
        priced = scores.with_fields(**{name: price})
        batches = [rollouts, scores, priced, priced.with_fields(advantages=torch.zeros(3))]
        write_part(str(path), 1.0, ["", "", name, "advantages"], *batches)
        found = read_rollouts(tmp_path, 1)
        assert [row.reward for row in found] == [1.0, 0.5, None]
        assert [row.penalised_reward for row in found] == [0.75, None, None]
        assert [row.advantage for row in found] == [0.0] * 3
