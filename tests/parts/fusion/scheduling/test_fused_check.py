"""The checker finds every kind of fault in a schedule that was correct."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule, FusedTask
from rillflow_parts.fusion.scheduling.solve import schedule
from tests.parts.fusion.scheduling.check import check
from tests.parts.fusion.scheduling.toys import even, within

PROBLEM = FusedProblem(
    devices=4,
    ascending=even("actor", stages=4, micro_batches=3, forward_s=2.0, activation_bytes=2.0, send_s=0.5),
    descending=even("critic", stages=2, micro_batches=2, forward_s=1.0, activation_bytes=1.0),
    memory_bytes=7.0,
)
FOUND = schedule(PROBLEM, budget=100)


def with_tasks(device: int, tasks: list[FusedTask]) -> FusedSchedule:
    devices = list(FOUND.devices)
    devices[device] = tuple(tasks)
    return replace(FOUND, devices=tuple(devices))


def test_the_schedule_is_correct() -> None:
    assert check(PROBLEM, FOUND) == []


def test_an_early_start_is_found() -> None:
    tasks = list(FOUND.devices[2])
    place = next(i for i, task in enumerate(tasks) if task.pipeline == 0 and not task.is_backward)
    tasks[place] = replace(tasks[place], start_s=0.0, end_s=2.0)
    faults = check(PROBLEM, with_tasks(2, tasks[place:] + tasks[:place]))
    assert any("begins before" in fault for fault in faults)


def test_an_input_that_is_not_there_is_found() -> None:
    shifted = [
        tuple(replace(t, start_s=t.start_s - 0.25, end_s=t.end_s - 0.25) for t in tasks)
        if device == 2
        else tasks
        for device, tasks in enumerate(FOUND.devices)
    ]
    first = shifted[2][0]
    later = replace(FOUND, devices=tuple(shifted))
    faults = check(PROBLEM, later)
    assert first.start_s < 0 or any("before its input is there" in fault for fault in faults)
    assert faults


def test_a_missing_pass_and_a_double_one_are_found() -> None:
    tasks = list(FOUND.devices[0])
    assert any(
        "forward passes of" in f or "backward passes of" in f
        for f in check(PROBLEM, with_tasks(0, tasks[:-1]))
    )
    assert any("out of order" in fault for fault in check(PROBLEM, with_tasks(0, [*tasks, tasks[-1]])))


def test_a_wrong_length_is_found() -> None:
    tasks = list(FOUND.devices[1])
    tasks[-1] = replace(tasks[-1], end_s=tasks[-1].end_s - 0.5)
    assert any("does not take" in fault for fault in check(PROBLEM, with_tasks(1, tasks)))


def test_memory_above_the_cap_and_a_wrong_peak_are_found() -> None:
    peak = max(FOUND.peak_bytes)
    assert any(f"the cap is {peak - 1:g}" in fault for fault in check(within(PROBLEM, peak - 1), FOUND))
    lied = replace(FOUND, peak_bytes=(0.5, *FOUND.peak_bytes[1:]))
    assert any("the stated peak is 0.5" in fault for fault in check(PROBLEM, lied))


def test_a_wrong_latency_and_a_wrong_number_of_devices_are_found() -> None:
    assert any("stated latency" in f for f in check(PROBLEM, replace(FOUND, latency_s=FOUND.latency_s + 1)))
    assert check(PROBLEM, replace(FOUND, devices=FOUND.devices[:3])) == [
        "the schedule has 3 devices, the problem 4"
    ]


def test_devices_that_wait_in_a_circle_are_found() -> None:
    """Both devices run their own forward pass's backward before the other's forward: nothing can go on."""
    problem = FusedProblem(
        devices=2,
        ascending=even("a", stages=2, micro_batches=1, forward_s=1.0, activation_bytes=1.0),
        descending=even("b", stages=2, micro_batches=1, forward_s=1.0, activation_bytes=1.0),
    )
    orders = [((0, False), (0, True), (1, False), (1, True)), ((1, False), (1, True), (0, False), (0, True))]
    times = [(0.0, 1.0), (1.0, 3.0), (3.0, 4.0), (4.0, 6.0)]
    devices = tuple(
        tuple(
            FusedTask(pipeline=p, is_backward=back, micro_batch=0, start_s=begin, end_s=end)
            for (p, back), (begin, end) in zip(order, times, strict=True)
        )
        for order in orders
    )
    faults = check(problem, FusedSchedule(devices=devices, latency_s=6.0, peak_bytes=(1.0, 1.0)))
    assert "device 0 waits for ever for the input of the backward pass of micro-batch 0 of 'a'" in faults
    assert any(fault.startswith("device 1 waits for ever") for fault in faults)


@pytest.mark.parametrize("send_s", [0.0, 3.0])
def test_seconds_to_send_lengthen_a_schedule(send_s: float) -> None:
    problem = replace(PROBLEM, ascending=replace(PROBLEM.ascending, send_s=send_s))
    found = schedule(problem, budget=300)
    assert check(problem, found) == []
    assert (check(replace(problem, ascending=replace(problem.ascending, send_s=4.0)), found)) != []
