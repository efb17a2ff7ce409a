"""Awaited: answers that are waited for together; of several that fail, the cause is told and not its echoes.

rank 1 raises, or dies ──> rank 0's collective breaks: Stranded ┐ told before the cause, as often as not
                      └──> whoever needs its result:   Stranded ┘
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.cluster.backend import Backend, Place, RankDied, RankLost
from rillflow.cluster.ranks import Stranded
from rillflow.errors import ClusterError

_ECHO_S = 2.0
"""How long after an echo its cause may still come: a death is known later than what it breaks."""


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """One rank's answer."""

    doing: str
    """What the rank does for it, as errors say."""
    place: Place
    """The rank."""
    reference: Any
    """The backend's reference to the answer."""


def answers(awaited: Sequence[Awaited], backend: Backend, deadline_s: float) -> list[Any]:
    """Every rank's answer, in order; the first error of any of them ends the wait at once.

    Args:
        awaited: those that others wait for before these.
        backend: where they are made.
        deadline_s: how long to wait.

    Raises:
        TimeoutError: one is not there in time.
        RankDied: it says which, doing what.
        Exception: what a rank raised.
    """
    try:
        return backend.read_all([each.reference for each in awaited], deadline_s)
    except (RankLost, Stranded) as error:
        raise _cause(error, awaited, backend) from None


def _cause(error: ClusterError, awaited: Sequence[Awaited], backend: Backend) -> Exception:
    """What the error follows from; itself where nothing else is found."""
    end = time.monotonic() + _ECHO_S
    while True:
        for each in awaited:
            try:
                if backend.is_ready(each.reference):
                    backend.read_all([each.reference], 0)
            except Stranded:
                continue
            except RankLost as lost:
                on = f" on node {backend.nodes[each.place].address}" if each.place in backend.nodes else ""
                what, pool = f"{each.place}{on} {lost.what}", each.place.pool
                found = RankDied(what, why=lost.why, fix=lost.fix, pool=pool)
                found.add_note(f"in {each.doing} on {each.place}")
                return found
            except Exception as cause:  # noqa: BLE001  whatever a rank raised
                return cause
        if time.monotonic() > end:
            return error
        time.sleep(0.05)
