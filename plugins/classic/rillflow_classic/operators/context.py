"""Context: what the operators of one run of a plan share, and how one says that it has no item now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from rillflow.records.metrics import Metrics, Sum, merge_metrics
from rillflow_classic.worker_set import WorkerCall, WorkerSet, check_calls

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NotReady:
    """An operator has no item now, although there may be one later."""

    calls: tuple[WorkerCall, ...] = ()
    """Calls of workers, any of which brings an item."""
    polls: bool = False
    """Whether something outside the plan, such as a stream, brings an item."""
    why: tuple[str, ...] = ()
    """What it waits for in another flow of the plan."""

    @property
    def is_outside(self) -> bool:
        """Whether time brings the item; otherwise another flow of the plan must move first."""
        return bool(self.calls) or self.polls

    @classmethod
    def of(cls, each: Sequence[NotReady]) -> NotReady:
        """Return the state of a plan that waits for any of several."""
        return cls(
            calls=tuple(call for one in each for call in one.calls),
            polls=any(one.polls for one in each),
            why=tuple(dict.fromkeys(why for one in each for why in one.why)),
        )


@dataclass(frozen=True)
class SourceWorker:
    """The worker that an item came from."""

    workers: WorkerSet[Any]
    """Its set."""
    index: int
    """Its index in the set."""

    def call(self, method: str, *arguments: Any) -> WorkerCall:
        """Call one of its methods, after the calls that are in its mailbox."""
        return self.workers.call(self.index, method, *arguments)


@dataclass(kw_only=True)
class OperatorWork:
    """Time in the calls of an operator's function."""

    began_s: float
    """Start of the first one, on ``perf_counter``."""
    spent_s: float
    """Seconds in all of them."""


class PlanContext:
    """What the operators of one run of a plan share; a worker has a context of its own for its transforms.

    Args:
        worker: the worker's object, for transforms that run on it.
    """

    def __init__(self, worker: Any = None) -> None:
        self.worker = worker
        """The object of the worker that runs these operators; None in the controller's process."""
        self.source: SourceWorker | None = None
        """Where the present item comes from."""
        self.moves = 0
        """Number of items that operators have moved, to notice a plan that stands still."""
        self.metrics: Metrics = {}
        """Recorded since the last ``take_metrics``."""
        self.notes: list[str] = []
        """What happened that a reader of the run should know: lost workers."""
        self._work: dict[str, OperatorWork] = {}
        self._shared: dict[Any, Any] = {}
        self._sent: list[WorkerCall] = []

    def record(self, metrics: Metrics) -> None:
        """Add metrics to the next item of ``report_metrics``."""
        self.metrics = merge_metrics([self.metrics, metrics])

    def take_metrics(self) -> Metrics:
        """Return the recorded metrics, and begin anew."""
        found, self.metrics = self.metrics, {}
        return found

    def worked(self, label: str, began_s: float) -> None:
        """Count the time of an operator's call that began at a time of ``perf_counter`` and ends now."""
        work = self._work.setdefault(label, OperatorWork(began_s=began_s, spent_s=0.0))
        work.spent_s += time.perf_counter() - began_s

    def take_work(self) -> dict[str, OperatorWork]:
        """Return the work of every operator by label, and begin anew."""
        found, self._work = self._work, {}
        return found

    def lost(self, source: SourceWorker, reason: Exception) -> None:
        """Record that a worker is left out from now on."""
        note = f"worker {source.index} of {source.workers.pool} is left out: {reason}"
        self.notes.append(note)
        self.record({"actor/lost/sum": Sum(value=1.0)})
        _log.info("%s", note)

    def sent(self, calls: Iterable[WorkerCall]) -> None:
        """Keep calls whose results nobody reads; see ``check_calls``."""
        self._sent = check_calls([*self._sent, *calls])

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """Return the object of this run under a key; make it at first."""
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A function of items with a state of its own in each run of a plan, or one that reads the context."""

    label: str
    """Name in drawings and errors."""
    begin: Callable[[PlanContext], Callable[[Any], Any]]
    """Returns the function for one run."""
    queue: object = None
    """Queue that it fills."""


def label_of(function: Callable[..., Any] | Operator) -> str:
    """Return the name of a function or an operator for drawings and errors."""
    if isinstance(function, Operator):
        return function.label
    if isinstance(function, partial):
        return label_of(function.func)
    name = function.__name__ if isinstance(function, FunctionType | type) else type(function).__name__
    return "function" if name == "<lambda>" else name
