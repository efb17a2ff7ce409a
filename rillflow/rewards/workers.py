"""RewardWorkers: score rows in children, whatever errors or hangs the function has; sum several functions.

    score(rows) ──────── one key, until it is finished ──┐
    begin(key, rows) ──> keys ──> CallScheduler ──> children ──> Score per row ──> sum over functions
    turn(wait_s) <────── keys that are finished ─────────┘

    consumes      the answers of the children, during ``turn`` and ``score`` only
    waits for     poll over every child's pipes, until the nearest deadline
    unblocked by  an answer, the end of a child, a deadline
    produces      one Score per row, in order
    bound         of ``score`` with no other key begun: start of the first children (60 s at most) + timeout_s
                  + RETRIES x (timeout_s + start_s), with start_s the longest load time of the file in the
                  meantime, + the end of a child (20 s at most)
                  of ``turn``: wait_s + the end of the children that are past their limit
                  of a key from its first call on: that of ``score``, if ``turn`` is called; it waits for its
                  first call only while earlier keys hold all children
                  of processes, for each function: reward.workers children; max(reward.workers,
                  MORE_CHILDREN) more while others wait for late keys (see scheduler.py); each child with
                  reward.memory_bytes at most
    shuts down    ``close``; the driver's death ends every child, kill -9 included

A function that must see the whole batch needs a single worker, and ``score``; with ``begin`` it sees the rows
of one key per call. See docs/design/rewards.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import next_answers
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import Columns, FunctionPath, Parameters, Text
from rillflow.rewards.logged import merged
from rillflow.rewards.outcome import FAILURES, Outcome, Score
from rillflow.rewards.scheduler import CallScheduler, Key


class WeightedWorkers(ExitStack):
    """Children of several functions, whose scores are summed; a context manager, used from one thread.

    The functions score the same rows side by side. A function that abstains is left out of a row's sum; if
    all abstain, the row has no score. A timeout or an error of one function is the row's outcome: a sum
    without it would be another reward.

    Args:
        functions: reward functions with their weights.
        config: time limit, memory and number of children of each.
        level: strongest isolation to try; a function that runs text gets a sandbox in any case.
    """

    def __init__(
        self, functions: Sequence[FunctionPath], config: RewardConfig, *, level: Level = Level.NONE
    ) -> None:
        super().__init__()
        self._functions, self._calls = functions, config.workers
        with ExitStack() as started:
            self._schedulers = [
                started.enter_context(CallScheduler(each, config, level=level)) for each in functions
            ]
            self.push(started.pop_all())

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
        batch = object()
        with self._abandoned_on_error():
            self.begin(batch, prompts, completions, columns, calls=self._calls)
            if batch not in self._finished():
                self._run(math.inf, lambda: batch in self._finished())
        return self._taken(batch)

    def begin(
        self,
        key: Key,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        columns: Columns,
        *,
        calls: int = 1,
    ) -> None:
        """Queue rows to be scored in one call; ``turn`` returns their scores.

        Args:
            key: name of the rows, which differs from those of all rows that ``turn`` has not returned.
            prompts: [B].
            completions: [B]; see ``score``.
            columns: see ``score``.
            calls: number of calls, of neighbouring rows, among which the rows are divided.

        Raises:
            RewardError: the workers are closed.
        """
        everything = {"prompts": prompts, "completions": completions, **columns}
        for each in self._schedulers:
            each.begin(key, everything, len(prompts), calls)

    def cancel(self, key: Key) -> None:
        """Forget rows that ``turn`` has not returned; a child that runs their call ends at once.

        Raises:
            KeyError: there are no such rows.
        """
        for each in self._schedulers:
            each.cancel(key)

    def turn(self, wait_s: float) -> list[tuple[Key, list[Score]]]:
        """Process answers until some keys are finished, but at most ``wait_s`` seconds; return these keys.

        Nothing is sent or read between two calls, and no time limit ends: call it again soon. After an error
        all keys are forgotten.

        Args:
            wait_s: longest wait in seconds; 0 processes the answers that are there.

        Raises:
            RewardError: see ``score``.
        """
        with self._abandoned_on_error():
            self._run(
                wait_s, lambda: bool(self._finished()) or all(each.is_idle for each in self._schedulers)
            )
        return [(key, self._taken(key)) for key in self._finished()]

    def _run(self, wait_s: float, is_over: Callable[[], bool]) -> None:
        """Process answers and send calls, once or until ``is_over()``, but at most ``wait_s`` seconds."""
        moment = time.monotonic()
        until = moment + wait_s
        while True:
            owners = {child: each for each in self._schedulers for child in each.children}
            for child, answer in next_answers([*owners], moment):
                owners[child].hear(child, answer)
            for each in self._schedulers:
                each.dispatch()
            if is_over() or time.monotonic() >= until:
                return
            moment = min([until, *(each.due() for each in self._schedulers)])

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Forget all keys if the block raises or is interrupted."""
        with ExitStack() as undo:
            for each in self._schedulers:
                undo.callback(each.abandon)
            yield
            undo.pop_all()

    def _finished(self) -> list[Key]:
        """Return the keys that all functions have scored."""
        first, *others = self._schedulers
        return [key for key in first.finished if all(key in each.finished for each in others)]

    def _taken(self, key: Key) -> list[Score]:
        """Return the scores of a finished key, and forget the key."""
        each = [scheduler.finished.pop(key) for scheduler in self._schedulers]
        return [self._summed(scores) for scores in zip(*each, strict=True)]

    def _summed(self, scores: Sequence[Score]) -> Score:
        if len(scores) == 1 and self._functions[0].weight == 1:
            return scores[0]
        pairs = zip(self._functions, scores, strict=True)
        total = summed({function.name: (function.weight, score) for function, score in pairs})
        return replace(total, logged=merged(score.logged for score in scores))


class RewardWorkers(WeightedWorkers):
    """Children that score rows with one function, whatever its weight.

    Example:
        with RewardWorkers(parse_function("rewards.py:exact", base), config.reward) as workers:
            scores = workers.score(prompts, completions, {"answer": answers})
    """

    def __init__(self, function: FunctionPath, config: RewardConfig, *, level: Level = Level.NONE) -> None:
        super().__init__((replace(function, weight=1.0),), config, level=level)
        (self._scheduler,) = self._schedulers

    @property
    def shortcomings(self) -> str:
        """Guarantees that this machine lacks, with reasons; known after the first score."""
        return self._scheduler.shortcomings

    @property
    def level(self) -> Level:
        """Isolation level of this machine; known after the first score."""
        return self._scheduler.level

    def load(self) -> Parameters:
        """Wait until a child has loaded the file, and return the function's parameters.

        Raises:
            RewardError: the function cannot be loaded.
        """
        with self._abandoned_on_error():
            self._run(math.inf, lambda: self._scheduler.parameters is not None)
        assert self._scheduler.parameters is not None, "the wait for the parameters is over"
        return self._scheduler.parameters


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
