"""Any schedule comes to its end on any timing, keeps what it says, and leaves the gradients alone."""

from __future__ import annotations

from math import lcm
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rillflow.sharding.pipeline_runner import PipelinePass
from rillflow.workers.collectives import Ranks
from rillflow_parts.fusion.fused_pipeline import run_fused
from rillflow_parts.fusion.scheduling.listing import in_turn, list_schedule
from rillflow_parts.fusion.scheduling.moves import Orders
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule
from rillflow_parts.fusion.scheduling.step import step_plan
from rillflow_parts.fusion.scheduling.work import FusedWork
from tests.distributed.processes import together
from tests.parts.fusion.scheduling.check import check
from tests.parts.fusion.scheduling.toys import even
from tests.parts.fusion.toy_stages import random_pauses, toy_pass


def problem(stages: tuple[int, int], counts: tuple[int, int]) -> FusedProblem:
    one, other = (
        even(name, stages=size, micro_batches=count, forward_s=forward_s, activation_bytes=1.0)
        for name, size, count, forward_s in zip("ab", stages, counts, (1.0, 0.6), strict=True)
    )
    return FusedProblem(devices=lcm(*stages), ascending=one, descending=other)


def drawn_schedule(asked: FusedProblem, seed: int) -> FusedSchedule:
    """Random targets, or random turns of whole micro-batches, or a searched schedule."""
    work, draw = FusedWork(asked), Random(seed)
    if seed % 3 == 0:
        starts = list_schedule(work, [40 * draw.random() for _ in range(work.count)])
        assert starts is not None
    elif seed % 3 == 1:
        turns = [0] * asked.ascending.micro_batches + [1] * asked.descending.micro_batches
        starts = Orders(work, in_turn(work, draw.sample(turns, len(turns)))).starts
    else:
        return step_plan(asked.ascending, asked.descending).schedule
    return work.schedule(starts)


def taken(given: PipelinePass) -> list[Tensor]:
    found = [each.grad.clone() for each in given.part.parameters() if each.grad is not None]
    given.part.zero_grad()
    return found


def sent_at_once(tensor: Tensor, **place: Any) -> SimpleNamespace:
    """Send a tensor and wait until the neighbour has posted its receive, as NCCL may."""
    work = dist.isend(tensor, **place)
    assert work is not None
    work.wait()
    return SimpleNamespace(wait=lambda: None)  # gloo waits for ever the second time


def ran(
    ranks: Ranks,
    stages: tuple[int, int],
    counts: tuple[int, int],
    seeds: list[int],
    most_s: float,
    blocks: bool = False,
) -> list[dict[str, Any]]:
    """Run random schedules with random pauses, after both models alone without any."""
    asked, found = problem(stages, counts), []
    both = [
        toy_pass(ranks, stages[index], counts[index], is_descending=index == 1, pause=lambda _: None)
        for index in range(2)
    ]
    expected = []
    for given in both:
        given.run_alone()
        expected.append(taken(given))
    parts: list[Any] = [given.part for given in both]
    for seed in seeds:
        plan = drawn_schedule(asked, seed)
        for part in parts:
            part.pause, part.peak = random_pauses(100 * seed + ranks.rank, most_s), 0
        transport = SimpleNamespace(isend=sent_at_once if blocks else dist.isend, irecv=dist.irecv)
        with patch("rillflow_parts.fusion.fused_pipeline.dist", transport):
            run_fused(both[0], both[1], plan)
        device = ranks.rank % asked.devices
        peaks = [most_kept(plan, device, index) for index in range(2)]
        found.append(
            {
                "right": check(asked, plan) == [],
                "gradients": all(
                    len(one) == len(two) and all(map(torch.equal, one, two))
                    for one, two in zip(expected, map(taken, both), strict=True)
                ),
                "freed": [len(part.kept) for part in parts] == [0, 0],
                "peaks": [part.peak for part in parts] == peaks,
            }
        )
    return found


def most_kept(plan: FusedSchedule, device: int, pipeline: int) -> int:
    """Most micro-batches of a model between their passes on a device."""
    kept = most = 0
    for task in plan.devices[device]:
        if task.pipeline == pipeline:
            kept += -1 if task.is_backward else 1
            most = max(most, kept)
    return most


def check_all(size: int, *arguments: Any) -> None:
    for rank, found in enumerate(together(size, ran, *arguments)):
        for place, each in enumerate(found):
            assert all(each.values()), (rank, place, each)


def test_two_ranks_end_with_any_order() -> None:
    check_all(2, (2, 2), (5, 3), list(range(6)), 0.003)


def test_no_order_deadlocks_even_if_every_send_waits_for_its_receive() -> None:
    check_all(2, (2, 2), (5, 3), list(range(6)), 0.0, True)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("size", "stages", "counts"),
    [(4, (4, 4), (7, 6)), (4, (4, 2), (6, 5)), (4, (2, 4), (1, 6)), (8, (8, 4), (9, 5)), (6, (3, 2), (5, 5))],
)
def test_any_order_ends(size: int, stages: tuple[int, int], counts: tuple[int, int], blocks: bool) -> None:
    check_all(size, stages, counts, list(range(12)), 0.02, blocks)


def unsound(ranks: Ranks) -> list[bool]:
    """One model's loss is not a number; the other one learns the same as before."""
    plan = drawn_schedule(problem((2, 2), (4, 4)), 2)
    one, other = (
        toy_pass(ranks, 2, 4, is_descending=is_descending, pause=lambda _: None)
        for is_descending in (False, True)
    )
    run_fused(one, other, plan)
    expected = taken(one), taken(other)
    spoiled = toy_pass(ranks, 2, 4, is_descending=True, pause=lambda _: None)
    broken = PipelinePass(
        ranks=spoiled.ranks,
        module=spoiled.module,
        part=spoiled.part,
        readings=spoiled.readings,
        finish=lambda number, output: output.sum() * (float("nan") if number == 1 else 0),
        after=spoiled.after,
        is_descending=True,
    )
    run_fused(one, broken, plan)
    return [all(map(torch.equal, expected[0], taken(one))), any(bool(g.isnan().any()) for g in taken(broken))]


def test_a_loss_that_is_no_number_reaches_every_stage_and_not_the_other_model() -> None:
    assert together(2, unsound) == [[True, True], [True, True]]
