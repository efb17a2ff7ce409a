"""All ranks choose one schedule for two waiting pipelines, from the sizes and times that they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rillflow.placement.mesh import Mesh
from rillflow.sharding.mesh import rank_groups
from rillflow.workers.collectives import SingleRank
from rillflow_parts.fusion.scheduling.step import LEAST_GAIN, StepPlan
from rillflow_parts.fusion.shared_pipeline import FusedSchedules, WaitingPipeline


@dataclass
class TableRanks:
    """A rank whose collectives return rows of a table, instead of other processes' answers."""

    rank: int
    size: int
    table: Sequence[Any] = ()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError("nothing is summed")

    def gather(self, tensor: Tensor) -> list[Tensor]:
        raise AssertionError("one collective is enough")

    def stack(self, tensor: Tensor) -> Tensor:
        found = torch.tensor(self.table, dtype=torch.float64)
        assert torch.equal(found[self.rank], tensor)
        return found

    def part(self, groups: Sequence[Sequence[int]]) -> Any:
        own = next(sorted(group) for group in groups if self.rank in group)
        return SingleRank() if len(own) == 1 else TableRanks(own.index(self.rank), len(own))


def facts(count: float, longest: float = 10, seconds: Any = (0, 0), parameters: float = 100) -> list[float]:
    """One rank's row: see SharedPipeline.facts."""
    return [count, longest, *seconds, parameters, 64]


def plan(
    rank: int,
    table: Sequence[Any],
    pipes: tuple[int, int] = (4, 4),
    schedules: FusedSchedules | None = None,
) -> StepPlan | None:
    """What a rank plans; ``table`` has each rank's rows for both models."""
    waiting, schedules = [], schedules or FusedSchedules()
    for index, stages in enumerate(pipes):
        mesh = Mesh.of(dp=len(table) // stages, pp=stages, tp=1)
        ranks = TableRanks(rank, len(table), table)
        groups = rank_groups(mesh.turned("pp") if index else mesh, ranks)
        pipeline = SimpleNamespace(groups=groups, facts=lambda _, index=index: table[rank][index])
        waiting.append(WaitingPipeline(pipeline=cast(Any, pipeline), given=cast(Any, None)))
    return schedules.plan(*waiting)


def counts(found: StepPlan) -> list[list[int]]:
    """Passes of both models on every device."""
    devices = found.schedule.devices
    return [[sum(task.pipeline == index for task in tasks) for index in (0, 1)] for tasks in devices]


def test_every_rank_plans_the_same_and_saves_most_with_few_micro_batches() -> None:
    gains = {}
    for count in (1, 4, 80):
        plans = [plan(rank, [[facts(count), facts(count)]] * 2, (2, 2)) for rank in range(2)]
        assert plans[0] is not None and plans[0] == plans[1]
        gains[count] = plans[0].gain
        if count < 80:
            assert counts(plans[0]) == [[2 * count, 2 * count]] * 2
        else:
            assert not plans[0].pays
    assert gains[1] > gains[4] > 0.1 and gains[80] < LEAST_GAIN


def test_measured_seconds_replace_parameters_once_every_rank_has_them() -> None:
    slow, fast = (0.04, 0.08), (0.01, 0.02)
    table = [[facts(4, seconds=slow), facts(4, seconds=fast)] for _ in range(2)]
    found = plan(0, table, (2, 2))
    assert found is not None and found.pays
    assert 4 * 10 * (0.12 + 0.03) <= found.schedule.latency_s < 8
    table[1][1] = facts(4)
    unmeasured = plan(0, table, (2, 2))
    assert unmeasured is not None and unmeasured.pays
    assert unmeasured.schedule.latency_s > 1_000


def test_replicas_with_fewer_micro_batches_run_fewer() -> None:
    """The critic has two replicas on the policy's four ranks; the first has one micro-batch less."""
    table = [[facts(4), facts(2 + (rank >= 2))] for rank in range(4)]
    plans = [plan(rank, table, (4, 2)) for rank in range(4)]
    assert plans[0] is not None and all(each == plans[0] for each in plans)
    assert counts(plans[0]) == [[8, 4], [8, 4], [8, 6], [8, 6]]


def test_blocks_of_ranks_have_their_own_micro_batches() -> None:
    table = [[facts(3 if rank < 2 else 0), facts(2)] for rank in range(4)]
    found = [plan(rank, table, (2, 2)) for rank in range(4)]
    assert [counts(each) for each in found if each is not None] == [
        *[[[6, 4], [6, 4]]] * 2,
        *[[[0, 4], [0, 4]]] * 2,
    ]


def test_a_model_without_micro_batches_has_no_partner() -> None:
    assert plan(0, [[facts(3), facts(0)]] * 2, (2, 2)) is None


def test_a_schedule_is_used_again_until_a_stage_takes_another_share() -> None:
    schedules = FusedSchedules()

    def planned(first: float) -> StepPlan:
        rows = [[facts(4, seconds=(first, 2 * first)), facts(4, seconds=(0.01, 0.02))] for _ in range(2)]
        found = plan(0, rows, (2, 2), schedules)
        assert found is not None
        return found

    one = planned(0.01)
    assert planned(0.011) == one
    assert planned(0.03) != one


@pytest.mark.parametrize("tp", [1, 2])
def test_a_descending_model_has_its_first_stage_on_the_last_ranks(tp: int) -> None:
    mesh = Mesh.of(dp=2, pp=2, tp=tp).turned("pp")
    stages = [rank_groups(mesh, TableRanks(rank, 4 * tp)).stage for rank in range(4 * tp)]
    assert stages == [*[1] * tp, *[0] * tp] * 2
