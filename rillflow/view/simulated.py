"""Simulated: what a simulation found out, as lines of text, as data, and as bars of the timeline.

Simulation ─┬─ simulation_lines ─> a table of pools, idle time by cause, ages of rows
            ├─ simulation_data ──> JSON
            └─ simulated_bars ───> the timeline that a run's spans are drawn on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rillflow.observe.wording import number, size
from rillflow.planner.plan import Plan
from rillflow.planner.simulator.result import Simulation
from rillflow.view.columns import columns, seconds
from rillflow.view.timeline import Bar

MOST_REPLICAS = 16
"""Replicas of a pool that are drawn: its first ones."""
BESIDE = "beside"
"""The lane of what holds no devices: functions and formulas."""


def simulation_lines(plan: Plan, found: Simulation) -> list[str]:
    """What a person wants to know of it."""
    devices = {pool.name: pool.devices for pool in plan.pools}
    rows = [("pool", "devices", "busy", "idle", "idle because of", "most memory a device")]
    for pool in found.pools:
        causes = ", ".join(
            f"{cause} {idle_s / found.wall_s:.0%}"
            for cause, idle_s in sorted(pool.idle_s.items(), key=lambda entry: -entry[1])
            if idle_s > 0.005 * found.wall_s
        )
        busy = f"{1 - pool.idle_share:.0%}"
        rows.append(
            (
                pool.pool,
                str(devices[pool.pool]),
                busy,
                f"{pool.idle_share:.0%}",
                causes,
                size(pool.peak_bytes),
            )
        )
    ages = ", ".join(f"{age} old: {count / found.trained:.0%}" for age, count in sorted(found.ages.items()))
    lines = [
        f"a step   {seconds(found.median_step_s)} (median), {seconds(found.settled_step_s)} once settled",
        f"rate     {number(found.rows_per_s)} rows/s, {number(found.tokens_per_s)} tokens/s",
        f"rows     {found.begun:,} begun, {found.trained:,} trained, {found.unfinished:,} under way"
        + "".join(f", {count:,} dropped: {reason}" for reason, count in found.dropped.items()),
    ]
    if plan.freshness:
        lines.append(f"age      versions between a row's oldest token and its training: {ages}")
    return [*lines, "", *columns(rows)]


def simulation_data(plan: Plan, found: Simulation) -> dict[str, Any]:
    """The same as JSON has it, seconds and bytes; the timeline too."""
    return {
        "plan": plan.name,
        "freshness": plan.freshness,
        "step_s": list(found.step_s),
        "median_step_s": found.median_step_s,
        "settled_step_s": found.settled_step_s,
        "rows_per_s": found.rows_per_s,
        "tokens_per_s": found.tokens_per_s,
        "begun": found.begun,
        "trained": found.trained,
        "dropped": dict(found.dropped),
        "unfinished": found.unfinished,
        "ages": {str(age): count for age, count in sorted(found.ages.items())},
        "pools": [
            {
                "pool": pool.pool,
                "busy_s": pool.busy_s,
                "idle_s": {str(cause): idle_s for cause, idle_s in pool.idle_s.items()},
                "peak_bytes": pool.peak_bytes,
            }
            for pool in found.pools
        ],
        "spans": [
            {
                "pool": span.pool,
                "lane": span.lane,
                "stage": span.stage,
                "step": span.step,
                "start_s": span.start_s,
                "duration_s": span.duration_s,
                "cause": None if span.cause is None else str(span.cause),
            }
            for span in found.spans
        ],
    }


def simulated_bars(found: Simulation, steps: int) -> Sequence[Bar]:
    """The bars of the first steps, replica by replica; what holds no devices comes last."""
    until = sum(found.step_s[:steps])
    bars = [
        Bar(
            pool=span.pool or BESIDE,
            lane=f"replica {span.lane:>2}" if span.pool and span.lane else "",
            stage=span.stage if span.cause is None else str(span.cause),
            start_s=span.start_s,
            end_s=min(span.end_s, until),
            step=span.step,
            is_idle=span.cause is not None,
        )
        for span in found.spans
        if span.start_s < until and span.lane <= MOST_REPLICAS
    ]
    return sorted(bars, key=lambda bar: (bar.pool == BESIDE, bar.pool, bar.lane, bar.start_s))
