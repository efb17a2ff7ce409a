"""Context: what the operators of one run of a plan share, and how one says that it has no item now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

from rillflow.records.metrics import Metrics, Sum, merge_metrics
from rillflow_classic.worker_set import WorkerCall, WorkerSet, check_calls

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

    def __or__(self, other: NotReady) -> NotReady:
        """Return the state of a plan that waits for either."""
        return NotReady(
            calls=self.calls + other.calls,
            polls=self.polls or other.polls,
            why=tuple(dict.fromkeys(self.why + other.why)),
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
    """Start of the first call, on ``perf_counter``."""
    spent_s: float = 0.0
    """Total seconds of the operator's calls."""


@dataclass
class PlanContext:
    """What the operators of one run of a plan share; a worker has a context of its own for its transforms."""

    worker: Any = None
    """The object of the worker that runs these operators; None in the controller's process."""
    source: SourceWorker | None = None
    """Where the present item comes from."""
    looks: bool = False
    """Whether other flows go on while one waits for its workers; otherwise a gather waits in place."""
    moves: int = 0
    """Number of items that operators have moved and workers have sent, to notice a plan that stands still."""
    metrics: Metrics = field(default_factory=dict)
    """Recorded since the last ``take_metrics``."""
    notes: list[str] = field(default_factory=list)
    """What happened that a reader of the run should know: lost workers."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """Objects that several operators of this run use, by a key of their own."""
    _work: dict[str, OperatorWork] = field(default_factory=dict)
    _sent: list[WorkerCall] = field(default_factory=list)

    def record(self, metrics: Metrics) -> None:
        """Add metrics to the next item of ``report_metrics``."""
        self.metrics = merge_metrics([self.metrics, metrics])

    def take_metrics(self) -> Metrics:
        """Return the recorded metrics, and begin anew."""
        found, self.metrics = self.metrics, {}
        return found

    def worked(self, label: str, began_s: float) -> None:
        """Count the time of an operator's call that began at a time of ``perf_counter`` and ends now."""
        work = self._work.setdefault(label, OperatorWork(began_s=began_s))
        work.spent_s += time.perf_counter() - began_s

    def take_work(self) -> dict[str, OperatorWork]:
        """Return the work of every operator by label, and begin anew."""
        found, self._work = self._work, {}
        return found

    def lost(self, source: SourceWorker, reason: Exception) -> None:
        """Record that a worker is left out from now on."""
        self.notes.append(f"worker {source.index} of {source.workers.pool} is left out: {reason}")
        self.record({"actor/lost/sum": Sum(value=1.0)})
        _log.info("%s", self.notes[-1])

    def sent(self, calls: Iterable[WorkerCall]) -> None:
        """Keep calls whose results nobody reads; see ``check_calls``."""
        self._sent = check_calls([*self._sent, *calls])


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
