"""Timeline: draw the activity of every pool over time as one SVG, for a run's spans or a simulation's.

ranks of a run ──────────┐
                         ├─ Bar: pool, lane, stage, from, to ─ merge ─> lanes under their pools
spans of a simulation ───┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rillflow.runs.formatting import duration
from rillflow.runs.report.chart import ChartAxis, box, line, svg, text, ticks
from rillflow.runs.report.html import COLOURS, Html, el

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 190, 14, 8, 26
LANE, GAP, POOL_GAP = 18, 4, 10
SHOWN_STEPS = 4
"""Number of drawn steps: the last ones of a run, the first ones of a simulation."""
MOST_LANES = 16
"""Largest number of drawn ranks or replicas per pool, counted from the first."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One interval of work or idle time.

    Example:
        Bar(pool="main", lane="policy", stage="policy.update", start_s=1.0, end_s=3.5, step=1)
    """

    pool: str
    """Pool whose devices were used."""
    lane: str
    """Lane of the pool that shows the bar: a rank or a replica."""
    stage: str
    """Stage name; bars with the same name have the same colour."""
    start_s: float
    """Start time in seconds."""
    end_s: float
    """End time in seconds."""
    step: int = 0
    """Step of the bar; 0 without one."""
    is_idle: bool = False
    """Whether the bar is idle time; ``stage`` then names the cause."""


def draw_timeline(bars: Sequence[Bar]) -> list[Html]:
    """Draw the bars from the start of the first one, as an svg with its legend.

    Return nothing without bars.
    """
    if not bars:
        return []
    start, end = min(bar.start_s for bar in bars), max(bar.end_s for bar in bars)
    length = WIDTH - LEFT - RIGHT
    scale = ChartAxis(low=start, high=end if end > start else start + 1.0, start=LEFT, length=length)
    half_pixel_s = 0.5 * (scale.high - scale.low) / length
    pools: dict[str, dict[str, list[Bar]]] = {}
    for bar in bars:
        pools.setdefault(bar.pool, {}).setdefault(bar.lane, []).append(bar)
    colours = colours_of(bars)
    parts, y = [], TOP
    for pool, lanes in pools.items():
        parts.append(text(0, y + LANE - 5, pool, "phasename"))
        for name, own in lanes.items():
            parts.append(box("lane", (LEFT, LEFT + length), y, LANE))
            parts.append(text(LEFT - 8, y + LANE - 5, name, "end"))
            parts += [_drawn(bar, y, scale, colours) for bar in merged(own, half_pixel_s)]
            y += LANE + GAP
        y += POOL_GAP
    height = y - POOL_GAP - GAP + BOTTOM
    keys = [el("span", name, class_=f"key k{colour}") for name, colour in colours.items()]
    if any(bar.is_idle for bar in bars):
        keys.append(el("span", "idle, with its cause", class_="key k-rest"))
    drawn = svg("timeline", WIDTH, height, _axis(scale, height), parts)
    return [el("div", drawn, class_="scroll"), el("p", keys, class_="hint legend")]


def colours_of(bars: Iterable[Bar]) -> Mapping[str, int]:
    """Assign a colour to every active stage; the stages with the most time get different colours."""
    taken: dict[str, float] = defaultdict(float)
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        if not bar.is_idle:
            taken[bar.stage] += bar.end_s - bar.start_s
    longest = sorted(taken, key=lambda stage: -taken[stage])
    return {stage: longest.index(stage) % COLOURS for stage in taken}


def merged(bars: Sequence[Bar], gap_s: float) -> list[Bar]:
    """Merge bars of one lane that share stage and step and are less than ``gap_s`` apart, in order of
    time.
    """
    joined: list[Bar] = []
    for bar in sorted(bars, key=lambda one: (one.start_s, one.end_s)):
        last = joined[-1] if joined else bar
        if (last.stage, last.step) == (bar.stage, bar.step) and bar.start_s - last.end_s < gap_s:
            joined[-1:] = [replace(last, end_s=max(last.end_s, bar.end_s))]
        else:
            joined.append(bar)
    return joined


def _drawn(bar: Bar, y: int, scale: ChartAxis, colours: Mapping[str, int]) -> Html:
    start = scale(bar.start_s)
    kind = "k-rest" if bar.is_idle else f"k{colours[bar.stage]}"
    step = f", step {bar.step}" if bar.step else ""
    since = duration(max(0.0, bar.start_s - scale.low))
    told = el("title", f"{bar.stage}{step}: {duration(bar.end_s - bar.start_s)} from {since}")
    return box(f"span {kind}", (start, max(start + 0.5, scale(bar.end_s))), y, LANE, told)


def _axis(scale: ChartAxis, height: int) -> list[Html]:
    """Draw an axis of round seconds since the first bar."""
    parts = []
    for value in ticks(0.0, scale.high - scale.low, count=8):
        x = scale(scale.low + value)
        parts.append(line("grid", (x, x), (TOP, height - BOTTOM)))
        parts.append(text(x, height - 8, f"{value:g} s", "tick middle"))
    return parts
