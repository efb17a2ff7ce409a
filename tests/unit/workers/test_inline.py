"""Inline: threads that sum wait for the slowest, and a rank's resources are closed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rillflow.workers import collectives
from rillflow.workers.backend import Place, Pool, Site
from rillflow.workers.collectives import Stranded, ThreadGroup, ThreadRanks
from rillflow.workers.inline import InlineBackend


def test_nobody_writes_a_sum_before_all_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank sums only after the first has continued, or after a time in which it could have."""
    added, first_is_through = collectives._added, threading.Event()

    def slowly(parts: Sequence[Tensor]) -> Tensor:
        if threading.current_thread() is second[0]:
            first_is_through.wait(0.2)
        return added(parts)

    def sum_up(rank: int) -> float:
        if rank == 1:
            second.append(threading.current_thread())
        number = torch.tensor([1.0 + rank])
        ThreadRanks(group, rank).sum_([number])
        if rank == 0:
            first_is_through.set()
        return float(number)

    monkeypatch.setattr(collectives, "_added", slowly)
    group, second = ThreadGroup(2, 10.0), list[threading.Thread]()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sum_up, (1, 0))) == [3.0, 3.0]


def test_a_rank_alone_in_its_pool_adds_up_after_a_failure() -> None:
    backend, there = InlineBackend(), Place(pool="judge", rank=0)
    backend.open([Pool(name="main", size=1), Pool(name="judge", size=1)])
    number = torch.tensor([3.0])
    with pytest.raises(ZeroDivisionError):
        backend.read_all(backend.submit(there, lambda _: 1 // 0), 10.0)
    backend.read_all(backend.submit(there, lambda site: site.ranks.sum_([number])), 10.0)
    backend.close()
    assert float(number) == 3.0
    assert (backend.traffic.sent_bytes, backend.traffic.read_bytes) == (0, 0), "nothing travels here"


def test_close_waits_for_a_call_that_still_runs() -> None:
    backend, ended = InlineBackend(), list[int]()
    backend.open([Pool(name="main", size=2)])
    begun = threading.Event()

    def work(site: Site) -> None:
        begun.set()
        threading.Event().wait(0.05)
        ended.append(site.place.rank)

    backend.submit(Place(pool="main", rank=1), work)
    begun.wait(60.0)
    backend.close()
    assert ended == [1]


@pytest.mark.parametrize("size", [1, 2])
def test_a_closed_backend_keeps_no_object_of_a_rank_alive(size: int) -> None:
    """Roles hold weights, and a caller may keep the backend for its counts."""
    backend, kept = InlineBackend(), list[weakref.ref[object]]()
    backend.open([Pool(name="main", size=size)])

    def keep(site: Site) -> None:
        site.objects["role"] = threading.Event()
        kept.append(weakref.ref(site.objects["role"]))

    for rank in range(size):
        backend.read_all(backend.submit(Place(pool="main", rank=rank), keep), 10.0)
    assert None not in [each() for each in kept]
    backend.close()
    gc.collect()
    assert [each() for each in kept] == [None] * size


def test_the_controller_sleeps_as_long_as_it_asks_by_its_own_clock() -> None:
    backend = InlineBackend()
    began = backend.now()
    backend.sleep(0.02)
    assert backend.now() - began >= 0.02


@pytest.mark.parametrize("size", [1, 2])
def test_close_closes_what_every_rank_has_open(size: int) -> None:
    backend, closed = InlineBackend(), list[int]()
    backend.open([Pool(name="main", size=size)])
    for rank in range(size):
        (done,) = backend.submit(
            Place(pool="main", rank=rank), lambda site: site.stack.callback(closed.append, site.place.rank)
        )
        backend.read_all([done], 10.0)
    assert closed == []
    backend.close()
    assert sorted(closed) == list(range(size))


def test_an_abandoned_backend_refuses_calls_that_wait_and_runs_later_ones() -> None:
    backend, begun, may_end = InlineBackend(10.0), threading.Event(), threading.Event()
    backend.open([Pool(name="two", size=2)])

    def first(_: Site) -> str:
        begun.set()
        may_end.wait(10)
        return "to its end"

    place = Place("two", 0)
    running, waiting = backend.submit(place, first)[0], backend.submit(place, lambda _: "never")[0]
    begun.wait(10)
    assert backend.abandon() == 10.0, "a running call ends its waits at the deadline"
    with pytest.raises(Stranded, match="was abandoned"):
        backend.read_all([waiting], 10)
    later = backend.submit(place, lambda _: "later")[0]
    may_end.set()
    assert backend.read_all([running, later], 10) == ["to its end", "later"]
    backend.close()
