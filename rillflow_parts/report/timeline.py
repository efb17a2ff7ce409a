"""Timeline: draw the activity of every pool over time as one SVG, for a run's spans or a simulation's.

ranks of a run ──────────┐
                         ├─ Bar: pool, lane, stage, from, to ─ merge ─> lanes under their pools
spans of a simulation ───┘
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rillflow.runs.formatting import duration
from rillflow_parts.report.html import COLOURS, Child, Html, el

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


NO_COLOURS: Mapping[str, int] = {}
"""No stage has a colour yet."""


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Linear map from seconds to coordinates."""

    low: float
    """Seconds at the start."""
    high: float
    """Seconds at the end."""
    start: float
    """Coordinate of ``low``."""
    length: float
    """Distance from the coordinate of ``low`` to that of ``high``."""

    def __call__(self, value: float) -> float:
        """Return the coordinate of a time."""
        return self.start + (value - self.low) / (self.high - self.low) * self.length


def draw_timeline(bars: Sequence[Bar], known: Mapping[str, int] = NO_COLOURS) -> list[Html]:
    """Draw the bars from the start of the first one, as an svg with its legend.

    Return nothing without bars.

    Args:
        bars: the bars.
        known: colours that stages have on the page already.
    """
    if not bars:
        return []
    start, end = min(bar.start_s for bar in bars), max(bar.end_s for bar in bars)
    length = WIDTH - LEFT - RIGHT
    scale = _Scale(low=start, high=end if end > start else start + 1.0, start=LEFT, length=length)
    half_pixel_s = 0.5 * (scale.high - scale.low) / length
    pools: dict[str, dict[str, list[Bar]]] = {}
    for bar in bars:
        pools.setdefault(bar.pool, {}).setdefault(bar.lane, []).append(bar)
    colours = colours_of(bars, known)
    parts, y = [], TOP
    for pool, lanes in pools.items():
        parts.append(_text(0, y + LANE - 5, pool, "phasename"))
        for name, own in lanes.items():
            parts.append(_box("lane", (LEFT, LEFT + length), y, LANE))
            parts.append(_text(LEFT - 8, y + LANE - 5, name, "end"))
            parts += [_drawn(bar, y, scale, colours) for bar in merged(own, half_pixel_s)]
            y += LANE + GAP
        y += POOL_GAP
    height = y - POOL_GAP - GAP + BOTTOM
    keys = [el("span", name, class_=f"key k{colour}") for name, colour in colours.items()]
    if any(bar.is_idle for bar in bars):
        keys.append(el("span", "idle, with its cause", class_="key k-rest"))
    drawn = _svg("timeline", WIDTH, height, _axis(scale, height), parts)
    return [el("div", drawn, class_="scroll"), el("p", keys, class_="hint legend")]


def colours_of(bars: Iterable[Bar], known: Mapping[str, int] = NO_COLOURS) -> Mapping[str, int]:
    """Assign a colour to every active stage: the known one, else a free one; the longest stages first."""
    taken: dict[str, float] = defaultdict(float)
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        if not bar.is_idle:
            taken[bar.stage] += bar.end_s - bar.start_s
    longest = sorted(taken, key=lambda stage: -taken[stage])
    colours, used = dict[str, int](), set(known.values())
    free = [place for place in range(COLOURS) if place not in used] or [*range(COLOURS)]
    others = [stage for stage in longest if stage not in known]
    for stage in taken:
        colours[stage] = known[stage] if stage in known else free[others.index(stage) % len(free)]
    return colours


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


def _drawn(bar: Bar, y: int, scale: _Scale, colours: Mapping[str, int]) -> Html:
    start = scale(bar.start_s)
    kind = "k-rest" if bar.is_idle else f"k{colours[bar.stage]}"
    step = f", step {bar.step}" if bar.step else ""
    since = duration(max(0.0, bar.start_s - scale.low))
    told = el("title", f"{bar.stage}{step}: {duration(bar.end_s - bar.start_s)} from {since}")
    return _box(f"span {kind}", (start, max(start + 0.5, scale(bar.end_s))), y, LANE, told)


def _axis(scale: _Scale, height: int) -> list[Html]:
    """Draw an axis of round seconds since the first bar."""
    parts = []
    for value in ticks(0.0, scale.high - scale.low, count=8):
        x = scale(scale.low + value)
        parts.append(_line("grid", (x, x), (TOP, height - BOTTOM)))
        parts.append(_text(x, height - 8, f"{value:g} s", "tick middle"))
    return parts


def _svg(kind: str, width: int, height: int, *parts: Child) -> Html:
    """Return a picture of ``width`` x ``height`` units, which scales to the width of its card."""
    return el("svg", parts, viewBox=f"0 0 {width} {height}", class_=kind, role="img")


def _text(x: float, y: float, words: str, kind: str) -> Html:
    """Return a text whose baseline begins at a place, or ends there for the class ``end``."""
    return el("text", words, class_=kind, x=x, y=y)


def _line(kind: str, x: tuple[float, float], y: tuple[float, float]) -> Html:
    """Return a line between two places."""
    return el("line", class_=kind, x1=x[0], x2=x[1], y1=y[0], y2=y[1])


def _box(kind: str, x: tuple[float, float], y: float, height: float, *parts: Child) -> Html:
    """Return a rectangle from ``x[0]`` to ``x[1]``, whose upper edge is at ``y``."""
    return el("rect", parts, class_=kind, height=height, x=x[0], width=x[1] - x[0], y=y)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about ``count`` round values between two ends."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [round(place * step, 12) for place in range(first, last + 1)]
