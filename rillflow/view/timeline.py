"""Timeline: what every pool did when, as one SVG; a run's spans and a simulation's look alike.

spans of a run, placement ──┐
                            ├─ Bar: pool, lane, stage, from, to ─ merge ─> lanes under their pools
spans of a simulation ──────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rillflow.observe.wording import duration
from rillflow.view.chart import ticks
from rillflow.view.html import Html, el
from rillflow.view.run_data import RunData
from rillflow.view.style import COLOURS

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 190, 14, 8, 26
LANE, GAP, POOL_GAP = 18, 4, 10
SHOWN_STEPS = 4
"""Steps of a run that are drawn: its last ones."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One thing that took time.

    Example:
        Bar(pool="main", lane="policy", stage="policy.update", start_s=1.0, end_s=3.5, step=1)
    """

    pool: str
    """The devices it took."""
    lane: str
    """The line of the pool it is drawn on: a role, a replica."""
    stage: str
    """What it was; bars of one name have one colour."""
    start_s: float
    """When it began."""
    end_s: float
    """When it ended."""
    step: int = 0
    """The step it belongs to; 0 where it belongs to none."""
    is_idle: bool = False
    """Whether nothing was done: the name is then the cause."""


@dataclass(frozen=True, kw_only=True)
class _Lane:
    pool: str
    name: str
    y: int
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True)
class _Scale:
    start_s: float
    end_s: float

    def __call__(self, time_s: float) -> float:
        share = (time_s - self.start_s) / (self.end_s - self.start_s)
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def bars_of_run(data: RunData, last_steps: int = SHOWN_STEPS) -> list[Bar]:
    """The last steps of a run's last phase, each stage on its role's line of its role's pool."""
    if not data.phases:
        return []
    phase = data.phases[-1]
    first = max(phase.first, phase.last - last_steps + 1)
    spans = [span for span in data.spans if first <= span.step <= phase.last]
    placed, pools = data.setting("placement.roles"), data.setting("placement.pools")
    by_role = placed if isinstance(placed, Mapping) else {}
    home = next(iter(pools)) if isinstance(pools, Mapping) and pools else "main"
    bars = []
    for span in spans:
        role = span.stage.partition(".")[0]
        pool = str(by_role[role]) if role in by_role else "controller" if role == "controller" else home
        bars.append(
            Bar(
                pool=pool,
                lane=role,
                stage=span.stage,
                start_s=span.start_s,
                end_s=span.start_s + span.duration_s,
                step=span.step,
            )
        )
    return bars


def draw_timeline(bars: Sequence[Bar]) -> list[Html]:
    """The bars as an svg and its legend, from the first one's beginning; nothing where there are none."""
    if not bars:
        return []
    start, end = min(bar.start_s for bar in bars), max(bar.end_s for bar in bars)
    scale = _Scale(start_s=start, end_s=end if end > start else start + 1.0)
    colours = colours_of(bars)
    lanes = _lanes(bars, scale)
    height = lanes[-1].y + LANE + BOTTOM
    parts = [*_axis(scale, height), *_pool_names(lanes)]
    for lane in lanes:
        parts += _lane(lane, scale, colours)
    svg = el("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", class_="timeline", role="img")
    return [el("div", svg, class_="scroll"), _legend(bars, colours)]


def colours_of(bars: Iterable[Bar]) -> Mapping[str, int]:
    """A colour for every stage that does something; those that take longest differ from one another."""
    taken: dict[str, float] = defaultdict(float)
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        if not bar.is_idle:
            taken[bar.stage] += bar.end_s - bar.start_s
    longest = sorted(taken, key=lambda stage: -taken[stage])
    return {stage: longest.index(stage) % COLOURS for stage in taken}


def merged(bars: Sequence[Bar], gap_s: float) -> list[Bar]:
    """Bars of one lane in order of time, those of one stage and step less than ``gap_s`` apart made one."""
    joined: list[Bar] = []
    for bar in sorted(bars, key=lambda one: (one.start_s, one.end_s)):
        last = joined[-1] if joined else None
        alike = last is not None and (last.stage, last.step) == (bar.stage, bar.step)
        if last is not None and alike and bar.start_s - last.end_s < gap_s:
            joined[-1] = replace(last, end_s=max(last.end_s, bar.end_s))
        else:
            joined.append(bar)
    return joined


def _lanes(bars: Sequence[Bar], scale: _Scale) -> list[_Lane]:
    """Lanes under their pools, in order of appearance."""
    pools: dict[str, dict[str, list[Bar]]] = {}
    for bar in bars:
        pools.setdefault(bar.pool, {}).setdefault(bar.lane, []).append(bar)
    half_pixel_s = 0.5 * (scale.end_s - scale.start_s) / (WIDTH - LEFT - RIGHT)
    lanes, y = [], TOP
    for pool, by_lane in pools.items():
        for name, own in by_lane.items():
            lanes.append(_Lane(pool=pool, name=name, y=y, bars=merged(own, half_pixel_s)))
            y += LANE + GAP
        y += POOL_GAP
    return lanes


def _lane(lane: _Lane, scale: _Scale, colours: Mapping[str, int]) -> list[Html]:
    ground = {"x": LEFT, "y": lane.y, "width": WIDTH - LEFT - RIGHT, "height": LANE}
    parts = [el("rect", class_="lane", **ground)]
    parts.append(el("text", lane.name, class_="end", x=LEFT - 8, y=lane.y + LANE - 5))
    for bar in lane.bars:
        x, width = scale(bar.start_s), max(0.5, scale(bar.end_s) - scale(bar.start_s))
        box = {"x": f"{x:.1f}", "width": f"{width:.1f}", "y": str(lane.y)}
        kind = "k-rest" if bar.is_idle else f"k{colours[bar.stage]}"
        step = f", step {bar.step}" if bar.step else ""
        told = f"{bar.stage}{step}: {duration(bar.end_s - bar.start_s)} from {_clock(bar, scale)}"
        parts.append(el("rect", el("title", told), class_=f"span {kind}", height=LANE, **box))
    return parts


def _clock(bar: Bar, scale: _Scale) -> str:
    return duration(max(0.0, bar.start_s - scale.start_s))


def _pool_names(lanes: Sequence[_Lane]) -> list[Html]:
    """Each pool's name once, left of its first lane."""
    first = {lane.pool: lane for lane in reversed(lanes)}
    return [
        el("text", lane.pool, class_="phasename", x=0, y=lane.y + LANE - 5)
        for lane in reversed(first.values())
    ]


def _axis(scale: _Scale, height: int) -> list[Html]:
    """Round seconds since the first bar."""
    parts = []
    for value in ticks(0.0, scale.end_s - scale.start_s, count=8):
        x = f"{scale(scale.start_s + value):.1f}"
        parts.append(el("line", class_="grid", x1=x, x2=x, y1=TOP, y2=height - BOTTOM))
        parts.append(el("text", f"{value:g} s", class_="tick middle", x=x, y=height - 8))
    return parts


def _legend(bars: Iterable[Bar], colours: Mapping[str, int]) -> Html:
    keys = [el("span", name, class_=f"key k{colour}") for name, colour in colours.items()]
    if any(bar.is_idle for bar in bars):
        keys.append(el("span", "idle, with its cause", class_="key k-rest"))
    return el("p", keys, class_="hint legend")
