"""Ranked: the result of a search as lines of text and as data.

Ranking ─┬─ ranking_lines ─> the best plans, the best one's stages and pools, why each other placement loses
         └─ ranking_data ──> JSON
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rillflow.observe.wording import number, size
from rillflow.planner.evaluate import Evaluation, PoolUse
from rillflow.planner.mapping.ranking import Loser, Ranked, Ranking
from rillflow.planner.objective import Goal, Objective
from rillflow.planner.plan import Plan
from rillflow.planner.problem import Problem
from rillflow.view.columns import columns, seconds


def ranking_lines(problem: Problem, objective: Objective, found: Ranking) -> list[str]:
    """What a person wants to know of it: the plans first, the reasons last."""
    best = found.best[0]
    counts = found.counts
    said = "exact" if found.is_exact else f"a heuristic: no plan is below {found.bound:.4g}"
    return [
        f"{counts.placements:,} placements, {counts.bounded:,} cut by their bounds, {counts.solved:,} "
        f"allocations solved; {said}",
        "",
        f"the {len(found.best)} best placements",
        *columns(_best_rows(objective, found.best), left=2, text=2),
        "",
        "the best one",
        *columns(_unit_rows(best.plan)),
        "",
        *columns(_stage_rows(problem, best), left=2),
        "",
        *columns(_pool_rows(best)),
        *_loser_lines(found.losers),
    ]


def ranking_data(problem: Problem, objective: Objective, found: Ranking) -> dict[str, Any]:
    """The same as JSON has it: seconds, bytes, devices."""
    return {
        "objective": objective.goal.value,
        "is_exact": found.is_exact,
        "bound": found.bound,
        "placements": found.counts.placements,
        "solved": found.counts.solved,
        "best": [_ranked_data(problem, one) for one in found.best],
        "losers": [
            {
                "pools": [list(names) for names in loser.pools],
                "freshness": loser.freshness,
                "bound": loser.bound if math.isfinite(loser.bound) else None,
                "step_s": None if loser.found is None else loser.found.evaluation.step_s,
                "cause": None if loser.cause is None else loser.cause.value,
                "why": loser.why,
            }
            for loser in found.losers
        ],
    }


def pools_text(pools: Iterable[Sequence[str]]) -> str:
    """Pools by their units. Example: ``policy reference | critic``."""
    return " | ".join(" ".join(names) for names in pools)


def placement_of(plan: Plan) -> list[list[str]]:
    """Names of the units of each pool."""
    return [[name for name, unit in plan.units.items() if unit.pool == pool.name] for pool in plan.pools]


def value_text(objective: Objective, one: Ranked) -> str:
    """The objective's value with its unit."""
    match objective.goal:
        case Goal.STEP:
            return seconds(one.evaluation.step_s)
        case Goal.DEVICE_HOURS:
            return f"{number(one.value)} device-hours"
        case Goal.DEVICES:
            return f"{one.evaluation.devices} devices"
        case _:
            return f"{number(one.value)} a step"


def _best_rows(objective: Objective, best: Sequence[Ranked]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "",
            "pools",
            "devices",
            "freshness",
            "step",
            objective.goal.value if _differs(objective) else "",
            "behind by",
            "",
        )
    ]
    for place, one in enumerate(best, 1):
        sizes = " + ".join(str(pool.devices) for pool in one.plan.pools)
        value = value_text(objective, one) if _differs(objective) else ""
        rows.append(
            (
                f"{place}.",
                pools_text(placement_of(one.plan)),
                sizes,
                str(one.plan.freshness),
                seconds(one.evaluation.step_s),
                value,
                "" if one.cause is None else one.cause.value,
                one.why,
            )
        )
    return rows


def _differs(objective: Objective) -> bool:
    return objective.goal is not Goal.STEP


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("model", "pool", "devices", "trains and scores on", "generates with")]
    for name, unit in plan.units.items():
        tp = f"tp {unit.generate_tp}" if unit.generate_tp else ""
        pool = plan.pool(unit.pool)
        rows.append((name, pool.name, f"{pool.devices} x {pool.fleet}", str(unit.grid), tp))
    return rows


def _stage_rows(problem: Problem, one: Ranked) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("stage", "pool", "begins", "takes", "share of step")]
    for timing in one.evaluation.schedule.timings:
        takes = timing.end_s - timing.start_s
        share = takes / one.evaluation.step_s if one.evaluation.step_s else 0.0
        stage = problem.graph.stages[timing.stage]
        rows.append((stage.name, timing.pool, seconds(timing.start_s), seconds(takes), f"{share:.0%}"))
    return rows


def _pool_rows(one: Ranked) -> list[tuple[str, ...]]:
    head = ("pool", "busy", "idle", "kept a device", "a stage's beside", "left for cache")
    return [head, *map(_pool_row, one.evaluation.pools)]


def _pool_row(pool: PoolUse) -> tuple[str, ...]:
    return (
        pool.name,
        seconds(pool.busy_s),
        f"{pool.idle_share:.0%}",
        size(pool.resident_bytes),
        size(pool.working_bytes),
        size(max(0.0, pool.room_bytes)),
    )


def _loser_lines(losers: Sequence[Loser]) -> list[str]:
    if not losers:
        return []
    rows: list[tuple[str, ...]] = [("pools", "freshness", "loses by", "")]
    for loser in losers:
        cause = "" if loser.cause is None else loser.cause.value
        rows.append((pools_text(loser.pools), str(loser.freshness), cause, loser.why))
    return ["", "why the others lose", *columns(rows, left=4)]


def _ranked_data(problem: Problem, one: Ranked) -> dict[str, Any]:
    plan, found = one.plan, one.evaluation
    return {
        "pools": [{"name": pool.name, "fleet": pool.fleet, "devices": pool.devices} for pool in plan.pools],
        "units": {
            name: {
                "pool": unit.pool,
                "dp": unit.grid.dp,
                "pp": unit.grid.pp,
                "tp": unit.grid.tp,
                "ep": unit.grid.ep,
                "is_sharded": unit.grid.is_sharded,
                "generate_tp": unit.generate_tp,
            }
            for name, unit in plan.units.items()
        },
        "freshness": plan.freshness,
        "value": one.value,
        "cause": None if one.cause is None else one.cause.value,
        "why": one.why,
        **_evaluation_data(problem, found),
    }


def _evaluation_data(problem: Problem, found: Evaluation) -> dict[str, Any]:
    return {
        "step_s": found.step_s,
        "devices": found.devices,
        "rows_per_s": problem.workload.rows / found.step_s if found.step_s else None,
        "stages": [
            {
                "stage": problem.graph.stages[timing.stage].name,
                "pool": timing.pool,
                "start_s": timing.start_s,
                "end_s": timing.end_s,
            }
            for timing in found.schedule.timings
        ],
        "pool_use": [
            {
                "pool": pool.name,
                "busy_s": pool.busy_s,
                "idle_share": pool.idle_share,
                "resident_bytes": pool.resident_bytes,
                "working_bytes": pool.working_bytes,
                "room_bytes": pool.room_bytes,
            }
            for pool in found.pools
        ],
    }
