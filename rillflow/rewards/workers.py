"""RewardWorkers: score rows in children, whatever errors or hangs the function has.

    rows ── split over workers ──> one call each ──┬── scores ───────────────────────────> done
                                                   └── raised, died, silent ──> its rows separately:
         each row alone, a short limit ──┬── score, error ─────────────────────────────> done
                                         └── silent ──> again, the full limit ──> score, error or timeout

    consumes      the answers of the children
    waits for     poll over every child's pipes, until the nearest deadline
    unblocked by  an answer, the end of a child, a deadline
    produces      one Score per row, in order
    bound         start of the first children (60 s at most) + timeout_s + RETRIES x (timeout_s + start_s),
                  with start_s the longest load time of the file in the meantime, + the end of a child
                  (20 s at most)
    shuts down    ``close``; the driver's death ends every child, kill -9 included

A function that must see the whole batch needs a single worker; see docs/design/rewards.md.
"""

from __future__ import annotations

import itertools
import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rillflow.errors import RewardError
from rillflow.rewards.child import Answer, Child, Failure, State
from rillflow.rewards.columns import Columns, Parameters, Text, call_frame, choose
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.isolation_levels import Level
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.sandbox import Visible
from rillflow.rewards.supervised import Containment
from rillflow.rewards.text_execution import is_shut_in, visible_to

RETRIES = 4
"""Number of timeouts, with their restarts, that the rows of failed calls share."""

