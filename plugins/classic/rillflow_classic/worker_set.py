"""Worker set: objects of one kind on the ranks of a pool, and their calls.

    WorkerSet.call(index, method, arguments) ─> Backend.submit ─> the worker's process, in order ─> WorkerCall

The backend is one of the core's: inline, processes of this machine, or Ray. A worker that dies ends its own
calls with RankLost; the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rillflow.workers.backend import Backend, Place, RankLost, Replacement, Site

T = TypeVar("T")
_log = logging.getLogger(__name__)
Method = str | Callable[..., Any]
"""Name of a worker's method, or a function of the worker."""
DEADLINE_S = 600.0
"""Longest wait for a worker's answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerCall:
    """A submitted call of a worker."""

    worker: int
    """Index of the worker."""
    reference: Any
    """Reference of the backend."""
    backend: Backend
    """Backend that runs the workers."""

    def read(self, deadline_s: float = DEADLINE_S) -> Any:
        """Return the result, or raise the call's error.

        Raises:
            TimeoutError: it is not ready in time.
            RankLost: the worker has died.
        """
        return self.backend.read_all([self.reference], deadline_s)[0]

    @property
    def is_ready(self) -> bool:
        """Whether ``read`` returns without waiting."""
        return self.backend.is_ready(self.reference)


class WorkerSet(Generic[T]):
    """Workers of one kind, one at each rank of a pool.

    Args:
        backend: an open backend.
        pool: name of the pool.
        make: constructs worker ``index`` on its rank; a module's function, or a partial of one.

    Example:
        actors = WorkerSet(backend, "actors", partial(make_actor, config))
        fragment = actors.call(0, "sample").read()
    """

    def __init__(self, backend: Backend, pool: str, make: Callable[[int], T]) -> None:
        self._backend, self._made_by = backend, make
        self.pool = pool
        """Name of its pool."""
        self.size = backend.pools[pool]
        """Number of workers."""
        backend.read_all([each.reference for each in self.submit_all(_make, make)], DEADLINE_S)

    def call(self, index: int, method: Method, *arguments: Any) -> WorkerCall:
        """Call a method of one worker; calls of a worker run in the order of their submission."""
        return self.submit(index, _call, method, arguments)

    def call_all(self, method: Method, *arguments: Any) -> list[WorkerCall]:
        """Call a method of every worker; the arguments are packed once."""
        return self.submit_all(_call, method, self._backend.pack(arguments, f"the arguments of {method}"))

    def read_all(self, method: Method, *arguments: Any) -> list[Any]:
        """Call a method of every worker, and return the results.

        Raises:
            TimeoutError: a worker does not answer in DEADLINE_S.
            RankLost: a worker has died.
        """
        return [call.read() for call in self.call_all(method, *arguments)]

    def beside(self, pool: str, make: Callable[[int], Any]) -> WorkerSet[Any]:
        """Return workers of another kind on another pool of the same backend."""
        return WorkerSet(self._backend, pool, make)

    def start_again(self, index: int, error: RankLost) -> None:
        """Wait for a new process and a new object for a lost worker."""
        _log.warning("worker %d of %s is lost, and starts again: %s", index, self.pool, error)
        self.replace(index).read()
        self.make_again(index).read()

    def replace(self, index: int) -> Replacement:
        """Start a new process for a lost worker, without its object: see ``make_again``."""
        return self._backend.replace([Place(self.pool, index)])

    def make_again(self, index: int) -> WorkerCall:
        """Construct a worker anew on its rank, whose replacement is ready."""
        return self.submit(index, _make, self._made_by)

    @property
    def is_open(self) -> bool:
        """Whether the backend still runs the pool."""
        return self.pool in self._backend.pools

    def submit(self, index: int, work: Callable[..., Any], *arguments: Any) -> WorkerCall:
        """Run ``work(site, pool, *arguments)`` on a worker's rank; the worker is ``site.objects[pool]``."""
        place = Place(self.pool, index)
        reference = self._backend.submit(place, work, self.pool, *arguments)[0]
        return WorkerCall(worker=index, reference=reference, backend=self._backend)

    def submit_all(self, work: Callable[..., Any], *arguments: Any) -> list[WorkerCall]:
        """Run ``work(site, pool, *arguments)`` on every rank of the pool."""
        return [self.submit(index, work, *arguments) for index in range(self.size)]


def _make(site: Site, name: str, make: Callable[[int], Any]) -> None:
    site.objects[name] = make(site.place.rank)


def _call(site: Site, name: str, method: Method, arguments: tuple[Any, ...]) -> Any:
    return bound(site.objects[name], method)(*arguments)


def bound(worker: Any, method: Method) -> Callable[..., Any]:
    """Return a method of a worker that takes the other arguments.

    Raises:
        AttributeError: the worker has no method of this name.
    """
    # a method's name reaches a worker's process without its class
    found: Callable[..., Any] = (
        getattr(worker, method) if isinstance(method, str) else partial(method, worker)
    )
    return found


def wait_any(calls: Sequence[WorkerCall], deadline_s: float = DEADLINE_S) -> bool:
    """Wait until one of several calls on one backend is ready; return False on timeout."""
    return calls[0].backend.wait_for_any([each.reference for each in calls], deadline_s)


def check_calls(calls: Iterable[WorkerCall]) -> list[WorkerCall]:
    """Raise the error of a call that failed, and return the calls that have not ended.

    The loss of a worker is no error here: who reads its items is told.
    """
    waiting = []
    for call in calls:
        if not call.is_ready:
            waiting.append(call)
            continue
        with suppress(RankLost):
            call.read(0.0)
    return waiting
