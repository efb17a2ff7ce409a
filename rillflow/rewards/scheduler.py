"""CallScheduler: the calls of one function, on the children that run it. A state machine that never waits.

    begin ── rows of a key ──> calls, at most one per child of the key ──┬── scores ─────────> finished
                                                                         └── raised, died, silent:
         each row of that call alone, a short limit ──┬── score, error ──────────────────────> finished
                                                      └── silent ──> again, the full limit ──> finished

A key is a group, scored in one call, or a batch, scored in one call per worker. A free child takes a call of
the oldest key, and there is a child for every group whose first call has begun. So the retries of a failed
group do not wait for younger groups.

A key is late when its first call began longer than a second, and than four usual calls, ago. While other keys
wait, each late key is compensated by one further child. There are at most as many further children as
workers, or MORE_CHILDREN if that is more. They end when fewer keys are late.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Generator, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import Answer, Child, State
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import Columns, FunctionPath, Parameters, call_frame, choose
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.text_execution import is_shut_in

RETRIES = 4
"""Number of timeouts, with their restarts, that the rows of a key's failed calls share."""
MORE_CHILDREN = 3
"""Number of further children that late keys may get even if there are fewer workers."""
PATIENCE_S = 1.0
"""Shortest time in seconds after which a running key is late."""
PATIENCE_CALLS = 4
"""A running key is late after this many times the median time of a call."""

_LEAST_LIMIT_S = 0.05
_REASON_CHARACTERS = 300
_TIMED_CALLS = 64
_NOT_TRIED = Score(
    outcome=Outcome.TIMEOUT,
    message=f"no time was left: the rows of failed calls share {RETRIES} timeouts",
)

logger = logging.getLogger(__name__)

Key = Hashable
"""Name of rows that are scored together."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    rows: Sequence[int]
    """Rows to score."""
    limit_s: float
    """Time limit in seconds."""


_Answers = list[tuple[_Call, Answer]]
_Passes = Generator[Sequence[_Call], _Answers, list[Score]]
"""Yields the calls of each pass, receives their answers, and returns the scores of all rows."""


@dataclass(kw_only=True, eq=False)
class _Job:
    """Rows of one key."""

    key: Key
    """Its name."""
    columns: Columns
    """Values by name, including those that the function does not take."""
    num_rows: int
    """Number of rows."""
    width: int
    """Largest number of children that it uses at once."""
    passes: _Passes = field(init=False)
    """Its calls, pass by pass."""
    waiting: deque[_Call] = field(default_factory=deque)
    """Calls of this pass that have not begun."""
    answers: _Answers = field(default_factory=list)
    """Answers of this pass."""
    num_running: int = 0
    """Number of calls that run."""
    began: float = math.inf
    """Time of its first call."""
    retried: float = math.inf
    """Time at which its rows began to be scored alone."""
    start_s: float = 0.0
    """Longest time in seconds that a child, ended since then, took to load the file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Running:
    job: _Job
    """The job whose call runs."""
    call: _Call
    """The call."""
    began: float
    """Time when it was sent."""


