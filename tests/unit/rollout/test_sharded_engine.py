"""The engine on a rank's shard of a module: exchanged weights, and ranks that are threads.

tests/distributed/test_sharded_generation.py covers processes and every architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rillflow.errors import RolloutError
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.records.batch import Batch
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks
from tests.unit.models.shards import local_weights
from tests.unit.records.singles import rollouts_of

Build = Callable[..., PreTrainedModel]
Prompts = Callable[..., Batch]


def engine(
    module: PreTrainedModel, tp: Ranks, *, max_tokens: int = 12, seed: int = 3, **more: Any
) -> NativeEngine:
    config = RolloutConfig(max_tokens=max_tokens)
    return NativeEngine(module, config, stop_tokens=frozenset(), seed=seed, context=256, tp=tp, **more)


def part_of(whole: PreTrainedModel, tp: Ranks) -> PreTrainedModel:
    plan = tensor_plan(whole)
    module = sampling_module(whole, plan, tp)
    assign(module, local_weights(whole, plan, tp.rank, tp.size))
    return module


def said(rollouts: Batch) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(rollout.tokens, rollout.logprobs) for rollout in rollouts_of(rollouts)]


@pytest.mark.parametrize("record_after", [1, 10**9])
def test_weights_come_and_go_between_calls(record_after: int, build: Build, prompts: Prompts) -> None:
    """Also with a recording: parameters stay the same objects."""
    whole, other = build(), build()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.9)
    wanted = [
        said(engine(each, SingleRank(), workers=1).generate(prompts(3, 7, 9)))
        for each in (whole, other, whole)
    ]
    module = sampling_module(whole, {}, SingleRank())
    found = []
    for weights in (whole, other, whole):
        assign(module, local_weights(weights, {}, 0, 1))
        if not found:
            used = engine(module, SingleRank(), workers=1, record_after=record_after)
        found.append(said(used.generate(prompts(3, 7, 9))))
    assert found == wanted
    assert wanted[0] != wanted[1]


def test_ranks_may_be_threads(build: Build, prompts: Prompts) -> None:
    whole = build().double()  # where another order of additions changes no token
    group = ThreadGroup(2, 300.0)

    def run(rank: int) -> Any:
        ranks = ThreadRanks(group, rank)
        return said(engine(part_of(whole, ranks), ranks).generate(prompts(3, 7, 9), samples=2))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    assert first == second
    alone = said(engine(whole, SingleRank()).generate(prompts(3, 7, 9), samples=2))
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in alone]


def test_ranks_that_differ_in_the_last_token_of_a_call_are_told(build: Build, prompts: Prompts) -> None:
    """Each row samples a single token, so no later pass compares it: the call does so before it returns."""
    whole, group = build(), ThreadGroup(2, 300.0)

    def run(rank: int) -> None:
        ranks = ThreadRanks(group, rank)
        used = engine(part_of(whole, ranks), ranks, max_tokens=1, seed=rank)
        with pytest.raises(RolloutError, match="has other tokens on rank 1 of a tensor-parallel group"):
            used.generate(prompts(3, 7, 9), samples=4)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))


def test_several_lanes_over_ranks_are_refused(build: Build) -> None:
    ranks = ThreadRanks(ThreadGroup(2, 1.0), 0)
    with pytest.raises(RolloutError, match="the engine has 2 workers and 2 tensor-parallel ranks"):
        engine(part_of(build(), ranks), ranks, workers=2)
