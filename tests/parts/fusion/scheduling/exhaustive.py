"""Exhaustive search for the shortest fused schedule of a small problem, by other means than the planner's.

Passes are appended in the order of their starts: ``start = max(device is free, input is there, last start)``.
Every schedule is such a sequence. A state with the same appended passes whose times are all at most those of
another state leads to no longer schedules, so only undominated states are kept.
"""

from __future__ import annotations

import random

from rillflow.placement.pipeline import Pipeline
from rillflow_parts.fusion.scheduling.problem import FusedProblem

State = tuple[int, ...]
Times = tuple[float, ...]


def drawn(seed: int) -> FusedProblem:
    """A random problem of at most 3 devices, 3 stages and 3 micro-batches a pipeline, with a memory cap."""
    draw = random.Random(seed)
    devices = draw.choice([1, 2, 3, 2, 3, 3])
    pipelines = []
    for name in ("actor", "critic"):
        stages = draw.choice([count for count in range(1, devices + 1) if devices % count == 0])
        forward = [float(draw.randint(1, 5)) for _ in range(stages)]
        backward = [float(draw.randint(1, 9)) for _ in range(stages)]
        if draw.random() < 0.5:
            forward, backward = [forward[0]] * stages, [2 * forward[0]] * stages
        pipelines.append(
            Pipeline(
                name=name,
                micro_batches=draw.randint(1, 3),
                forward_s=tuple(forward),
                backward_s=tuple(backward),
                activation_bytes=float(draw.randint(1, 3)),
                send_s=draw.choice([0.0, 0.0, 1.0]),
            )
        )
    least = max(each.activation_bytes for each in pipelines)
    most = sum(each.activation_bytes * each.micro_batches for each in pipelines)
    return FusedProblem(
        devices=devices,
        ascending=pipelines[0],
        descending=pipelines[1],
        memory_bytes=float(draw.randint(int(least), int(most))),
    )


class Exhaustive:
    """All sequences of passes of a problem."""

    def __init__(self, problem: FusedProblem, limit_s: float) -> None:
        self.problem, self.limit_s = problem, limit_s
        self.queues = [
            (device, pipeline, backward)
            for device in range(problem.devices)
            for pipeline in range(2)
            for backward in range(2)
        ]
        self.sources = [self._source(*queue) for queue in self.queues]
        self.spent = [self._spent(*queue) for queue in self.queues]
        self.onward = [self._onward(*queue) for queue in self.queues]
        self.totals = [problem.pipelines[pipeline].micro_batches for _, pipeline, _ in self.queues]

    def _stage(self, device: int, pipeline: int) -> int:
        stages = self.problem.pipelines[pipeline].stages
        return (device if pipeline == 0 else self.problem.devices - 1 - device) % stages

    def _source(self, device: int, pipeline: int, backward: int) -> int | None:
        """The queue that feeds a queue."""
        stage, step = self._stage(device, pipeline), 1 - 2 * pipeline
        if not backward:
            return self.queues.index((device - step, pipeline, 0)) if stage else None
        if stage == self.problem.pipelines[pipeline].stages - 1:
            return self.queues.index((device, pipeline, 0))
        return self.queues.index((device + step, pipeline, 1))

    def _spent(self, device: int, pipeline: int, backward: int) -> float:
        each = self.problem.pipelines[pipeline]
        return (each.backward_s if backward else each.forward_s)[self._stage(device, pipeline)]

    def _onward(self, device: int, pipeline: int, backward: int) -> float:
        """Seconds from the end of a pass to the end of its micro-batch."""
        each, stage = self.problem.pipelines[pipeline], self._stage(device, pipeline)
        way = sum(each.backward_s[:stage]) + stage * each.send_s
        if backward:
            return way
        rest = each.stages - 1 - stage
        way += sum(each.forward_s[stage + 1 :]) + rest * each.send_s
        return way + sum(each.backward_s[stage:]) + rest * each.send_s

    def shortest_s(self) -> float | None:
        """The least latency that is at most the limit; None if there is none."""
        arrivals = [
            tuple([0.0] * n) if source is None else ()
            for n, source in zip(self.totals, self.sources, strict=True)
        ]
        layer = {
            tuple([0] * len(self.queues)): [(0.0, tuple([0.0] * self.problem.devices), tuple(arrivals), 0.0)]
        }
        for _ in range(sum(self.totals)):
            following: dict[State, list] = {}
            for state, entries in layer.items():
                for entry in entries:
                    for queue in range(len(self.queues)):
                        self._append(state, entry, queue, following)
            layer = {state: _undominated(entries) for state, entries in following.items()}
        ends = [entry[3] for entries in layer.values() for entry in entries]
        return min(ends, default=None)

    def _append(self, state: State, entry: tuple, queue: int, following: dict[State, list]) -> None:
        last, free, arrivals, end = entry
        if not arrivals[queue] or not self._has_room(state, queue):
            return
        device, pipeline, _ = self.queues[queue]
        start = max(last, free[device], arrivals[queue][0])
        done = start + self.spent[queue]
        if done + self.onward[queue] > self.limit_s:
            return
        new_state = tuple(n + (place == queue) for place, n in enumerate(state))
        new_free = tuple(
            max(done, start) if place == device else max(t, start) for place, t in enumerate(free)
        )
        new_arrivals = list(arrivals)
        new_arrivals[queue] = arrivals[queue][1:]
        for place, source in enumerate(self.sources):
            if source == queue:
                sent = self.problem.pipelines[pipeline].send_s if self.queues[place][0] != device else 0.0
                new_arrivals[place] = (*new_arrivals[place], done + sent)
        for place, times in enumerate(new_arrivals):
            new_arrivals[place] = tuple(max(t, start) for t in times)
            if (
                times
                and max(times[0], new_free[self.queues[place][0]]) + self.spent[place] + self.onward[place]
                > self.limit_s
            ):
                return
        for at in range(self.problem.devices):
            left = sum(
                (total - n) * spent
                for total, n, spent, (where, _, _) in zip(
                    self.totals, new_state, self.spent, self.queues, strict=True
                )
                if where == at
            )
            if left and new_free[at] + left > self.limit_s:
                return
        following.setdefault(new_state, []).append((start, new_free, tuple(new_arrivals), max(end, done)))

    def _has_room(self, state: State, queue: int) -> bool:
        device, pipeline, backward = self.queues[queue]
        if backward:
            return True
        held = 0.0
        for each in range(2):
            forward = state[self.queues.index((device, each, 0))] + (each == pipeline)
            held += (forward - state[self.queues.index((device, each, 1))]) * self.problem.pipelines[
                each
            ].activation_bytes
        return held <= self.problem.memory_bytes


def _undominated(entries: list) -> list:
    """The entries whose times are not all at least those of another one."""
    flat = {(e[0], *e[1], *(t for times in e[2] for t in times), e[3]): e for e in entries}
    kept: list[Times] = []
    for times in sorted(flat):
        if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other in kept):
            kept.append(times)
    return [flat[times] for times in kept]
