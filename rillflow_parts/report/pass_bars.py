"""Pass bars: draw the passes of pipelines rank by rank, and tell their idle time.

passes.jsonl ─> PassesRecord ─┬─ bars: every pass, and the bubbles between them
                              ├─ lines of text: idle time of a step's pipelines, measured and predicted
                              ├─ a drawing of letters: one line a rank, for the terminal
                              └─ trace events
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rillflow.runs.formatting import columns, seconds
from rillflow.runs.passes import ALONE, PassesRecord, PassWindow, RecordedPass, windows
from rillflow_parts.report.timeline import Bar

BUBBLE = "bubble"
"""Name of the idle time between the passes of a pipeline."""
_STEPS = 4
"""Steps that the text lists: the last ones."""
_WIDTH = 96
"""Letters of the longest drawn window."""
_IDLE = "."


@dataclass(frozen=True, kw_only=True)
class ShownPass:
    """One pass on one rank."""

    pool: str
    """Pool of the rank."""
    rank: int
    """Rank within the pool."""
    name: str
    """Role and direction, such as ``policy forward``."""
    start_s: float
    """Start, in seconds of the run."""
    end_s: float
    """End, in seconds of the run."""
    step: int
    """Step of the pass."""
    micro_batch: int
    """Index of the micro-batch in its replica."""


def shown_passes(records: Iterable[PassesRecord]) -> list[ShownPass]:
    """Return every recorded pass, by pool, rank and time."""
    found = []
    for record in records:
        role = record.stage.partition(".")[0]
        for rank in record.ranks:
            for each in map(RecordedPass._make, rank.passes):
                start_s = rank.start_s + each.start_us / 1e6
                found.append(
                    ShownPass(
                        pool=record.pool,
                        rank=rank.rank,
                        name=f"{role} {'backward' if each.is_backward else 'forward'}",
                        start_s=start_s,
                        end_s=start_s + each.took_us / 1e6,
                        step=record.step,
                        micro_batch=each.micro_batch,
                    )
                )
    return sorted(found, key=lambda each: (each.pool, each.rank, each.start_s))


def pass_bars(records: Sequence[PassesRecord]) -> list[Bar]:
    """Return a bar for every pass, and for the idle time of its rank within its window."""
    inside = windows(records)
    bars = []
    for (pool, rank), group in groupby(shown_passes(records), key=lambda each: (each.pool, each.rank)):
        own, lane = list(group), f"rank {rank:>2} passes"
        bars += [
            Bar(
                pool=pool,
                lane=lane,
                stage=each.name,
                start_s=each.start_s,
                end_s=each.end_s,
                step=each.step,
            )
            for each in own
        ]
        for start_s, end_s in _gaps(own, inside):
            bars.append(Bar(pool=pool, lane=lane, stage=BUBBLE, start_s=start_s, end_s=end_s, is_idle=True))
    return bars


def _gaps(own: Sequence[ShownPass], inside: Sequence[PassWindow]) -> list[tuple[float, float]]:
    """Return the idle times of a rank within the windows."""
    found = []
    for window in inside:
        reached_s = window.start_s
        there = [each for each in own if window.start_s <= each.start_s < window.end_s]
        for each in there:
            if each.start_s > reached_s:
                found.append((reached_s, each.start_s))
            reached_s = max(reached_s, each.end_s)
        if there and reached_s < window.end_s:
            found.append((reached_s, window.end_s))
    return found


def pass_lines(records: Sequence[PassesRecord]) -> list[str]:
    """Return lines of text: idle time and gain of the last steps' pipelines; empty without pipelines."""
    steps = sorted({record.step for record in records})[-_STEPS:]
    head = ("step", "passes of", "optimiser steps", "time", "bubble", "predicted", "saved", "predicted")
    rows: list[tuple[str, ...]] = [head]
    for step in steps:
        found: dict[tuple[str, ...], list[PassWindow]] = defaultdict(list)
        for window in windows([record for record in records if record.step == step]):
            found[window.stages].append(window)
        rows += [_row(step, stages, own) for stages, own in found.items()]
    if len(rows) == 1:
        return []
    return [
        "pipelines: bubble is the idle share of the ranks' time from the first pass to the last",
        "",
        *columns(rows, left=2),
        "",
        *_drawing([record for record in records if record.step == steps[-1]]),
    ]


def _drawing(records: Sequence[PassesRecord]) -> list[str]:
    """Draw the first optimiser step of each stage of a step, all on one scale."""
    first: dict[tuple[str, ...], PassWindow] = {}
    for window in windows(records):
        first.setdefault(window.stages, window)
    roles = [record.stage.partition(".")[0] for record in records]
    letters = {role: role[0].upper() for role in dict.fromkeys(roles)}
    if len({*letters.values()}) < len(letters):
        letters = dict(zip(letters, "ABCDEFGH", strict=False))
    scale_s = max(window.end_s - window.start_s for window in first.values()) / _WIDTH
    told = [f"{letter} {letter.lower()} {role} forward, backward" for role, letter in letters.items()]
    lines = [f"first optimiser steps of step {records[0].step}: {'; '.join(told)}; {_IDLE} idle"]
    for stages, window in first.items():
        lines += ["", f"  {' + '.join(stages)}: {seconds(window.end_s - window.start_s)}"]
        inside = [each for each in shown_passes(records) if window.start_s <= each.start_s < window.end_s]
        for (pool, rank), group in groupby(inside, key=lambda each: (each.pool, each.rank)):
            lines.append(f"  {pool} {rank:>2}  {_letters(list(group), window, scale_s, letters)}")
    return lines


def _letters(own: Sequence[ShownPass], window: PassWindow, scale_s: float, letters: Mapping[str, str]) -> str:
    """Return a rank's passes as letters, one for each ``scale_s`` seconds."""
    drawn = [_IDLE] * max(1, round((window.end_s - window.start_s) / scale_s))
    for each in own:
        role, direction = each.name.split()
        letter = letters[role] if direction == "forward" else letters[role].lower()
        first = int((each.start_s - window.start_s) / scale_s)
        last = max(first + 1, round((each.end_s - window.start_s) / scale_s))
        drawn[first:last] = [letter] * (min(last, len(drawn)) - first)
    return "".join(drawn)


def _row(step: int, stages: tuple[str, ...], own: Sequence[PassWindow]) -> tuple[str, ...]:
    whole_s = sum(window.ranks * (window.end_s - window.start_s) for window in own) or 1.0
    busy_s, count = sum(window.busy_s for window in own), len(own)
    gains = ["", ""]
    if own[0].gain != ALONE:
        is_fused = len(stages) > 1
        gains = [
            f"{sum(window.measured_gain for window in own) / count:.0%}" if is_fused else "in turn",
            f"{sum(window.gain for window in own) / count:.0%}",
        ]
    return (
        str(step),
        " + ".join(stages),
        str(count),
        seconds(sum(window.end_s - window.start_s for window in own)),
        f"{1 - busy_s / whole_s:.0%}",
        f"{sum(window.predicted for window in own) / count:.0%}",
        *gains,
    )


def pass_events(
    records: Iterable[PassesRecord], ids: Mapping[Any, Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Return trace events of the passes; ``ids`` gives the process and thread of (pool, rank)."""
    return [
        {
            "ph": "X",
            "name": each.name,
            "cat": "pass",
            **ids[each.pool, each.rank],
            "ts": round(1e6 * each.start_s),
            "dur": round(1e6 * (each.end_s - each.start_s)),
            "args": {"step": each.step, "micro_batch": each.micro_batch},
        }
        for each in shown_passes(records)
        if (each.pool, each.rank) in ids
    ]
