"""Rungs of a ladder: runs with more and more overlap, each predicted before any of them runs.

rungs ─ predict ─> seconds of their steps, printed ─ run ─> seconds measured ─> a line of the table each
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs.reader import SpanRecord, read_metrics, read_spans

READY = "schedule.mode=ready_first"
PARTS = 'schedule={mode="streamed",stream_chunks=PARTS}'
LADDER = {
    "in sequence": (),
    "by parts": (PARTS,),
    "1 ahead": ('schedule={mode="ahead",freshness=1}',),
    "1 ahead, by parts": (PARTS, "schedule.mode=ahead", "schedule.freshness=1"),
    "4 ahead, by parts": (PARTS, "schedule.mode=ahead", "schedule.freshness=4"),
    "4 ahead, ready first": ('schedule={mode="ahead",freshness=4}', READY),
    "4 ahead, late dropped": ('schedule={mode="ahead",freshness=4}', READY, "schedule.on_stale=drop"),
}
"""Settings of each rung; the sampler has its own pool."""
ASYNCFLOW = {"in sequence": 1.0, "by parts": 2.01, "1 ahead, by parts": 2.74}
"""Relative throughput that AsyncFlow (arXiv 2507.01663) publishes for 7B on 512 devices.

The entries are its baseline, rows that stream between tasks, and the same one version ahead.
"""
STAGES = ("policy.generate", "reward.score", "policy.update")
UNDER_WAY = 2
"""First steps of a run, in which memory is first allocated."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A run of the ladder."""

    name: str
    """Key of the rung in ``LADDER``."""
    parts: int
    """Parts into which a step splits its rows; 1 if they stay whole."""
    settings: tuple[str, ...]
    """Settings in addition to those of the recipe."""
    counted: int
    """Least number of measured steps."""

    @property
    def bound(self) -> int:
        """Freshness: the largest staleness of its rows, in versions."""
        return 4 if "4 ahead" in self.name else int("1 ahead" in self.name)

    @property
    def skipped(self) -> int:
        """Steps before the measured ones: the first steps, and four times the steps in flight."""
        return UNDER_WAY + 4 * self.bound

    @property
    def steps(self) -> int:
        """All steps; the measured ones are a multiple of the steps in flight."""
        return self.skipped + -(-self.counted // (self.bound + 1)) * (self.bound + 1)


def rungs_of(names: Sequence[str], parts: int, counted: int) -> list[Rung]:
    """Return the rungs with these names, in the ladder's order."""
    return [
        Rung(
            name=name,
            parts=parts if PARTS in settings else 1,
            settings=tuple(each.replace("PARTS", str(parts)) for each in settings),
            counted=counted,
        )
        for name, settings in LADDER.items()
        if name in names
    ]


def climb(
    rungs: Sequence[Rung], predict: Callable[[Rung], Sequence[float]], run: Callable[[Rung], Path]
) -> list[str]:
    """Print the predictions of all rungs, then run them; return the table.

    Args:
        rungs: the first one is the baseline of the speedups.
        predict: returns the seconds of all steps of a rung.
        run: runs a rung and returns its run directory.
    """
    told = {rung.name: statistics.fmean(predict(rung)[rung.skipped :]) for rung in rungs}
    for name, seconds in told.items():
        say(f"predicted: {name}, {seconds:.2f} s a step, {next(iter(told.values())) / seconds:.2f} times")
    lines = [
        "| | predicted, s a step | measured | predicted / measured | times as fast, predicted | measured "
        "| AsyncFlow's | generation, scoring, update took |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = dict[str, float]()
    for rung in rungs:
        made, predicted = run(rung), told[rung.name]
        spent = step_seconds(made, rung.skipped)
        first = first or {"predicted": predicted, "measured": spent}
        busy = [busy_seconds(made, stage, rung.skipped) for stage in STAGES]
        published = ASYNCFLOW.get(rung.name)
        lines.append(
            f"| {rung.name} | {predicted:.2f} | {spent:.2f} | {predicted / spent - 1:+.1%} "
            f"| {first['predicted'] / predicted:.2f} | {first['measured'] / spent:.2f} "
            f"| {'' if published is None else f'{published:.2f}'} "
            f"| {', '.join(f'{each:.2f}' for each in busy)} |"
        )
        say(lines[-1])
    return lines


def say(text: str) -> None:
    """Print a line with the time of day, and flush."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run_of(recipe: Path, folder: Path, *settings: str, algorithms: Sequence[Algorithm] = ()) -> Path:
    """Run a recipe; return the run directory."""
    loaded = load_recipe(recipe, [f"run.dir='{folder}'", *settings], algorithms)
    launch(loaded, quiet=True)
    return folder


def step_seconds(run: Path, skipped: int) -> float:
    """Return the mean seconds of a step, without the first ones."""
    every = [each.metrics["run/step_seconds/mean"].value for each in read_metrics(run)]
    return statistics.fmean(every[skipped:])


def stage_seconds(run: Path, stage: str, skipped: int) -> float:
    """Return the mean seconds of a stage, without the first steps."""
    spans: list[SpanRecord] = [
        each for each in read_spans(run) if each.stage == stage and each.step > skipped
    ]
    return statistics.fmean(each.duration_s for each in spans)


def busy_seconds(run: Path, stage: str, skipped: int) -> float:
    """Return the median seconds per step in which a stage's ranks work, summed over the parts of the step."""
    spans = [each for each in read_spans(run) if each.stage == stage and each.step > skipped]
    return statistics.median(sum(rank.duration_s for rank in each.ranks) for each in spans)


def told(seconds: Mapping[str, float]) -> str:
    """Format seconds by name as one line."""
    return ", ".join(f"{name or 'no stage'} {spent:.3f} s" for name, spent in seconds.items())
