"""Awaited answers: the original error is raised, not one that it caused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.awaited import Awaited, answers
from rillflow.workers.backend import Place, Pool, RankLost
from rillflow.workers.collectives import Stranded
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import submitted


def failing(error: Exception, after_s: float = 0.0) -> Callable[[Any], None]:
    def work(site: Any) -> None:
        time.sleep(after_s)
        raise error

    return work


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (ValueError("a bad row"), ValueError, "a bad row"),
        (RankLost("has died", why="it ran out of memory"), ClusterError, "rank 1 of pool 'main' has died"),
    ],
)
def test_a_cause_that_comes_after_its_echo_is_told(cause: Exception, kind: type, said: str) -> None:
    backend = InlineBackend()
    backend.open([Pool(name="main", size=2)])
    works = [failing(Stranded("left alone", why="a rank is gone")), failing(cause, after_s=0.02)]
    awaited = []
    for rank, work in enumerate(works):
        place = Place(pool="main", rank=rank)
        (reference,) = backend.submit(place, work)
        awaited.append(Awaited(doing="policy.update", place=place, reference=reference))
    with pytest.raises(kind, match=said):
        answers(awaited, backend, 10.0)
    backend.close()


@pytest.mark.parametrize("is_mended", [False, True])
def test_an_error_before_a_repair_is_no_cause_of_a_later_one(is_mended: bool) -> None:
    backend = InlineBackend()
    backend.open([Pool(name="main", size=2)])
    place = Place(pool="main", rank=0)
    earlier = submitted(
        "policy.update", backend, [(place, failing(ValueError("a bad row")), ())], taken=[0], given=[]
    )
    while not earlier.is_ready:
        time.sleep(0.01)
    if is_mended:
        backend.mend(["main"], 10.0)
    (reference,) = backend.submit(place, failing(Stranded("left alone", why="a rank is gone")))
    later = Awaited(doing="policy.publish", place=place, reference=reference)
    with pytest.raises(Stranded if is_mended else ValueError):
        answers([later], backend, 10.0)
    backend.close()
