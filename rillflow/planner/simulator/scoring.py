"""Scoring: stages that take groups one by one, as they complete, on devices or hosts of their own.

group complete ─ travels ─> first come, first served ─> scored: it may be trained
                              one server for each pool, and for each function beside the devices

consumes        complete groups, in the order of their completion
waits for       the server of the stage, and the stages whose results it reads
unblocked by    time alone: when a group is scored is known at once
produces        when a group is scored; the server's spans

A stage is taken out of the batch and fed this way if it scores, reads nothing but what groups bring, and
shares its pool only with stages of that kind. A group takes its share of the batch's seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.planner.schedule import BESIDE
from rillflow.planner.simulator.book import WHOLE, Book
from rillflow.planner.simulator.layout import Layout
from rillflow.planner.simulator.result import Cause
from rillflow.planner.simulator.turns import Task
from rillflow.planner.work import Work


def by_group(layout: Layout) -> list[Task]:
    """The stages that take groups one by one, in the order of the program."""
    problem = layout.problem
    rest = [task for task in layout.tasks if task.stage not in layout.generating]
    scoring = [
        task for task in rest if problem.work(problem.graph.stages[task.stage]) in (Work.SCORE, Work.FUNCTION)
    ]
    while True:
        known = {-1, *layout.generating, *(task.stage for task in scoring)}
        found = {task.stage for task in scoring}
        mixed = {task.pool for task in rest if task.stage not in found} - {BESIDE}
        kept = [
            task
            for task in scoring
            if task.pool not in mixed and all(edge.source < 0 or edge.source in known for edge in task.inputs)
        ]
        if len(kept) == len(scoring):
            return kept
        scoring = kept


class Scoring:
    """Servers that score groups.

    Args:
        tasks: the stages, in the order of the program.
        prompts: groups that share a task's seconds.
        book: where their spans are written.
    """

    def __init__(self, tasks: Sequence[Task], *, prompts: int, book: Book) -> None:
        self._tasks = tasks
        self._prompts = prompts
        self._book = book
        self._free_s = {self._server(task): 0.0 for task in tasks}

    def score(self, now_s: float, step: int) -> float:
        """When a group that is complete now will be scored."""
        ends: dict[int, float] = {}
        for task in self._tasks:
            server = self._server(task)
            arrived = max(
                (ends.get(edge.source, now_s) + edge.seconds / self._prompts for edge in task.inputs),
                default=now_s,
            )
            start = max(arrived, self._free_s[server])
            end = start + task.seconds / self._prompts
            self._book.idle(task.pool, WHOLE, Cause.DATA, step, self._free_s[server], start)
            self._book.work(task.pool, WHOLE, task.name, step, start, end)
            self._free_s[server] = ends[task.stage] = end
        return max(ends.values(), default=now_s)

    def close(self, end_s: float, step: int) -> None:
        """Write down that the pools waited until the end."""
        for task in self._tasks:
            free_s = self._free_s[self._server(task)]
            self._book.idle(task.pool, WHOLE, Cause.DATA, step, free_s, end_s)
            self._free_s[self._server(task)] = max(free_s, end_s)

    def _server(self, task: Task) -> str:
        return task.pool if task.pool != BESIDE else task.name
