"""List scheduling: devices start the task with the earliest target, as soon as it and its memory are there.

    targets ─> list_schedule ─> starts ─ reversed in time ─> targets of the reversed problem ─> ...

Scheduling a problem forwards and backwards in turn, with the previous starts as targets, moves every task
towards its critical neighbours (justification: Valls et al., 2005, for project scheduling).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random

from rillflow_parts.fusion.scheduling.work import KINDS, NONE, FusedWork


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How one pipeline is spread over the schedule."""

    early: float
    """Share of its micro-batches that begin as early as possible; the others end as late as possible."""
    slowness: float
    """Distance of micro-batches: 0 for no idle time between them, 1 for the whole latency."""
    lift: float
    """Forward passes by which its own forward passes are late."""


def drawn_pace(draw: Random) -> Pace:
    """Return a random pace; most often one whose share or distance is extreme."""
    early, slowness = (draw.random() if draw.random() < 0.7 else 1.0 for _ in range(2))
    return Pace(early=early, slowness=slowness, lift=draw.uniform(-2, 2))


def near(pace: Pace, draw: Random) -> Pace:
    """Return a pace that differs a little."""
    return Pace(
        early=min(max(draw.gauss(pace.early, 0.15), 0.0), 1.0),
        slowness=min(max(draw.gauss(pace.slowness, 0.1), 0.0), 1.0),
        lift=draw.gauss(pace.lift, 0.5),
    )


def targets(work: FusedWork, paces: Sequence[Pace], latency_s: float) -> list[float]:
    """Return target starts of all tasks in a schedule of this latency."""
    found = [0.0] * work.count
    for index, (each, pace) in enumerate(zip(work.problem.pipelines, paces, strict=True)):
        last = each.micro_batches - 1
        trip = each.arrival_s(each.stages) + each.return_s(each.stages)
        room = max(latency_s - trip, 0.0)
        widest = room / max(last, 1)
        tight = min(max(f + b for f, b in zip(each.forward_s, each.backward_s, strict=True)), widest)
        apart = tight + (widest - tight) * pace.slowness
        begins = sorted(
            apart * one if one < pace.early * (last + 1) else room - apart * (last - one)
            for one in range(last + 1)
        )
        for device, first in enumerate(work.first):
            stage = work.problem.stage(index, device)
            there = each.arrival_s(stage) + pace.lift * each.forward_s[stage]
            back = trip - each.return_s(stage + 1)
            for one, begin in enumerate(begins):
                found[first[2 * index] + one] = begin + there
                found[first[2 * index + 1] + one] = begin + back
    return found


def in_turn(work: FusedWork, turns: Sequence[int]) -> list[list[int]]:
    """Return the orders in which the pipelines take turns on every device, each turn 1F1B within the cap.

    The turns have the same order everywhere, so devices never wait in a circle.

    Args:
        work: the tasks.
        turns: the pipeline of every micro-batch: ``(0, 0, 1)`` for two ascending ones, then a descending one.
    """
    orders: list[list[int]] = [[] for _ in work.first]
    begun = [0, 0]
    for index, run in groupby(turns):
        count = len(list(run))
        for device, (order, first) in enumerate(zip(orders, work.first, strict=True)):
            each = work.problem.pipelines[index]
            depth = min(each.depth(work.problem.stage(index, device), work.problem.memory_bytes), count)
            there, back = (first[2 * index + way] + begun[index] for way in range(2))
            for one in range(count + depth):
                order += [back + one - depth] if one >= depth else []
                order += [there + one] if one < count else []
        begun[index] += count
    return orders


def list_schedule(work: FusedWork, targets: Sequence[float], *, reserve: bool = False) -> list[float] | None:
    """Return the starts that the targets lead to, or None if the pipelines wait for each other's memory.

    Args:
        work: the tasks, with the memory cap of their problem.
        targets: wanted start of every task.
        reserve: keep memory for a forward pass of the other pipeline that has an earlier target, even if it
            cannot start yet.
    """
    run = _Run(work, targets, reserve)
    run.until_nothing_starts()
    return None if math.inf in run.starts else run.starts


class _Run:
    """State of one list schedule."""

    def __init__(self, work: FusedWork, targets: Sequence[float], reserve: bool) -> None:
        devices = len(work.first)
        self.work, self.targets, self.reserve = work, targets, reserve
        self.cap = work.problem.memory_bytes * (1 + 1e-9)
        self.ready = [0.0 if before == NONE else math.inf for before in work.before]
        self.starts = [math.inf] * work.count
        self.heads = [first[:4] for first in work.first]
        self.held = [0.0] * devices
        self.events = [(0.0, device) for device in range(devices)]

    def until_nothing_starts(self) -> None:
        """Start tasks in the order of time."""
        work, events = self.work, self.events
        free = [0.0] * len(self.heads)
        while events:
            now, device = heapq.heappop(events)
            if free[device] > now:
                continue
            kind = self._chosen(device, now)
            if kind == NONE:
                continue
            task = self.heads[device][kind]
            self.heads[device][kind] += 1
            self.starts[task], end = now, now + work.seconds[task]
            free[device] = end
            self.held[device] += work.bytes[task]
            heapq.heappush(events, (end, device))
            following = work.after[task]
            if following != NONE:
                self.ready[following] = end + work.lag[following]
                if work.device[following] != device:
                    heapq.heappush(events, (self.ready[following], work.device[following]))

    def _has_room(self, device: int, kind: int, task: int) -> bool:
        """Return whether the memory for a forward pass is there."""
        needed = self.held[device] + self.work.bytes[task]
        rival = self.heads[device][2 - kind]
        has_rival = self.reserve and rival < self.work.first[device][3 - kind]
        if has_rival and self.targets[rival] < self.targets[task]:
            needed += self.work.bytes[rival]
        return needed <= self.cap

    def _chosen(self, device: int, now: float) -> int:
        """Return the kind of the task that a free device starts now, or NONE.

        The device waits if a task with an earlier target arrives before its best task would end, and the best
        task can follow that one before its own target.
        """
        best = awaited = best_kind = NONE
        ends, targets, ready = self.work.first[device], self.targets, self.ready
        for kind in KINDS:
            task = self.heads[device][kind]
            if task == ends[kind + 1] or ready[task] == math.inf:
                continue
            if not kind & 1 and not self._has_room(device, kind, task):
                continue
            if ready[task] <= now:
                if best == NONE or targets[task] < targets[best]:
                    best, best_kind = task, kind
            elif awaited == NONE or targets[task] < targets[awaited]:
                awaited = task
        if best != NONE and awaited != NONE:
            delays = now + self.work.seconds[best] > targets[awaited]
            if delays and targets[best] >= ready[awaited] + self.work.seconds[awaited]:
                return NONE
        return best_kind
