"""Plans: the result of a search as lines of text and as data, the decision first.

Statement, Ranking, sizes, simulated steps ─> Decision ─┬─ decision_lines ─> text: first what to do, then why
                                                        └─ decision_data ──> JSON
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rillflow.observe.wording import number, size
from rillflow.planner.evaluate import PoolUse
from rillflow.planner.objective import Goal, Objective
from rillflow.planner.plan import Plan
from rillflow.planner.ranking import Ranked, Ranking
from rillflow.planner.search import LITTLE, ClusterSize
from rillflow.planner.sensitivity import Variation
from rillflow.planner.statement import Statement
from rillflow.view.chart import Point, Series
from rillflow.view.columns import columns, seconds

AXES = "devices; rows a second"
"""What the curves' axes are."""
TOLD = 0.1
"""Simulated and computed steps that differ by more, where nobody measured the error, are told."""
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """All that the planner found out."""

    statement: Statement
    """What was asked."""
    objective: Objective
    """What was to be least."""
    ranking: Ranking
    """The best plans."""
    sizes: Sequence[ClusterSize]
    """The best plan on other sizes of the cluster."""
    simulated_s: Sequence[float]
    """Seconds of a step of the first plans, simulated."""
    variations: Sequence[Variation]
    """The same with other lengths."""
    pays_with: int | None
    """Prompts of a step with which the next size would pay; none of those tried."""

    @property
    def best(self) -> Ranked:
        """The best plan."""
        return self.ranking.best[0]


def decision_lines(found: Decision) -> list[str]:
    """What to do and what it takes, then how sure that is, then the rest."""
    best, statement = found.best, found.statement
    nowhere = f", {found.ranking.nowhere:,} fit nowhere" if found.ranking.nowhere else ""
    return [
        *_head(found),
        f"how exact: {statement.accuracy}",
        *_sensitivity(found),
        "",
        f"{found.ranking.placements:,} placements{nowhere}; the best {len(found.ranking.best)}",
        *columns(_best_rows(found), left=2, text=2),
        *_simulated_notes(found),
        "",
        "the best one",
        *columns(_unit_rows(best.plan)),
        "",
        *columns(_stage_rows(best), left=2),
        "",
        *columns(_pool_rows(best)),
        "",
        "throughput against the size of the cluster",
        *columns(_size_rows(found.sizes)),
        *_warnings(found),
        "",
        *(f"assumed: {sentence}" for sentence in statement.assumptions),
        *_placement(best.plan),
    ]


def decision_data(found: Decision) -> dict[str, Any]:
    """The same as JSON has it: seconds, bytes, devices."""
    return {
        "objective": found.objective.goal.value,
        "placements": found.ranking.placements,
        "nowhere": found.ranking.nowhere,
        "best": [_ranked_data(found, one) for one in found.ranking.best],
        "simulated_s": list(found.simulated_s),
        "sizes": [
            {
                "devices": one.devices,
                "step_s": None if one.best is None else one.best.evaluation.step_s,
                "rows_per_s": one.rows_per_s,
                "gain": one.gain,
                "gains_little": one.gains_little,
            }
            for one in found.sizes
        ],
        "variations": [asdict(one) for one in found.variations],
        "accuracy": found.statement.accuracy,
        "assumptions": list(found.statement.assumptions),
    }


def growth_curves(sizes: Sequence[ClusterSize]) -> list[Series]:
    """Rows a second by devices, and what they would be if the smallest size were multiplied."""
    points = [Point(x=one.devices, y=one.rows_per_s) for one in sizes if one.best is not None]
    ideal = [Point(x=one.x, y=points[0].y * one.x / points[0].x) for one in points]
    return [Series(label="best plan", points=points), Series(label="ideal", points=ideal)]


def pools_text(plan: Plan) -> str:
    """Pools by their units. Example: ``policy reference | critic``."""
    return " | ".join(
        " ".join(name for name, unit in plan.units.items() if unit.pool == pool.name) for pool in plan.pools
    )


