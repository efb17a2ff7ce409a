"""Offload to host memory changes no bit over a mesh."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.offload import OnHost
from rillflow.training.scorer import Scorer
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, groups_of, own_rows, update
from processes import together

CASES = [
    Case(kind="qwen2", dtype="bfloat16", layers=2, dp=2, fsdp=2),
    Case(kind="qwen2", dtype="bfloat16", layers=2, tp=2, sequence=True),
    Case(kind="qwen2", dtype="bfloat16", layers=2, pp=2),
    Case(kind="qwen2", dtype="float32", layers=2, dp=2, fsdp=2, checkpointing=True),
    Case(kind="qwen2", dtype="float32", layers=2, tp=2, tied=False),
    Case(kind="qwen2", dtype="float32", layers=2, pp=2, tied=False),
]


def made(case: Case, ranks: Ranks, **settings: Any) -> Trainer:
    parallel = Parallel(decoder(case), groups_of(case, ranks), sequence=case.sequence)
    config = TrainConfig(
        lr=1e-2,
        tokens_per_micro_batch=case.budget,
        gradient_checkpointing=case.checkpointing,
        **settings,
    )
    return Trainer(parallel.module, config, total_steps=4, parallel=parallel)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = {f"weight/{name}": held for name, held in trainer._parallel.local_weights().items()}
    return {name: each.clone() for name, each in {**trainer.optimizer.state(), **weights}.items()}


def both_ways(ranks: Ranks, cases: list[Case]) -> list[str]:
    """Return this rank's differences between steps with and without offload, resumed after the first step."""
    differ = []
    for case, moments in zip(cases, cycle((None, "bfloat16"))):
        batch = own_rows(case, groups_of(case, ranks))
        here, away = (
            made(case, ranks, optimizer_dtype=moments, offload=offload) for offload in (None, "optimizer")
        )
        update(case, here, batch)
        update(case, away, batch)
        again = made(case, ranks, optimizer_dtype=moments, offload="optimizer")
        with torch.no_grad():
            for name, held in again._parallel.local_weights().items():
                held.copy_(away._parallel.local_weights()[name])
        again.optimizer.load_state(away.optimizer.state())
        expected = update(case, here, batch)
        for trainer in (away, again):
            found = update(case, trainer, batch)
            moved = found.pop("train/moved_bytes/mean", None)
            if found != expected or (moved is None or moved.value <= 0) == bool(found):
                differ.append(f"{case} {moments}: {found}, not {expected}; moved {moved}")
            states = state_of(here), state_of(trainer)
            assert states[0].keys() == states[1].keys()
            differ += [
                f"{case} {moments}: {name}"
                for name, value in states[0].items()
                if not torch.equal(value, states[1][name])
            ]
    return differ


def test_an_offloaded_optimiser_has_the_bits_of_one_that_stays() -> None:
    assert together(2, both_ways, CASES) == [[], []]


def scored_both_ways(ranks: Ranks, cases: list[Case]) -> list[bool]:
    """Return whether an offloaded module gives the same scores twice."""
    same = []
    for case in cases:
        parallel = Parallel(decoder(case), groups_of(case, ranks), sequence=case.sequence)
        parallel.module.requires_grad_(False)
        scorer = Scorer(parallel.module, TrainConfig(tokens_per_micro_batch=case.budget), parallel=parallel)
        batch = own_rows(case, parallel.groups)
        before = scorer.logprobs(batch).values
        away = OnHost(parallel.module.parameters())
        held = sum(each.untyped_storage().nbytes() for each in parallel.local_weights().values())
        for _ in range(2):
            with away:
                same.append(torch.equal(scorer.logprobs(batch).values, before))
        same.append(held == 0 < away.num_bytes)
    return same


def test_a_reference_whose_weights_leave_says_the_same() -> None:
    assert together(2, scored_both_ways, CASES) == [[True] * 3 * len(CASES)] * 2
