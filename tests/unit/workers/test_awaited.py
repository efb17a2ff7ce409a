"""Awaited answers: the original error is raised, not one that it caused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.backend import Place, Pool, RankLost
from rillflow.workers.collectives import Stranded
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import Awaited, answers


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
