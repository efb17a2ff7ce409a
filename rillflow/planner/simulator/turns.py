"""Turns: the stages of several steps on pools that take them in order; a state that events move on.

begin(step) ──────> stages wait for what they read ─ all arrived, pool free, their turn ─> Start
ended(step, stage) ─┘ the pool is free, its readers' inputs are on their way

consumes        steps that begin, stages that ended
waits for       the edges into a stage, and its pool: in the order of steps, then of the program
unblocked by    ``ended`` of the stages it reads, and of the one before it on its pool
produces        ``Start``: which stage begins when; what it takes is the caller's to know

One step by itself gives the same times as ``planner.schedule``, which says them in closed form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """An edge into a stage."""

    source: int
    """The stage it comes from."""
    seconds: float
    """What it takes on its way."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A stage as pools take it."""

    stage: int
    """Its index in the graph."""
    name: str
    """Its name in the graph."""
    pool: str
    """Whose devices it holds; a name of its own where it holds none."""
    seconds: float
    """What it takes; of generation, on paper."""
    inputs: tuple[Arrival, ...]
    """The edges into it; what a step is given is there from its beginning."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A stage that begins."""

    step: int
    """The step it belongs to."""
    task: Task
    """The stage."""
    start_s: float
    """When."""


@dataclass(kw_only=True, slots=True)
class _Wait:
    missing: int
    arrived_s: float


class Turns:
    """Stages in turn.

    Args:
        tasks: of a step, in the order of the program.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.stage: task for task in tasks}
        self._readers: dict[int, list[tuple[int, float]]] = {}
        for task in tasks:
            for edge in task.inputs:
                self._readers.setdefault(edge.source, []).append((task.stage, edge.seconds))
        self._waits: dict[tuple[int, int], _Wait] = {}
        self._queues: dict[str, deque[tuple[int, int]]] = {task.pool: deque() for task in tasks}
        self._free_s: dict[str, float | None] = dict.fromkeys(self._queues, 0.0)
        self._left: dict[int, int] = {}

    def is_free(self, pool: str) -> bool:
        """Whether a pool has no stage under way and none that waits."""
        return self._free_s[pool] is not None and not self._queues[pool]

    def is_over(self, step: int) -> bool:
        """Whether all stages of a step have ended."""
        return not self._left[step]

    def begin(self, step: int, now_s: float, *, without: Set[int] = frozenset()) -> list[Start]:
        """Let a step begin, with all its stages but some; what stages outside the tasks made is there."""
        tasks = [task for task in self._tasks.values() if task.stage not in without]
        self._left[step] = len(tasks)
        touched = []
        for task in tasks:
            outside = [edge.seconds for edge in task.inputs if edge.source not in self._tasks]
            self._waits[step, task.stage] = _Wait(
                missing=len(task.inputs) - len(outside), arrived_s=now_s + max(outside, default=0.0)
            )
            self._queues[task.pool].append((step, task.stage))
            touched.append(task.pool)
        return [start for pool in dict.fromkeys(touched) for start in self._next(pool)]

    def ended(self, step: int, stage: int, now_s: float) -> list[Start]:
        """Note that a stage has ended; what begins by that."""
        pool = self._tasks[stage].pool
        self._free_s[pool] = now_s
        self._left[step] -= 1
        touched = [pool]
        for reader, seconds in self._readers.get(stage, ()):
            if (step, reader) in self._waits:
                wait = self._waits[step, reader]
                wait.missing -= 1
                wait.arrived_s = max(wait.arrived_s, now_s + seconds)
                touched.append(self._tasks[reader].pool)
        return [start for pool in dict.fromkeys(touched) for start in self._next(pool)]

    def _next(self, pool: str) -> list[Start]:
        """The stage whose turn it is, if all it reads is on its way or there."""
        queue, free_s = self._queues[pool], self._free_s[pool]
        if free_s is None or not queue or self._waits[queue[0]].missing:
            return []
        step, stage = queue.popleft()
        self._free_s[pool] = None
        start = max(self._waits.pop((step, stage)).arrived_s, free_s)
        return [Start(step=step, task=self._tasks[stage], start_s=start)]
