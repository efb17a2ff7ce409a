"""Work of a fused problem as flat lists: one index for each task, for the inner loops of the search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule, FusedTask

NONE: Final = -1
"""Index that stands for no task."""
KINDS: Final = range(4)
"""Forward and backward of the ascending pipeline, then of the descending one: ``2 * pipeline + backward``."""


class FusedWork:
    """Tasks of a problem. The micro-batches of one kind on one device have consecutive indices."""

    def __init__(self, problem: FusedProblem) -> None:
        self.problem = problem
        batches = [each.micro_batches for each in problem.pipelines]
        self.count = 2 * problem.devices * sum(batches)
        self.first: list[list[int]] = []
        """First task of each kind, by device; a fifth entry ends the last kind."""
        for device in range(problem.devices):
            begin = 2 * device * sum(batches)
            sizes = (0, batches[0], 2 * batches[0], 2 * batches[0] + batches[1], 2 * sum(batches))
            self.first.append([begin + size for size in sizes])
        self.device = [device for device in range(problem.devices) for _ in range(2 * sum(batches))]
        self.seconds = [0.0] * self.count
        self.bytes = [0.0] * self.count
        """Bytes that a task keeps (+) or releases (-)."""
        self.before, self.after = [NONE] * self.count, [NONE] * self.count
        """The task of the same micro-batch that comes before, and after."""
        self.lag = [0.0] * self.count
        """Seconds between the end of ``before`` and the earliest start."""
        self.mirror = [NONE] * self.count
        """The same task in the problem reversed in time."""
        for pipeline in range(2):
            self._add_pipeline(pipeline)

    def _add_pipeline(self, pipeline: int) -> None:
        each = self.problem.pipelines[pipeline]
        for begin in range(0, self.problem.devices, each.stages):
            replica = range(begin, begin + each.stages)
            places = sorted(replica, key=lambda device: self.problem.stage(pipeline, device))
            for micro_batch in range(each.micro_batches):
                kinds = (2 * pipeline, 2 * pipeline + 1)
                there = [self.first[device][kinds[0]] + micro_batch for device in places]
                back = [self.first[device][kinds[1]] + micro_batch for device in places]
                turned = each.micro_batches - 1 - 2 * micro_batch
                for stage, (task, its_backward) in enumerate(zip(there, back, strict=True)):
                    self.seconds[task], self.seconds[its_backward] = (
                        each.forward_s[stage],
                        each.backward_s[stage],
                    )
                    self.bytes[task], self.bytes[its_backward] = (
                        each.activation_bytes,
                        -each.activation_bytes,
                    )
                    self.mirror[task], self.mirror[its_backward] = its_backward + turned, task + turned
                way = [*there, *reversed(back)]
                for place, (task, following) in enumerate(pairwise(way), start=1):
                    self.after[task], self.before[following] = following, task
                    self.lag[following] = 0.0 if place == each.stages else each.send_s

    def tasks(self, device: int) -> range:
        """Return the tasks of a device."""
        return range(self.first[device][0], self.first[device][4])

    def orders(self, starts: Sequence[float]) -> list[list[int]]:
        """Return every device's tasks in the order of their starts."""
        return [sorted(self.tasks(device), key=starts.__getitem__) for device in range(len(self.first))]

    def reversed_in_time(self, starts: Sequence[float]) -> list[float]:
        """Return the starts of the same schedule in the problem reversed in time."""
        end = max(start + spent for start, spent in zip(starts, self.seconds, strict=True))
        return [end - starts[task] - self.seconds[task] for task in self.mirror]

    def schedule(self, starts: Sequence[float]) -> FusedSchedule:
        """Return the schedule with these starts."""
        devices = tuple(
            tuple(self._task(device, task, starts[task]) for task in order)
            for device, order in enumerate(self.orders(starts))
        )
        return FusedSchedule(
            devices=devices,
            latency_s=max(start + spent for start, spent in zip(starts, self.seconds, strict=True)),
            peak_bytes=tuple(self._peak_bytes(tasks) for tasks in devices),
        )

    def _peak_bytes(self, tasks: Sequence[FusedTask]) -> float:
        """Return the largest number of bytes; counts of micro-batches keep it free of rounding."""
        held, peak = [0, 0], 0.0
        for task in tasks:
            held[task.pipeline] += -1 if task.is_backward else 1
            both = zip(held, self.problem.pipelines, strict=True)
            peak = max(peak, sum(count * each.activation_bytes for count, each in both))
        return peak

    def starts(self, schedule: FusedSchedule) -> list[float]:
        """Return the starts of a schedule's tasks."""
        found = [0.0] * self.count
        for first, tasks in zip(self.first, schedule.devices, strict=True):
            for task in tasks:
                found[first[2 * task.pipeline + task.is_backward] + task.micro_batch] = task.start_s
        return found

    def _task(self, device: int, task: int, start_s: float) -> FusedTask:
        kind = next(kind for kind in KINDS if task < self.first[device][kind + 1])
        return FusedTask(
            pipeline=kind // 2,
            is_backward=kind % 2 == 1,
            micro_batch=task - self.first[device][kind],
            start_s=start_s,
            end_s=start_s + self.seconds[task],
        )
