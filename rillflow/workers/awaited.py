"""Awaited: wait for the calls of several ranks, and raise the error that caused the others.

rank 1 raises, or dies ──> rank 0's collective fails:       Stranded ┐ often arrives before the cause
                      └──> a rank that needs its result:    Stranded ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.errors import ClusterError
from rillflow.workers.backend import Backend, Place, RankLost
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


class Replies:
    """Calls of several ranks whose results are awaited together.

    Args:
        doing: what the ranks do, as errors name it.
        calls: the backend's reference to each rank's result.
        backend: the backend that runs the calls.
        fix: advice if a rank does not finish in time.
    """

    def __init__(self, doing: str, calls: Mapping[Place, Any], backend: Backend, fix: str = "") -> None:
        self._doing, self._calls, self._backend, self._fix = doing, calls, backend, fix

    @property
    def is_ready(self) -> bool:
        """Whether every rank has finished, or failed."""
        return all(self._backend.is_ready(each) for each in self._calls.values())

    def read(self, deadline_s: float) -> dict[Place, Any]:
        """Return the results by rank; see ``await_replies`` for errors."""
        return await_replies(self._doing, self._calls, self._backend, deadline_s, self._fix)


def await_replies(
    doing: str, calls: Mapping[Place, Any], backend: Backend, deadline_s: float, fix: str = ""
) -> dict[Place, Any]:
    """Return what the calls of several ranks return, by rank.

    Args:
        doing: what the ranks do, as errors name it.
        calls: the backend's reference to each rank's result.
        backend: the backend that runs the calls.
        deadline_s: longest wait.
        fix: advice if a rank does not finish in time.

    Raises:
        ClusterError: a rank died or did not finish in time.
        Exception: an error that a rank raised.
    """
    awaited = [Awaited(doing=doing, place=at, reference=made) for at, made in calls.items()]
    try:
        return dict(zip(calls, answers(awaited, backend, deadline_s), strict=True))
    except TimeoutError:
        late = ", ".join(str(each.place) for each in awaited if not backend.is_ready(each.reference))
        raise ClusterError(
            f"{late} did not finish {doing} in {deadline_s:g} s",
            why="the call is still running, or its process is missing or cannot reach the others",
            fix=fix,
        ) from None


def broken_worlds(
    left: Mapping[Place, Any], worlds: Mapping[Place, tuple[Place, ...]], backend: Backend, deadline_s: float
) -> list[tuple[Place, ...]]:
    """Return the worlds to connect again: all ranks of each are idle, and one has left its collectives.

    A world with a dead or busy rank cannot be connected, and is left out.

    Args:
        left: the backend's reference to whether each rank has left its collectives.
        worlds: the world of every rank.
        backend: the backend that runs the calls.
        deadline_s: longest wait.
    """
    end, found = backend.now() + deadline_s, list[tuple[Place, ...]]()
    for world in dict.fromkeys(worlds[at] for at in left):
        own = {at: left[at] for at in world}
        try:
            replies = await_replies("its running call", own, backend, max(0.0, end - backend.now()))
        except ClusterError:
            continue
        if any(replies.values()):
            found.append(world)
    return found


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
    """Return the error that caused this one; the error itself if no other is found.

    Ranks that leave their collectives with one call break those of the next ones, such as a publish behind an
    update, so calls that the controller has not waited for are searched, too.
    """
    end = backend.now() + _ECHO_S
    while True:
        for each in (*awaited, *_held(backend)):
            try:
                if backend.is_ready(each.reference):
                    backend.read_all([each.reference], 0)
            except Stranded:
                continue
            except RankLost as lost:
                place = lost.place or each.place
                died = lost.death(place, backend.nodes[place].address if place in backend.nodes else "")
                died.add_note(f"in {each.doing} on {each.place}")
                return died
            except Exception as cause:  # noqa: BLE001  any error of a rank
                return cause
        if backend.now() > end:
            return error
        backend.sleep(0.05)


def _held(backend: Backend) -> Iterator[Awaited]:
    """Yield the results that the controller holds and has not waited for, oldest first."""
    for held in backend.recent.copy():
        result = held()
        if result is not None:
            yield from result.unread
