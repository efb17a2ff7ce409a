"""The harness for tests with real ranks: results in order, and errors that reach the caller."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rillflow.workers import collectives
from rillflow.workers.collectives import SMALL, Ranks, SingleRank, ThreadGroup, ThreadRanks

sys.path.insert(0, str(Path(__file__).parent))
from processes import DEADLINE_S, together


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
        raise ValueError("it has had enough")
    time.sleep(DEADLINE_S)  # in a collective it would fail too, and perhaps first


def die(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os._exit(3)
    time.sleep(DEADLINE_S)


def test_every_rank_takes_part() -> None:
    assert together(3, add_up, 1.0) == [6.0, 6.0, 6.0]


def add_up_small_and_large(ranks: Ranks) -> list[bool]:
    random = torch.Generator().manual_seed(ranks.rank)
    large = torch.randn(SMALL, 3, generator=random)
    parts = [part.clone() for part in large.split(SMALL // 16)]
    ranks.sum_([large])
    for part in parts:
        ranks.sum_([part])
    stacked = ranks.stack(large[:2])
    return [torch.equal(large, torch.cat(parts)), torch.equal(stacked, large[:2].expand(3, 2, 3))]


def test_a_small_sum_is_made_in_another_way_and_has_the_same_bits() -> None:
    assert together(3, add_up_small_and_large) == [[True, True]] * 3


def add_up_in_buckets(ranks: Ranks) -> tuple[list[bool], float]:
    """Return whether bucketed sums equal plain ones, and the peak memory of a large sum as a share."""
    collectives.BUCKET_BYTES = 2**20
    everyone = [
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)
            for shape, dtype in [
                ((300_001,), torch.float32),
                ((7, 90_000), torch.float32),
                ((3,), torch.float64),
            ]
        ]
        for rank in range(ranks.size)
    ]
    mine = [each.clone() for each in everyone[ranks.rank]]
    mine[1] = mine[1].t().contiguous().t()  # the bytes of its transpose
    ranks.sum_(mine)
    same = [torch.equal(found, one + two) for found, one, two in zip(mine, *everyone, strict=True)]
    large = [torch.ones(2**22) for _ in range(6)]
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    ranks.sum_(large)
    return same, (_status("VmHWM") - before) * 1024 / sum(each.nbytes for each in large)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def test_a_large_sum_takes_the_memory_of_two_buckets_and_has_the_same_bits() -> None:
    for same, share in together(2, add_up_in_buckets):
        assert same == [True] * 3
        assert share < 0.3  # one flat buffer took 4.5 times the tensors


def stacked(ranks: Ranks) -> list[list[int]]:
    found: list[list[int]] = ranks.stack(torch.tensor([ranks.rank, 7])).tolist()
    return found


def test_everyone_gets_everyones_in_order() -> None:
    assert together(2, stacked) == [[[0, 7], [1, 7]]] * 2
    group = ThreadGroup(2, 10.0)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: stacked(ThreadRanks(group, rank)), range(2)))
    assert found == [[[0, 7], [1, 7]]] * 2
    assert stacked(SingleRank()) == [[0, 7]]


def gathered(ranks: Ranks) -> list[list[list[int]]]:
    return [rows.tolist() for rows in ranks.gather(torch.full((ranks.rank + 1, 2), ranks.rank))]


def test_everyone_gets_everyones_rows_though_some_have_fewer() -> None:
    assert together(2, gathered) == [[[[0, 0]], [[1, 1], [1, 1]]]] * 2


def test_some_of_the_ranks_add_up_among_themselves() -> None:
    assert together(4, add_up_by_parity) == [[2, 0, 2, 1], [4, 0, 2, 1], [2, 1, 2, 1], [4, 1, 2, 1]]


def test_threads_part_as_processes_do() -> None:
    group = ThreadGroup(4, 10.0)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda rank: add_up_by_parity(ThreadRanks(group, rank)), range(4)))
    assert found == [[2, 0, 2, 1], [4, 0, 2, 1], [2, 1, 2, 1], [4, 1, 2, 1]]


def test_an_error_comes_through() -> None:
    with pytest.raises(AssertionError, match=r"^rank 1:\n(?s:.*)ValueError: it has had enough"):
        together(2, fail)


def test_a_death_comes_through() -> None:
    with pytest.raises(AssertionError, match=r"^rank 1 died with exit code 3"):
        together(2, die)


def wait_in_vain(ranks: Ranks, parted: bool, told: Path) -> str:
    """Keep rank 1 away from a collective of all, or of its group, until the other one has failed."""
    own = ranks.part([[0, 1]]) if parted else ranks
    if ranks.rank == 1:
        while not told.exists():
            time.sleep(0.05)
        return "rested"
    try:
        own.gather(torch.zeros(1))
    except RuntimeError as error:
        return type(error).__name__
    finally:
        told.touch()
    return "met"


@pytest.mark.parametrize("parted", [False, True])
def test_a_rank_that_does_not_come_is_waited_for_so_long(parted: bool, tmp_path: Path) -> None:
    """The same patience applies to the start, so it leaves a busy machine some time."""
    found = together(2, wait_in_vain, parted, tmp_path / "told", patience_s=3.0)
    assert found == ["RuntimeError", "rested"]