def _range(statement: Statement, spent: float) -> str:
    found = statement.range_s(spent)
    return "" if found is None else f" ({seconds(found[0])} to {seconds(found[1])})"


def _head(found: Decision) -> Iterator[str]:
    """The step, the devices, the whole run, and what running ahead changes."""
    best, statement = found.best, found.statement
    step_s, hardware = best.evaluation.step_s, statement.problem.hardware
    yield f"a step: {seconds(step_s)}{_range(statement, step_s)} on {best.evaluation.devices} devices"
    unused = hardware.devices - best.evaluation.devices
    if unused:
        yield f"unused: {unused} of {hardware.devices} devices, which would not make it better"
    price = sum(pool.devices * hardware.fleet(pool.fleet).price_per_hour for pool in best.plan.pools)
    steps = statement.steps or 100
    hours = steps * step_s / HOUR_S
    cost = f", {number(hours * price)} at the cluster's prices" if price else ""
    yield f"{steps:,} steps: {number(hours)} hours{cost}"
    if best.plan.freshness:
        yield (
            f"freshness {best.plan.freshness}: rows are trained on up to {best.plan.freshness} updates after "
            "the weights that wrote them, which changes what is learnt"
        )


def _sensitivity(found: Decision) -> Iterator[str]:
    for one in found.variations:
        step = seconds(one.step_s) if one.step_s < float("inf") else "no room"
        flips = f"; then {pools_text(found.ranking.best[one.best].plan)} is better" if one.best else ""
        gain = "" if one.gain is None else f"; doubling then gains {one.gain:+.0%}"
        yield f"with {one.what}: {step}{flips}{gain}"


def _best_rows(found: Decision) -> list[tuple[str, ...]]:
    goal = found.objective.goal.value if found.objective.goal is not Goal.STEP else ""
    rows: list[tuple[str, ...]] = [
        ("", "pools", "devices", "freshness", "step", "simulated", goal, "behind by", "")
    ]
    for place, one in enumerate(found.ranking.best):
        simulated = seconds(found.simulated_s[place]) if place < len(found.simulated_s) else ""
        rows.append(
            (
                f"{place + 1}.",
                pools_text(one.plan),
                " + ".join(str(pool.devices) for pool in one.plan.pools),
                str(one.plan.freshness),
                seconds(one.evaluation.step_s),
                simulated,
                _value(found.objective, one) if goal else "",
                "" if one.cause is None else one.cause.value,
                one.why,
            )
        )
    return rows


def _value(objective: Objective, one: Ranked) -> str:
    match objective.goal:
        case Goal.DEVICE_HOURS:
            return f"{number(one.value)} device-hours"
        case Goal.DEVICES:
            return f"{one.evaluation.devices} devices"
        case _:
            return f"{number(one.value)} a step"


def _simulated_notes(found: Decision) -> Iterator[str]:
    """Where a simulated step differs from the computed one by more than predictions are off."""
    accuracy = found.statement.problem.hardware.accuracy
    told = TOLD if accuracy is None else accuracy.median
    for place, (one, simulated) in enumerate(zip(found.ranking.best, found.simulated_s, strict=False), 1):
        more = simulated / one.evaluation.step_s - 1
        if abs(more) > told:
            yield f"note: {place}. takes {more:+.0%} when simulated row by row; trust the simulated step"


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("model", "pool", "devices", "trains and scores on", "generates with")]
    for name, unit in plan.units.items():
        tp = f"tp {unit.generate_tp}" if unit.generate_tp else ""
        pool = plan.pool(unit.pool)
        rows.append((name, pool.name, f"{pool.devices} x {pool.fleet}", str(unit.grid), tp))
    return rows


def _stage_rows(one: Ranked) -> list[tuple[str, ...]]:
    """What each stage takes, and its share of what its pool does; generation that streams until it is dry."""
    rows: list[tuple[str, ...]] = [("stage", "pool", "takes", "share of its pool's work")]
    spent = one.evaluation.seconds
    pools = {timing.stage: timing.pool for timing in one.evaluation.schedule.timings}
    whole = {
        pool: sum(spent[stage] for stage, other in pools.items() if other == pool) for pool in pools.values()
    }
    for stage, name in one.evaluation.names.items():
        pool = pools[stage]
        share = f"{spent[stage] / whole[pool]:.0%}" if pool and whole[pool] else ""
        rows.append((name, pool or "beside", seconds(spent[stage]), share))
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


