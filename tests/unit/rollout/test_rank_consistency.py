"""Diverging ranks are detected before their next pass; the error has the row and both ranks' tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rillflow.errors import RolloutError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.batch_worker import RankConsistency
from rillflow.rollout.native.scheduler import Sequence
from rillflow.workers.collectives import ThreadGroup, ThreadRanks


def row(prompt: int) -> Sequence:
    start = Rollout.start(RowId(0, prompt, 0), [1, 2])
    return Sequence(rollout=start, sampling=SamplingConfig(), prefix=(1,), limit=8)


def on_two_ranks(run: Callable[[int, RankConsistency], str]) -> list[str]:
    group = ThreadGroup(2, 20.0)
    with ThreadPoolExecutor(2) as threads:
        ranks = [RankConsistency(ThreadRanks(group, rank), torch.device("cpu")) for rank in range(2)]
        return list(threads.map(run, range(2), ranks))


OTHER_ROW = "runs row (epoch 0 prompt 5 sample 0) where rank 0 runs row (epoch 0 prompt 4 sample 0)"
OTHER_TOKEN = "row (epoch 0 prompt 4 sample 0) has other tokens on rank 1"


@pytest.mark.parametrize(
    ("prompts", "tokens", "said"),
    [((4, 5), (7, 7), OTHER_ROW), ((4, 4), (7, 8), OTHER_TOKEN)],
    ids=["rows", "tokens"],
)
def test_both_ranks_tell_the_first_row_that_differs(
    prompts: tuple[int, int], tokens: tuple[int, int], said: str
) -> None:
    def run(rank: int, consistency: RankConsistency) -> str:
        consistency.note([row(3), row(prompts[rank])], [6, tokens[rank]])
        with pytest.raises(RolloutError) as raised:
            consistency.check(1)
        return raised.value.what

    assert all(said in told for told in on_two_ranks(run))


def test_removed_rows_are_not_compared() -> None:
    """A failed step leaves different notes on ranks; the next call starts without them."""

    def run(rank: int, consistency: RankConsistency) -> str:
        consistency.note([row(3)], [rank])
        consistency.clear()
        consistency.note([row(4)], [9])
        consistency.check(1)
        return "alike"

    assert on_two_ranks(run) == ["alike", "alike"]