_LEAST_LIMIT_S = 0.05
_REASON_CHARACTERS = 300
_NOT_TRIED = Failure(
    outcome=Outcome.TIMEOUT,
    message=f"no time was left: the rows of failed calls share {RETRIES} timeouts",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Call:
    rows: Sequence[int]
    """Rows to score."""
    limit_s: float
    """Time limit in seconds."""


@dataclass(frozen=True, kw_only=True)
class _Reply:
    rows: Sequence[int]
    """Rows of the call."""
    answer: Answer
    """Their scores, or the failure."""

    def by_row(self) -> dict[int, Score]:
        """Return a score for every row; all rows share a failure."""
        if isinstance(self.answer, Failure):
            return dict.fromkeys(self.rows, Score(outcome=self.answer.outcome, message=self.answer.message))
        return dict(zip(self.rows, self.answer, strict=True))


class RewardWorkers(ExitStack):
    """Children that score rows; a context manager, used from one thread.

    Args:
        function: the function that every child loads.
        config: time limit, memory and number of children.
        containment: strongest containment of a child's processes to try.

    Example:
        with RewardWorkers(parse_function("rewards.py:exact", base), config.reward) as workers:
            scores = workers.score(prompts, completions, {"answer": answers})
    """

    def __init__(
        self,
        function: FunctionPath,
        config: RewardConfig,
        *,
        containment: Containment = Containment.NAMESPACE,
    ) -> None:
        super().__init__()
        self.callback(self._stop)
        self._function = function
        self._config = config
        self._containment = containment
        if is_shut_in(function, config.sandbox) and not containment.is_sandbox:
            self._containment = Containment.SANDBOX
        self._visible = visible_to(function) if self._containment.is_sandbox else Visible()
        self._parameters: Parameters | None = None
        self._children: list[Child] = []
        self._start_s = 0.0
        self._closed = False
        try:
            for _ in range(config.workers):
                self._children.append(self._start())
        except RewardError:
            self.close()
            raise

    def _stop(self) -> None:
        """End every child, even if ending one of them fails."""
        self._closed = True
        with ExitStack() as stack:
            for child in self._children:
                stack.callback(child.stop)

    @property
    def shortcomings(self) -> str:
        """Guarantees that this machine lacks, with reasons; known after the first score."""
        return next((child.shortcomings for child in self._children if child.shortcomings), "")

    @property
    def level(self) -> Level:
        """Isolation level of this machine; known after the first score."""
        return max((child.level for child in self._children), key=[*Level][::-1].index)

    def score(self, prompts: Sequence[Text], completions: Sequence[Text], columns: Columns) -> list[Score]:
        """Score every row, in order; the function gets copies of the arguments.

        Args:
            prompts: [B].
            completions: [B]; for chat prompts each is a list of one assistant message.
            columns: JSON values by name, each [B]; the function gets those it has a parameter for.

        Raises:
            RewardError: the function cannot be loaded, needs a missing column, or did not return one entry
                per row.
        """
        if self._closed:
            raise RewardError(f"{self._function} was called after close", why="its processes have ended")
        everything = {"prompts": prompts, "completions": completions, **columns}
        if not prompts:
            return []
        try:
            return self._score(len(prompts), choose(everything, self.load(), self._function))
        finally:
            for child in self._children:
                if child.state is State.BUSY:
                    child.stop()

    def _score(self, num_rows: int, columns: Columns) -> list[Score]:
        scores: dict[int, Score] = {}
        failed: dict[int, str] = {}
        for reply in self._run(self._shares(num_rows), columns):
            if isinstance(reply.answer, Failure) and len(reply.rows) > 1:
                reason = f"the call of {len(reply.rows)} rows {reply.answer.message}"[:_REASON_CHARACTERS]
                logger.warning("%s: %s; its rows are now scored one by one", self._function, reason)
                failed.update(dict.fromkeys(reply.rows, reason))
            else:
                scores.update(reply.by_row())
        if failed:
            for row, score in self._apart(sorted(failed), columns).items():
                told = replace(score, message=f"scored alone: {failed[row]}")
                scores[row] = told if score.outcome is Outcome.SCORE else score
            for slot in range(len(self._children)):
                self._alive(slot)  # ended children are restarted before the next batch
        return [scores[row] for row in range(num_rows)]

    def _shares(self, num_rows: int) -> list[_Call]:
        """Return one call per worker, of neighbouring rows, spread evenly."""
        shares = min(self._config.workers, num_rows)
        cuts = [num_rows * share // shares for share in range(shares + 1)]
        return [
            _Call(rows=range(start, stop), limit_s=self._config.timeout_s)
            for start, stop in itertools.pairwise(cuts)
        ]

    def _apart(self, rows: Sequence[int], columns: Columns) -> dict[int, Score]:
        """Score each row alone, with a short limit first, so that slow rows leave the others time."""
        timeout_s = self._config.timeout_s
        began, self._start_s = time.monotonic(), 0.0

        def until() -> float:
            return began + RETRIES * (
                timeout_s + max(self._start_s, *(child.start_s for child in self._children))
            )

        short_s = min(timeout_s, max(_LEAST_LIMIT_S, RETRIES * timeout_s / 2 / len(rows)))
        scores = self._alone(rows, columns, limit_s=short_s, until=until)
        if short_s < timeout_s:
            silent = [row for row, score in scores.items() if score.outcome is Outcome.TIMEOUT]
            scores.update(self._alone(silent, columns, limit_s=timeout_s, until=until))
        return scores

    def _alone(
        self, rows: Sequence[int], columns: Columns, *, limit_s: float, until: Callable[[], float]
    ) -> dict[int, Score]:
        scores: dict[int, Score] = {}
        for reply in self._run([_Call(rows=(row,), limit_s=limit_s) for row in rows], columns, until):
            scores.update(reply.by_row())
        return scores

    def _run(
        self, calls: Sequence[_Call], columns: Columns, until: Callable[[], float] = lambda: math.inf
    ) -> list[_Reply]:
        """Give each call to a free child; calls not begun by ``until()`` time out."""
        waiting = deque(calls)
        running: dict[Child, _Call] = {}
        replies: list[_Reply] = []
        while waiting or running:
            if time.monotonic() >= until():
                replies.extend(_Reply(rows=call.rows, answer=_NOT_TRIED) for call in waiting)
                waiting.clear()
            for slot in range(len(self._children) if waiting else 0):
                child = self._alive(slot)
                if waiting and child.state is State.IDLE:
                    call = running[child] = waiting.popleft()
                    limit_s = min(call.limit_s, until() - time.monotonic())
                    frame = call_frame(columns, call.rows)
                    child.send(frame, num_rows=len(call.rows), limit_s=limit_s)
            for child, answer in self._turn(until()):
                if child in running:
                    replies.append(_Reply(rows=running.pop(child).rows, answer=answer))
        return replies

    def _turn(self, until: float) -> list[tuple[Child, Answer]]:
        """Wait for the next event; return the calls that it finished."""
        children = [child for child in self._children if child.state is not State.ENDED]
        poller = select.poll()
        owners: dict[int, Child] = {}
        for child in children:
            for descriptor, mask in child.events().items():
                poller.register(descriptor, mask)
                owners[descriptor] = child
        wait_s = min([until, *(child.deadline for child in children)]) - time.monotonic()
        moved = {owners[descriptor] for descriptor, _ in poller.poll(max(0, math.ceil(wait_s * 1000)))}
        ended = [(child, answer) for child in moved if (answer := child.advance()) is not None]
        late = [child for child in children if child.deadline <= time.monotonic()]
        return [*ended, *((child, child.expire()) for child in late)]

    def _alive(self, slot: int) -> Child:
        """Return the child of this slot, restarted if it has ended."""
        if self._children[slot].state is State.ENDED:
            self._start_s = max(self._start_s, self._children[slot].start_s)
            self._children[slot] = self._start()
        return self._children[slot]

    def _start(self) -> Child:
        return Child(
            self._function,
            memory_bytes=self._config.memory_bytes,
            containment=self._containment,
            visible=self._visible,
        )

    def load(self) -> Parameters:
        """Wait until a child has loaded the file, and return the function's parameters.

        Raises:
            RewardError: the function cannot be loaded.
        """
        self._turn(until=time.monotonic())
        while self._parameters is None:
            for slot in range(len(self._children)):
                self._alive(slot)
            self._parameters = next((child.parameters for child in self._children if child.parameters), None)
            if self._parameters is None:
                self._turn(until=math.inf)
            elif self.shortcomings:
                logger.warning("%s: %s", self._function, self.shortcomings)
        return self._parameters