def _size_rows(sizes: Sequence[ClusterSize]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("devices", "step", "rows/s", "gain", "rows/s a device", "pools")]
    for one in sizes:
        if one.best is None:
            rows.append((str(one.devices), "nothing fits", "", "", "", ""))
            continue
        gain = "" if one.gain is None else f"{one.gain:+.0%}"
        each = number(one.rows_per_s / one.devices)
        step, pools = seconds(one.best.evaluation.step_s), pools_text(one.best.plan)
        rows.append((str(one.devices), step, number(one.rows_per_s), gain, each, pools))
    return rows


def _warnings(found: Decision) -> Iterator[str]:
    hardware = found.statement.problem.hardware
    for before, one in pairwise(found.sizes):
        if one.gains_little and one.gain is not None:
            yield (
                f"warning: {one.devices} devices gain {one.gain:.1%} over {before.devices}, less than "
                f"{LITTLE:.0%}"
            )
            if before.devices == hardware.devices:
                batch = (
                    f"{found.pays_with:,} prompts a step" if found.pays_with else "no batch that was tried"
                )
                yield f"{one.devices} devices would pay with {batch}"
    for fleet in hardware.fleets:
        is_unsaid = fleet.between_bandwidth == fleet.device.inside_bandwidth
        larger = any(one.devices > hardware.devices for one in found.sizes)
        if is_unsaid and fleet.devices == fleet.per_machine and larger:
            yield f"note: nobody says how machines of {fleet.name} are linked; here as fast as within one"


def _placement(plan: Plan) -> list[str]:
    """The recipe's section, where a run can follow the plan."""
    if plan.freshness or "sampler" in plan.units or any(unit.grid.ep > 1 for unit in plan.units.values()):
        return ["", "a recipe cannot say this placement yet: --out keeps it as a plan"]
    tp = max(unit.generate_tp for unit in plan.units.values())
    pools = ", ".join(f"{pool.name}_pool = {pool.devices}" for pool in plan.pools)
    roles = ", ".join(f'{name} = "{unit.pool}_pool"' for name, unit in plan.units.items())
    grids = [
        f"train.{name} = {{ {'fsdp' if grid.is_sharded else 'dp'} = {grid.dp}, pp = {grid.pp}, "
        f"tp = {grid.tp} }}"
        for name, unit in plan.units.items()
        for grid in [unit.grid]
    ]
    head = ["", "[placement]", f"pools = {{ {pools} }}", f"roles = {{ {roles} }}"]
    return [*head, *grids, f"generate.tp = {max(1, tp)}"]


def _ranked_data(found: Decision, one: Ranked) -> dict[str, Any]:
    plan, spent = one.plan, one.evaluation
    return {
        "pools": [{"name": pool.name, "fleet": pool.fleet, "devices": pool.devices} for pool in plan.pools],
        "units": {
            name: {"pool": unit.pool, **asdict(unit.grid), "generate_tp": unit.generate_tp}
            for name, unit in plan.units.items()
        },
        "freshness": plan.freshness,
        "value": one.value,
        "cause": None if one.cause is None else one.cause.value,
        "why": one.why,
        "step_s": spent.step_s,
        "range_s": found.statement.range_s(spent.step_s),
        "devices": spent.devices,
        "rows_per_s": found.statement.problem.workload.rows / spent.step_s if spent.step_s else None,
        "stages": [
            {
                "stage": spent.names[timing.stage],
                "pool": timing.pool,
                "start_s": timing.start_s,
                "end_s": timing.end_s,
            }
            for timing in spent.schedule.timings
        ],
        "pool_use": [asdict(pool) for pool in spent.pools],
    }
