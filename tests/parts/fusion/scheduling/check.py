"""Check of a fused schedule, from the description of the problem alone: it shares no code with the search."""

from __future__ import annotations

import math
from collections import Counter, deque

from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule, FusedTask

ROUNDING = 1e-6
"""Relative error of times and bytes that is no fault."""


def check(problem: FusedProblem, schedule: FusedSchedule) -> list[str]:
    """Return the faults of a schedule in plain words; empty if the schedule is correct.

    Checked are: every device runs each of its passes once; passes of a device do not overlap and last as long
    as they should; micro-batches are first in, first out; a pass begins after the pass that it needs; the
    peaks are as stated and within the cap; the latency is as stated; and devices that only follow their
    orders come to an end.
    """
    faults = []
    if len(schedule.devices) != problem.devices:
        return [f"the schedule has {len(schedule.devices)} devices, the problem {problem.devices}"]
    for device, tasks in enumerate(schedule.devices):
        faults += _order_faults(problem, device, tasks)
        faults += _memory_faults(problem, device, tasks, schedule.peak_bytes[device])
    if not faults:
        faults = _dependency_faults(problem, schedule) + _deadlocks(problem, schedule)
    last = max((task.end_s for tasks in schedule.devices for task in tasks), default=0.0)
    if not math.isclose(last, schedule.latency_s, rel_tol=ROUNDING):
        faults.append(f"the last pass ends at {last:g} s, the stated latency is {schedule.latency_s:g} s")
    return faults


def _order_faults(problem: FusedProblem, device: int, tasks: tuple[FusedTask, ...]) -> list[str]:
    """Passes that are missing, doubled, out of order, overlapping, or of the wrong length."""
    faults, due, free = [], Counter[tuple[int, bool]](), 0.0
    for task in tasks:
        model = problem.pipelines[task.pipeline]
        stage = _stage(problem, task.pipeline, device)
        spent = (model.backward_s if task.is_backward else model.forward_s)[stage]
        if task.start_s < free - ROUNDING * max(free, 1e-9):
            faults.append(f"device {device}: {_named(problem, task)} begins before the pass before it ends")
        if not math.isclose(task.end_s - task.start_s, spent, rel_tol=ROUNDING):
            faults.append(f"device {device}: {_named(problem, task)} does not take {spent:g} s")
        if task.micro_batch != due[task.pipeline, task.is_backward]:
            faults.append(f"device {device}: {_named(problem, task)} is out of order")
        due[task.pipeline, task.is_backward] += 1
        free = task.end_s
    for pipeline, model in enumerate(problem.pipelines):
        for is_backward in (False, True):
            if due[pipeline, is_backward] != model.micro_batches:
                way = "backward" if is_backward else "forward"
                faults.append(f"device {device}: {due[pipeline, is_backward]} {way} passes of {model.name!r}")
    return faults


def _memory_faults(
    problem: FusedProblem, device: int, tasks: tuple[FusedTask, ...], stated: float
) -> list[str]:
    """A peak that differs from the stated one or exceeds the cap."""
    held = Counter[int]()
    peak = 0.0
    for task in tasks:
        held[task.pipeline] += -1 if task.is_backward else 1
        peak = max(peak, sum(held[p] * m.activation_bytes for p, m in enumerate(problem.pipelines)))
    faults = []
    if not math.isclose(peak, stated, rel_tol=ROUNDING, abs_tol=ROUNDING):
        faults.append(f"device {device} holds {peak:g} bytes, the stated peak is {stated:g}")
    if peak > problem.memory_bytes * (1 + ROUNDING):
        faults.append(f"device {device} holds {peak:g} bytes, the cap is {problem.memory_bytes:g}")
    return faults


def _dependency_faults(problem: FusedProblem, schedule: FusedSchedule) -> list[str]:
    """Passes that begin before their input is there."""
    ends = {
        (device, task.pipeline, task.is_backward, task.micro_batch): task.end_s
        for device, tasks in enumerate(schedule.devices)
        for task in tasks
    }
    faults = []
    for device, tasks in enumerate(schedule.devices):
        for task in tasks:
            source = _source(problem, device, task)
            if source is None:
                continue
            sent = problem.pipelines[task.pipeline].send_s if source[0] != device else 0.0
            if task.start_s < ends[source] + sent - ROUNDING * ends[source]:
                faults.append(f"device {device}: {_named(problem, task)} begins before its input is there")
    return faults


def _deadlocks(problem: FusedProblem, schedule: FusedSchedule) -> list[str]:
    """Devices that wait for ever if each of them follows its order and waits for its inputs."""
    queues = [deque(tasks) for tasks in schedule.devices]
    done: set[tuple[int, int, bool, int] | None] = {None}
    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            while queue and _source(problem, device, queue[0]) in done:
                task = queue.popleft()
                done.add((device, task.pipeline, task.is_backward, task.micro_batch))
                moved = True
    return [
        f"device {device} waits for ever for the input of {_named(problem, queue[0])}"
        for device, queue in enumerate(queues)
        if queue
    ]


def _source(problem: FusedProblem, device: int, task: FusedTask) -> tuple[int, int, bool, int] | None:
    """The pass whose result a pass needs, as (device, pipeline, backward, micro-batch); None for none."""
    stages = problem.pipelines[task.pipeline].stages
    stage = _stage(problem, task.pipeline, device)
    onward = -1 if task.pipeline else 1
    if not task.is_backward:
        return (device - onward, task.pipeline, False, task.micro_batch) if stage else None
    if stage == stages - 1:
        return device, task.pipeline, False, task.micro_batch
    return device + onward, task.pipeline, True, task.micro_batch


def _stage(problem: FusedProblem, pipeline: int, device: int) -> int:
    """The stage of a device: counted from the left in pipeline 0, from the right in pipeline 1."""
    left = problem.devices - 1 - device if pipeline else device
    return left % problem.pipelines[pipeline].stages


def _named(problem: FusedProblem, task: FusedTask) -> str:
    way = "backward" if task.is_backward else "forward"
    return f"the {way} pass of micro-batch {task.micro_batch} of {problem.pipelines[task.pipeline].name!r}"
