"""Awaited: wait for several results together; if several fail, report the cause and not its consequences.

rank 1 raises, or dies ──> rank 0's collective fails:       Stranded ┐ often arrives before the cause
                      └──> a rank that needs its result:    Stranded ┘
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.errors import ClusterError
from rillflow.workers.backend import Backend, Place, RankDied, RankLost
from rillflow.workers.collectives import Stranded

_ECHO_S = 2.0
"""Seconds to wait for the cause after a consequence: a death is detected later than the calls it breaks."""


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """One awaited result of a rank."""

    doing: str
    """What the rank computes, as errors name it."""
    place: Place
    """The rank."""
    reference: Any
    """The backend's reference to the result."""


def answers(awaited: Sequence[Awaited], backend: Backend, deadline_s: float) -> list[Any]:
    """Return every rank's result, in order; the first error ends the wait at once.

    Args:
        awaited: the results; those that others depend on come first.
        backend: the backend that runs the calls.
        deadline_s: longest wait.

    Raises:
        TimeoutError: a result is not ready in time.
        RankDied: a rank died; the error names the rank and its call.
        Exception: an error that a rank raised.
    """
    try:
        return backend.read_all([each.reference for each in awaited], deadline_s)
    except (RankLost, Stranded) as error:
        raise _cause(error, awaited, backend) from None


def _cause(error: ClusterError, awaited: Sequence[Awaited], backend: Backend) -> Exception:
    """Return the error that caused this one; the error itself if no other is found."""
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
            except Exception as cause:  # noqa: BLE001  any error of a rank
                return cause
        if time.monotonic() > end:
            return error
        time.sleep(0.05)
