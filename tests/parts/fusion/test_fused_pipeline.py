"""Two models in one fused stage learn bit for bit what each of them learns alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.sharding.mesh import rank_groups, require_processes
from rillflow.sharding.module import Parallel
from rillflow.sharding.packed_rows import Reading, lay_out
from rillflow.sharding.pipeline_runner import PipelinePass
from rillflow.sharding.tensor import local_gradient
from rillflow.workers.collectives import Ranks
from rillflow_parts.fusion.fused_pipeline import run_fused
from rillflow_parts.fusion.scheduling.listing import list_schedule
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule
from rillflow_parts.fusion.scheduling.work import FusedWork
from tests.distributed.meshes import Case, decoder, rows
from tests.distributed.processes import together
from tests.parts.fusion.scheduling.toys import even

ACTOR = Case(kind="qwen3", dtype="float32", layers=4)
CRITIC = Case(kind="qwen3", dtype="float32", layers=4, scalar=True)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models on the same ranks, and the micro-batches of their replicas."""

    actor: Case
    critic: Case
    actor_batches: tuple[int, ...] = (8,)
    """Micro-batches of each replica."""
    critic_batches: tuple[int, ...] = (8,)
    seed: int = 0
    """Of the order of passes."""

    @property
    def schedule(self) -> FusedSchedule:
        """Random orders that no device waits in for ever."""
        one = even(
            "actor",
            stages=self.actor.pp,
            micro_batches=max(self.actor_batches),
            forward_s=1.0,
            activation_bytes=1.0,
        )
        other = even(
            "critic",
            stages=self.critic.pp,
            micro_batches=max(self.critic_batches),
            forward_s=0.7,
            activation_bytes=1.0,
        )
        devices = max(one.stages, other.stages)
        work = FusedWork(FusedProblem(devices=devices, ascending=one, descending=other))
        draw = Random(self.seed)
        starts = list_schedule(work, [30 * draw.random() for _ in range(work.count)])
        assert starts is not None
        return work.schedule(starts)


def loss(index: int, output: Tensor) -> Tensor:
    """Any loss that depends on all outputs and on the micro-batch."""
    wide = output.float()
    return (wide.square().sum() + wide.sum()) * (1 + index) / 64


def made_pass(case: Case, batches: Sequence[int], ranks: Ranks, *, is_descending: bool) -> tuple[Any, ...]:
    """A model's part on this rank, and its pass over the rows of its replica."""
    mesh = Mesh.of(dp=case.dp, pp=case.pp, tp=case.tp)
    groups = rank_groups(mesh.turned("pp") if is_descending else mesh, ranks, case.fsdp)
    parallel = Parallel(decoder(case), groups, sequence=case.sequence)
    back = 0 if case.scalar else 1
    parts = micro_batches(batches[groups.dp.rank], groups.dp.rank)
    readings = [unit(lay_out(part, parallel.device, back=back), 2 * case.sequence) for part in parts]
    backwards: list[int] = []
    given = PipelinePass(
        ranks=require_processes(groups.pp),
        module=parallel.module,
        part=parallel.part,
        readings=readings,
        finish=lambda index, output: loss(index, output) if index < len(parts) else output.sum() * 0,
        after=lambda: backwards.append(1),
        is_descending=is_descending,
    )
    return parallel, given, backwards


def unit(reading: Reading, size: int) -> Reading:
    return reading.padded(reading.size + -reading.size % size) if size else reading


def micro_batches(count: int, replica: int) -> list[Batch]:
    """Micro-batches of two rows; every replica has others."""
    batch = rows()
    return [batch.select([(index + replica) % 8, (3 * index + 1) % 8]) for index in range(count)]


def gradients(parallel: Parallel) -> dict[str, Tensor]:
    """Take this rank's gradients and clear them."""
    found = {name: local_gradient(p).clone() for name, p in parallel.parameters.items() if p.grad is not None}
    for parameter in parallel.parameters.values():
        parameter.grad = None
    return found


def alone(parallel: Parallel, given: PipelinePass) -> dict[str, Tensor]:
    given.run_alone()
    return gradients(parallel)


def compared(ranks: Ranks, pairs: list[Pair]) -> list[dict[str, bool]]:
    """Run each pair one after the other, then fused; say whether all gradients are equal."""
    found = []
    for pair in pairs:
        actor, one, after_one = made_pass(pair.actor, pair.actor_batches, ranks, is_descending=False)
        critic, other, after_other = made_pass(pair.critic, pair.critic_batches, ranks, is_descending=True)
        expected = alone(actor, one), alone(critic, other)
        after_one.clear()
        after_other.clear()
        plan = pair.schedule
        run = run_fused(one, other, plan)
        fused = gradients(actor), gradients(critic)
        every = sorted((each.began, index, each) for index, ran in enumerate(run) for each in ran.passes)
        order = plan.devices[ranks.rank // pair.actor.tp % len(plan.devices)]
        found.append(
            {
                "equal": all(same(a, b) for a, b in zip(expected, fused, strict=True)),
                "learned": all(float(g.abs().sum()) > 0 for each in expected for g in each.values()),
                "order": [(index, each.is_backward, each.micro_batch) for _, index, each in every]
                == [(task.pipeline, task.is_backward, task.micro_batch) for task in order],
                "mixed": is_mixed([index for _, index, _ in every]),
                "after": [len(after_one), len(after_other)] == [len(ran.readings) for ran in run],
                "apart": all(a.ended <= b.began for (*_, a), (*_, b) in pairwise(every)),
            }
        )
    return found


def same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    """Compare gradients; those of a replica without rows are 0."""
    zeros = {name: torch.zeros_like(gradient) for name, gradient in found.items()}
    expected = expected or zeros
    return expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)


def is_mixed(models: list[int]) -> bool:
    """Whether one model runs before the other has ended."""
    return models != sorted(models) and models != sorted(models, reverse=True)


TWO = [
    Pair(actor=replace(ACTOR, pp=2), critic=replace(CRITIC, pp=2)),
    Pair(
        actor=replace(ACTOR, pp=2, tied=False),
        critic=replace(CRITIC, pp=2),
        actor_batches=(5,),
        critic_batches=(3,),
        seed=3,
    ),
]
FOUR = [
    Pair(
        actor=replace(ACTOR, pp=4),
        critic=replace(CRITIC, dp=2, pp=2),
        actor_batches=(6,),
        critic_batches=(4, 3),
    ),
    Pair(actor=replace(ACTOR, pp=2, tp=2), critic=replace(CRITIC, pp=2, tp=2, sequence=True)),
    Pair(
        actor=replace(ACTOR, dp=2, pp=2, fsdp=2),
        critic=replace(CRITIC, dp=2, pp=2),
        actor_batches=(4, 4),
        critic_batches=(0, 4),
    ),
    Pair(actor=replace(ACTOR, pp=4), critic=replace(CRITIC, pp=4), seed=5),
]


def check(size: int, pairs: list[Pair]) -> None:
    by_rank = together(size, compared, pairs)
    for place, pair in enumerate(pairs):
        results = [found[place] for found in by_rank]
        assert any(found["mixed"] for found in results), pair
        for found in results:
            found.pop("mixed")
            assert not [name for name, is_true in found.items() if not is_true], pair


def test_two_ranks_learn_the_bits_of_the_models_alone() -> None:
    check(2, TWO)


@pytest.mark.slow
def test_four_ranks_learn_the_bits_of_the_models_alone() -> None:
    check(4, FOUR)