class CallScheduler(ExitStack):
    """Children of one function, and its calls; a context manager, used from one thread.

    Args:
        function: the function that every child loads.
        config: time limit, memory and number of children.
        level: strongest isolation to try; a function that runs text gets a sandbox in any case.
    """

    def __init__(self, function: FunctionPath, config: RewardConfig, *, level: Level) -> None:
        super().__init__()
        self.callback(self._stop)
        self.children: list[Child] = []
        self.finished: dict[Key, list[Score]] = {}
        self.parameters: Parameters | None = None
        self.shortcomings, self.level = "", Level.NONE
        self._function = function
        self._config = config
        is_weak = is_shut_in(function, config.sandbox, unless_harmless=True) and not level.is_sandbox
        self._wanted = Level.FULL if is_weak else level
        self._jobs: dict[Key, _Job] = {}
        self._running: dict[Child, _Running] = {}
        self._times: deque[float] = deque(maxlen=_TIMED_CALLS)
        self._closed = False
        try:
            for _ in range(config.workers):
                self.children.append(self._start())
        except RewardError:
            self.close()
            raise

    def _stop(self) -> None:
        """End every child, even if ending one of them fails."""
        self._closed = True
        with ExitStack() as stack:
            for child in self.children:
                stack.callback(child.stop)

    def _require_open(self) -> None:
        if self._closed:
            raise RewardError(f"{self._function} was called after close", why="its processes have ended")

    @property
    def is_idle(self) -> bool:
        """Whether every key is finished."""
        return not self._jobs

    def begin(self, key: Key, columns: Columns, num_rows: int, calls: int) -> None:
        """Queue the rows of a key.

        Args:
            key: name of the rows; no other rows that are not taken from ``finished`` may have it.
            columns: values by name, each [B].
            num_rows: B.
            calls: number of calls, of neighbouring rows, among which the rows are divided.

        Raises:
            RewardError: the children have ended.
        """
        self._require_open()
        assert key not in self._jobs and key not in self.finished, f"{key} is not taken"
        if not num_rows:
            self.finished[key] = []
            return
        job = _Job(key=key, columns=columns, num_rows=num_rows, width=min(calls, num_rows))
        job.passes = self._scoring(job)
        job.waiting.extend(next(job.passes))
        self._jobs[key] = job

    def cancel(self, key: Key) -> None:
        """Forget the rows of a key; children that run its calls end at once.

        Raises:
            KeyError: the key is unknown, or its scores were taken.
        """
        if self.finished.pop(key, None) is None:
            self._end_calls(self._jobs.pop(key))

    def abandon(self) -> None:
        """Cancel every key, because an error may have lost an answer."""
        for key in [*self._jobs, *self.finished]:
            self.cancel(key)

    def _end_calls(self, job: _Job) -> None:
        for child in [child for child, running in self._running.items() if running.job is job]:
            del self._running[child]
            child.stop()

    def hear(self, child: Child, answer: Answer) -> None:
        """Process the answer of a child's call."""
        running = self._running.pop(child, None)
        if running is None:
            return  # the child has ended between two calls
        if isinstance(answer, list):
            self._times.append(time.monotonic() - running.began)
        running.job.num_running -= 1
        running.job.answers.append((running.call, answer))
        self._settle(running.job)

    def dispatch(self) -> None:
        """Start and end children as needed, and send calls to those that are free.

        Raises:
            RewardError: a column that the function needs is missing, or a process cannot start; or the
                children have ended.
        """
        self._require_open()
        for begun in [*self._jobs.values()]:
            while begun.waiting and time.monotonic() >= self._until(begun):
                begun.answers.extend((call, _NOT_TRIED) for call in begun.waiting)
                begun.waiting.clear()
                self._settle(begun)
        self._restock()
        self._learn()
        for child in self.children:
            job = self._next()
            if job is not None and child.state is State.IDLE:
                self._send(child, job)

    def due(self) -> float:
        """Return the time of the next ``dispatch`` that no event of a child announces."""
        times = [self._until(job) for job in self._jobs.values() if job.waiting]
        if self._is_short() and len(self.children) < self._config.workers + self._most_more:
            patience = self._patience_s
            times += [job.began + patience for job in self._jobs.values() if not self._is_late(job)]
        return min(times, default=math.inf)

    def _scoring(self, job: _Job) -> _Passes:
        """Score the rows in ``width`` calls, and those of a failed call alone."""
        scores: dict[int, Score] = {}
        failed: dict[int, str] = {}
        timeout_s = self._config.timeout_s
        cuts = [job.num_rows * share // job.width for share in range(job.width + 1)]
        shares = [_Call(rows=range(*pair), limit_s=timeout_s) for pair in itertools.pairwise(cuts)]
        for call, answer in (yield shares):
            if isinstance(answer, Score) and len(call.rows) > 1:
                reason = f"the call of {len(call.rows)} rows {answer.message}"[:_REASON_CHARACTERS]
                logger.warning("%s: %s; its rows are now scored one by one", self._function, reason)
                failed.update(dict.fromkeys(call.rows, reason))
            else:
                scores.update(_by_row(call, answer))
        if failed:
            # A short limit first, so that slow rows leave the others time.
            short_s = min(timeout_s, max(_LEAST_LIMIT_S, RETRIES * timeout_s / 2 / len(failed)))
            silent = sorted(failed)
            job.retried = time.monotonic()
            for limit_s in dict.fromkeys((short_s, timeout_s)):
                for call, answer in (yield [_Call(rows=(row,), limit_s=limit_s) for row in silent]):
                    scores.update(_by_row(call, answer))
                silent = [row for row in silent if scores[row].outcome is Outcome.TIMEOUT]
        for row, reason in failed.items():
            if scores[row].outcome is Outcome.SCORE:
                scores[row] = replace(scores[row], message=f"scored alone: {reason}")
        return [scores[row] for row in range(job.num_rows)]

    def _settle(self, job: _Job) -> None:
        """Queue the calls of the job's next pass once all calls of this pass are answered."""
        while not job.waiting and not job.num_running:
            answers, job.answers = job.answers, []
            try:
                job.waiting.extend(job.passes.send(answers))
            except StopIteration as end:
                self.finished[job.key] = end.value
                del self._jobs[job.key]
                return

    def _until(self, job: _Job) -> float:
        """Return the time at which calls of a job that have not begun time out."""
        slowest_s = max(job.start_s, *(child.start_s for child in self.children))
        return job.retried + RETRIES * (self._config.timeout_s + slowest_s)

    @property
    def _most_more(self) -> int:
        return max(self._config.workers, MORE_CHILDREN)

    @property
    def _patience_s(self) -> float:
        median_s = sorted(self._times)[len(self._times) // 2] if self._times else 0.0
        return max(PATIENCE_S, PATIENCE_CALLS * median_s)

    def _is_late(self, job: _Job) -> bool:
        return time.monotonic() >= job.began + self._patience_s

    def _next(self) -> _Job | None:
        """Return the first job with a call that may begin."""
        for job in self._jobs.values():
            if job.waiting and job.num_running < job.width:
                return job
        return None

    def _is_short(self) -> bool:
        """Return whether a call waits for a child, and none is free or starting."""
        free = (State.IDLE, State.STARTING)
        return self._next() is not None and not any(child.state in free for child in self.children)

    def _restock(self) -> None:
        """Replace ended children, and keep a further one for each late job that others wait for."""
        jobs = self._jobs.values()
        most = max(
            self._config.workers + min(self._most_more, sum(map(self._is_late, jobs))),
            sum(job.began < math.inf for job in jobs),
        )
        for child in [*self.children]:
            if child.state is State.ENDED:
                for job in jobs:
                    if job.retried < math.inf:
                        job.start_s = max(job.start_s, child.start_s)
            if len(self.children) > most and child.state in (State.IDLE, State.ENDED):
                child.stop()
                self.children.remove(child)
            elif child.state is State.ENDED:
                self.children[self.children.index(child)] = self._start()
        if len(self.children) < most and self._is_short():
            self.children.append(self._start())

    def _learn(self) -> None:
        """Store what the first child that has loaded the file reports."""
        if self.parameters is not None:
            return
        for child in self.children:
            if child.parameters is not None:
                self.parameters, self.level, self.shortcomings = (
                    child.parameters,
                    child.level,
                    child.shortcomings,
                )
                if self.shortcomings:
                    logger.warning("%s: %s", self._function, self.shortcomings)
                return

    def _send(self, child: Child, job: _Job) -> None:
        """Begin the job's next call on a free child."""
        assert self.parameters is not None, "an idle child has reported its parameters"
        columns = choose(job.columns, self.parameters, self._function)
        now, call = time.monotonic(), job.waiting.popleft()
        job.began = min(job.began, now)
        limit_s = min(call.limit_s, self._until(job) - now)
        child.send(call_frame(columns, call.rows), limit_s=limit_s)
        job.num_running += 1
        self._running[child] = _Running(job=job, call=call, began=now)

    def _start(self) -> Child:
        return Child(self._function, memory_bytes=self._config.memory_bytes, level=self._wanted)


def _by_row(call: _Call, answer: Answer) -> dict[int, Score]:
    """Return a score for every row of a call; all rows share a failure."""
    if isinstance(answer, Score):
        return dict.fromkeys(call.rows, answer)
    return dict(zip(call.rows, answer, strict=True))
