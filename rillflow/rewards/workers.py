"""RewardWorkers: score rows in children, whatever errors or hangs the function has; sum several functions.

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
``WeightedWorkers`` runs several functions, each in children of its own, and sums their scores row by row.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rillflow.errors import RewardError
from rillflow.rewards.child import Answer, Child, State, next_answers
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import Columns, FunctionPath, Parameters, Text, call_frame, choose
from rillflow.rewards.outcome import FAILURES, Outcome, Score
from rillflow.rewards.sandbox import Level
from rillflow.rewards.text_execution import is_shut_in

RETRIES = 4
"""Number of timeouts, with their restarts, that the rows of failed calls share."""

_LEAST_LIMIT_S = 0.05
_REASON_CHARACTERS = 300
_NOT_TRIED = Score(
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


class RewardWorkers(ExitStack):
    """Children that score rows; a context manager, used from one thread.

    Args:
        function: the function that every child loads.
        config: time limit, memory and number of children.
        level: strongest isolation to try; a function that runs text gets a sandbox in any case.

    Example:
        with RewardWorkers(parse_function("rewards.py:exact", base), config.reward) as workers:
            scores = workers.score(prompts, completions, {"answer": answers})
    """

    def __init__(
        self,
        function: FunctionPath,
        config: RewardConfig,
        *,
        level: Level = Level.NONE,
    ) -> None:
        super().__init__()
        self.callback(self._stop)
        self._function = function
        self._config = config
        is_weak = is_shut_in(function, config.sandbox) and not level.is_sandbox
        self._wanted = Level.FULL if is_weak else level
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
        for call, answer in self._run(self._shares(num_rows), columns):
            if isinstance(answer, Score) and len(call.rows) > 1:
                reason = f"the call of {len(call.rows)} rows {answer.message}"[:_REASON_CHARACTERS]
                logger.warning("%s: %s; its rows are now scored one by one", self._function, reason)
                failed.update(dict.fromkeys(call.rows, reason))
            else:
                scores.update(_by_row(call, answer))
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
        scores: dict[int, Score] = {}
        silent = rows
        for limit_s in dict.fromkeys((short_s, timeout_s)):
            calls = [_Call(rows=(row,), limit_s=limit_s) for row in silent]
            for call, answer in self._run(calls, columns, until):
                scores.update(_by_row(call, answer))
            silent = [row for row in silent if scores[row].outcome is Outcome.TIMEOUT]
        return scores

    def _run(
        self, calls: Sequence[_Call], columns: Columns, until: Callable[[], float] = lambda: math.inf
    ) -> list[tuple[_Call, Answer]]:
        """Give each call to a free child; calls not begun by ``until()`` time out."""
        waiting = deque(calls)
        running: dict[Child, _Call] = {}
        answers: list[tuple[_Call, Answer]] = []
        while waiting or running:
            if time.monotonic() >= until():
                answers.extend((call, _NOT_TRIED) for call in waiting)
                waiting.clear()
            for slot in range(len(self._children) if waiting else 0):
                child = self._alive(slot)
                if waiting and child.state is State.IDLE:
                    call = running[child] = waiting.popleft()
                    limit_s = min(call.limit_s, until() - time.monotonic())
                    child.send(call_frame(columns, call.rows), limit_s=limit_s)
            for child, answer in next_answers(self._children, until()):
                if child in running:
                    answers.append((running.pop(child), answer))
        return answers

    def _alive(self, slot: int) -> Child:
        """Return the child of this slot, restarted if it has ended."""
        if self._children[slot].state is State.ENDED:
            self._start_s = max(self._start_s, self._children[slot].start_s)
            self._children[slot] = self._start()
        return self._children[slot]

    def _start(self) -> Child:
        return Child(self._function, memory_bytes=self._config.memory_bytes, level=self._wanted)

    def load(self) -> Parameters:
        """Wait until a child has loaded the file, and return the function's parameters.

        Raises:
            RewardError: the function cannot be loaded.
        """
        next_answers(self._children, until=time.monotonic())
        while self._parameters is None:
            for slot in range(len(self._children)):
                self._alive(slot)
            self._parameters = next((child.parameters for child in self._children if child.parameters), None)
            if self._parameters is None:
                next_answers(self._children)
            elif self.shortcomings:
                logger.warning("%s: %s", self._function, self.shortcomings)
        return self._parameters


class WeightedWorkers(ExitStack):
    """Children of several functions, whose scores are summed; a context manager, used from one thread.

    A function that abstains is left out of a row's sum; if all abstain, the row has no score. A timeout or an
    error of one function is the row's outcome: a sum without it would be another reward.

    Args:
        functions: reward functions with their weights.
        config: time limit, memory and number of children of each.
    """

    def __init__(self, functions: Sequence[FunctionPath], config: RewardConfig) -> None:
        super().__init__()
        self._functions = functions
        with ExitStack() as started:
            self._workers = [started.enter_context(RewardWorkers(each, config)) for each in functions]
            self.push(started.pop_all())

    def score(self, prompts: Sequence[Text], completions: Sequence[Text], columns: Columns) -> list[Score]:
        """Score every row, in order; see ``RewardWorkers.score``."""
        each = [workers.score(prompts, completions, columns) for workers in self._workers]
        return [self._summed(scores) for scores in zip(*each, strict=True)]

    def _summed(self, scores: Sequence[Score]) -> Score:
        if len(scores) == 1 and self._functions[0].weight == 1:
            return scores[0]
        pairs = zip(self._functions, scores, strict=True)
        return summed({function.name: (function.weight, score) for function, score in pairs})


def _by_row(call: _Call, answer: Answer) -> dict[int, Score]:
    """Return a score for every row of a call; all rows share a failure."""
    if isinstance(answer, Score):
        return dict.fromkeys(call.rows, answer)
    return dict(zip(call.rows, answer, strict=True))


def summed(said: Mapping[str, tuple[float, Score]]) -> Score:
    """Return the weighted sum of several scorers for a row, given weight and score by name; see
    ``WeightedWorkers``.
    """
    for name, (_, score) in said.items():
        if score.outcome in FAILURES:
            return Score(outcome=score.outcome, message=f"{name}: {score.message}")
    parts = {name: score.value for name, (_, score) in said.items() if score.value is not None}
    if not parts:
        return Score(outcome=Outcome.ABSTAIN)
    total = sum(said[name][0] * value for name, value in parts.items())
    return Score(outcome=Outcome.SCORE, value=total, parts=parts)
