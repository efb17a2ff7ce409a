"""The harness of tests that need real ranks: results in order, and errors that come through."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rillflow.cluster.ranks import Circle, Ranks, ThreadRanks

sys.path.insert(0, str(Path(__file__).parent))
from processes import together


def add_up(ranks: Ranks, more: float) -> float:
    number = torch.tensor([ranks.rank + more])
    ranks.sum_([number])
    return float(number)


def add_up_by_parity(ranks: Ranks) -> list[float]:
    number = torch.tensor([float(ranks.rank)])
    own = ranks.part([[0, 2], [1, 3]])
    own.sum_([number])
    alone = ranks.part([[0], [1], [2], [3]])
    alone.sum_([number])
    return [float(number), own.rank, own.size, alone.size]


def fail(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("rank 1 has had enough")
    ranks.gather(torch.zeros(1))


def die(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os._exit(3)
    ranks.gather(torch.zeros(1))


def test_every_rank_takes_part() -> None:
    assert together(3, add_up, 1.0) == [6.0, 6.0, 6.0]


def test_some_of_the_ranks_add_up_among_themselves() -> None:
    assert together(4, add_up_by_parity) == [[2, 0, 2, 1], [4, 0, 2, 1], [2, 1, 2, 1], [4, 1, 2, 1]]


def test_threads_part_as_processes_do() -> None:
    circle = Circle(4, 10.0)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda rank: add_up_by_parity(ThreadRanks(circle, rank)), range(4)))
    assert found == [[2, 0, 2, 1], [4, 0, 2, 1], [2, 1, 2, 1], [4, 1, 2, 1]]


def test_an_error_comes_through() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 has had enough|rank 0"):
        together(2, fail)


def test_a_death_comes_through() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 died with exit code 3|rank 0"):
        together(2, die)
