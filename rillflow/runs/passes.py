"""Passes: the forward and backward passes of pipelines that a run recorded, and their idle time.

    passes.jsonl ─> PassesRecord: a stage of a step ─┬─ RankPasses: its passes on one rank
                                                     └─ runs: optimiser steps, with their predicted idle time
    records of a step ─ windows: runs that overlap in time ─> share of idle time, measured and predicted

The bubble of a pipeline is the share of its ranks' time, from the first pass to the last, without a pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rillflow.placement.pipeline import Pipeline
from rillflow.runs import layout
from rillflow.runs.json_lines import decode, read_lines

ALONE = -1.0
"""Gain in a record of a pipeline that ran without a partner."""


class RecordedPass(NamedTuple):
    """One pass of a micro-batch, as a file has it."""

    run: int
    """Optimiser step within the stage, from 0."""
    is_backward: int
    """1 for the backward pass."""
    micro_batch: int
    """Index of the micro-batch in its replica."""
    start_us: int
    """Start, in microseconds after ``RankPasses.start_s``."""
    took_us: int
    """Duration in microseconds."""


@dataclass(frozen=True, kw_only=True)
class RankPasses:
    """Passes of one rank."""

    rank: int
    """Rank within the pool."""
    pipeline_stage: int
    """Pipeline stage of the rank."""
    start_s: float
    """Start of its first pass, in seconds of the run."""
    passes: tuple[tuple[int, ...], ...]
    """Its passes in order, each a ``RecordedPass``."""

    def of_run(self, run: int) -> list[RecordedPass]:
        """Return the passes of one optimiser step."""
        return [each for each in map(RecordedPass._make, self.passes) if each.run == run]


@dataclass(frozen=True, kw_only=True)
class PassesRecord:
    """Passes of one stage of one step: its first optimiser steps, on the first ranks."""

    step: int
    """Step of the stage."""
    stage: str
    """Name of the stage, such as ``policy.update``."""
    pool: str
    """Pool of the ranks."""
    bubbles: tuple[float, ...]
    """Predicted share of idle time of each optimiser step, with its partner if it had one."""
    gains: tuple[float, ...]
    """Predicted share of time that a common run saves, by optimiser step; ``ALONE`` without a partner."""
    is_fused: tuple[int, ...]
    """1 for each optimiser step whose passes ran together with another model's."""
    ranks: tuple[RankPasses, ...]
    """Passes by rank."""

    def pipeline(self, run: int) -> Pipeline | None:
        """Return the pipeline of an optimiser step from its measured passes; None without passes."""
        spent: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rank in self.ranks:
            for each in rank.of_run(run):
                spent[rank.pipeline_stage, each.is_backward].append(max(each.took_us, 1) / 1e6)
        stages = sorted({stage for stage, _ in spent})
        if not stages:
            return None
        counts = [sum(not each.is_backward for each in rank.of_run(run)) for rank in self.ranks]
        return Pipeline(
            name=self.stage,
            micro_batches=max(counts),
            forward_s=tuple(mean(spent[stage, 0]) for stage in stages),
            backward_s=tuple(mean(spent[stage, 1]) for stage in stages),
            activation_bytes=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class PassWindow:
    """Optimiser steps of one pool that overlap in time: one of a pipeline, or two that ran together."""

    stages: tuple[str, ...]
    """Names of the stages."""
    start_s: float
    """Start of the first pass, in seconds of the run."""
    end_s: float
    """End of the last pass, in seconds of the run."""
    busy_s: float
    """Seconds of passes, of all ranks."""
    ranks: int
    """Number of ranks with passes."""
    predicted: float
    """Predicted share of idle time."""
    gain: float
    """Predicted share of time that a common run saves; ``ALONE`` without a partner."""
    in_turn_s: float
    """Least seconds of the pipelines one after the other, from the measured passes."""

    @property
    def bubble(self) -> float:
        """Measured share of idle time."""
        whole_s = self.ranks * (self.end_s - self.start_s)
        return 1 - self.busy_s / whole_s if whole_s else 0.0

    @property
    def measured_gain(self) -> float:
        """Share of time saved of the pipelines one after the other, from the measured passes."""
        return 1 - (self.end_s - self.start_s) / self.in_turn_s if self.in_turn_s else 0.0


def read_passes(run: Path) -> list[PassesRecord]:
    """Read the recorded passes of every step, in the order the stages ended."""
    return [decode(PassesRecord, line) for line in read_lines(run / layout.PASSES).lines]


def alone_bubble(pipeline: Pipeline | None) -> float:
    """Return the predicted share of idle time of a pipeline that runs alone."""
    if pipeline is None:
        return 0.0
    work_s = pipeline.micro_batches * (sum(pipeline.forward_s) + sum(pipeline.backward_s))
    return 1 - work_s / (pipeline.stages * pipeline.bound_s)


def windows(records: Sequence[PassesRecord]) -> list[PassWindow]:
    """Return the optimiser steps of some records in order of time, those that ran together as one."""
    joined: list[list[_Run]] = []
    for run in sorted(_runs(records), key=lambda run: (run.record.pool, run.record.step, run.start_s)):
        last = joined[-1][-1] if joined else run
        is_near = (last.record.pool, last.record.step) == (run.record.pool, run.record.step)
        is_over = bool(joined) and is_near and run.start_s < max(each.end_s for each in joined[-1])
        if is_over and run.has_partner and last.has_partner and last.record.stage != run.record.stage:
            joined[-1].append(run)
        else:
            joined.append([run])
    return [_window(runs) for runs in joined]


class _Run(NamedTuple):
    """One optimiser step of a record."""

    record: PassesRecord
    number: int
    start_s: float
    end_s: float
    busy_s: float
    ranks: frozenset[int]

    @property
    def has_partner(self) -> bool:
        return bool(self.record.is_fused[self.number])


def _runs(records: Sequence[PassesRecord]) -> Iterator[_Run]:
    for record in records:
        for number in range(len(record.bubbles)):
            found = [(rank, rank.of_run(number)) for rank in record.ranks]
            found = [(rank, passes) for rank, passes in found if passes]
            if found:
                yield _Run(
                    record=record,
                    number=number,
                    start_s=min(rank.start_s + passes[0].start_us / 1e6 for rank, passes in found),
                    end_s=max(
                        rank.start_s + (passes[-1].start_us + passes[-1].took_us) / 1e6
                        for rank, passes in found
                    ),
                    busy_s=sum(each.took_us for _, passes in found for each in passes) / 1e6,
                    ranks=frozenset(rank.rank for rank, _ in found),
                )


def _window(runs: Sequence[_Run]) -> PassWindow:
    first = runs[0]
    pipelines = [run.record.pipeline(run.number) for run in runs]
    return PassWindow(
        stages=tuple(sorted(run.record.stage for run in runs)),
        start_s=min(run.start_s for run in runs),
        end_s=max(run.end_s for run in runs),
        busy_s=sum(run.busy_s for run in runs),
        ranks=len(frozenset().union(*(run.ranks for run in runs))),
        predicted=first.record.bubbles[first.number],
        gain=first.record.gains[first.number],
        in_turn_s=sum(each.bound_s for each in pipelines if each is not None),
    )
