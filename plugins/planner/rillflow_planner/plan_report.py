"""Plans: show the result of a search, a simulation or a calibration as text, as data, and as a page.

Statement, Ranking, sizes, simulated steps ─> Decision ─┬─ decision_lines ─> text: first what to do, then why
                                                        └─ decision_data ──> JSON
Simulation, Calibration ─ in the same way

Simulation ─ simulated_bars ─ timeline ─┬─ plan_page ─> one page in the style of a run's report
lines of text ──────────────────────────┘

Every time is shown with its range: 80% of the steps predicted in the same way took a time within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

from rillflow.config.toml_text import inline_text
from rillflow.placement.plan import GATHERED, Plan
from rillflow.runs.formatting import columns, number, seconds, size
from rillflow_parts.fusion.alignment import fused_of
from rillflow_parts.report.html import Html, el, page, section
from rillflow_parts.report.timeline import MOST_LANES, SHOWN_STEPS, Bar, draw_timeline
from rillflow_planner.hardware import Gain
from rillflow_planner.problem import Statement
from rillflow_planner.ranking import HOUR_S, LITTLE, Goal, Ranked, Ranking, SearchObjective
from rillflow_planner.search import Variation

if TYPE_CHECKING:
    from rillflow_planner.calibration import Calibration
    from rillflow_planner.gathering import GatherProposal
    from rillflow_planner.simulator.result import PoolTime, Simulation

BESIDE = "no devices"
"""Lane of the stages that use no devices: functions and formulas."""
Rows = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Complete result of the planner."""

    statement: Statement
    """The planning problem with its accuracy and assumptions."""
    objective: SearchObjective
    """The minimised quantity."""
    ranking: Ranking
    """The best plans."""
    gathering: GatherProposal | None
    """When the best plan's last rows should be gathered; None if that does not pay."""
    simulated: Sequence[Simulation]
    """Simulated steps of the best plans."""
    variations: Sequence[Variation]
    """Predictions for the same problem with other lengths."""

    @property
    def best(self) -> Ranked:
        """The best plan."""
        return self.ranking.best[0]

    @property
    def simulated_s(self) -> list[float]:
        """Seconds of a simulated step of the best plans; with freshness above 0, of a settled step."""
        return [
            found.settled_step_s if one.plan.freshness else found.mean_step_s
            for one, found in zip(self.ranking.best, self.simulated, strict=False)
        ]

    @property
    def step_s(self) -> float:
        """Displayed seconds of a step of the best plan."""
        return shown_s(self.statement, self.best, self.simulated[0])


def shown_s(statement: Statement, one: Ranked, simulated: Simulation) -> float:
    """Return the displayed seconds of a step: computed for freshness 0, otherwise simulated once settled.

    For a published stack they are always computed, because the error of those was measured.
    """
    is_simulated = one.plan.freshness and not statement.stack
    return simulated.settled_step_s if is_simulated else one.evaluation.step_s


def decision_lines(found: Decision) -> list[str]:
    """Return the decision as lines: the plan and its cost, then the accuracy, then details."""
    best, statement, ranking = found.best, found.statement, found.ranking
    nowhere = f", {ranking.nowhere:,} too large for the cluster" if ranking.nowhere else ""
    return [
        *_head(found),
        f"accuracy: {statement.accuracy}",
        *_sensitivity(found),
        *_warnings(found),
        "",
        f"{ranking.placements:,} placement{'s' * (ranking.placements > 1)}{nowhere}; the best "
        f"{len(ranking.best)}",
        *columns(_best_rows(found), left=2, text=2),
        "",
        "best plan:",
        *columns(_unit_rows(best.plan)),
        "",
        *columns(_stage_rows(statement, best), left=2),
        *_overlap(best),
        "",
        *columns(_pool_rows(best.plan, found.simulated[0])),
        "",
        f"throughput by cluster size{', without fusion' * bool(fused_of(best.plan))}",
        *columns(_size_rows(found)),
        "",
        *(f"assumed: {sentence}" for sentence in statement.assumptions),
        *([] if statement.stack else _placement(best.plan, statement)),
    ]


def decision_data(found: Decision) -> dict[str, Any]:
    """Return the decision as JSON data, in seconds, bytes and devices."""
    fusion = found.ranking.fusion
    return {
        "objective": found.objective.goal,
        "placements": found.ranking.placements,
        "nowhere": found.ranking.nowhere,
        "best": [
            _ranked_data(found.statement, one, [] if simulated is None else simulated.pools)
            for one, simulated in zip_longest(found.ranking.best, found.simulated)
        ],
        "question": found.statement.title,
        "fusion": fusion
        and {
            "best": fusion.best and {**asdict(fusion.best.plan), "step_s": fusion.best.evaluation.step_s},
            "plain_step_s": fusion.plain.evaluation.step_s,
            **{key: vars(fusion)[key] for key in ("is_bound", "why")},
        },
        "gathering": found.gathering and asdict(found.gathering),
        "step_s": found.step_s,
        "corrected_s": found.statement.corrected_s(found.step_s),
        "simulated_s": found.simulated_s,
        "sizes": [
            {
                **asdict(replace(one, best=None)),
                "step_s": one.best and one.best.evaluation.step_s,
                "gains_little": one.gains_little,
            }
            for one in found.ranking.sizes
        ],
        "variations": [asdict(one) for one in found.variations],
        **_said_of(found.statement),
    }


def simulation_lines(plan: Plan, found: Simulation, statement: Statement) -> list[str]:
    """Return a simulation as lines of text."""
    ages = ", ".join(f"{age} for {count / found.trained:.0%}" for age, count in sorted(found.ages.items()))
    median_s, settled_s = (ranged(statement, one) for one in (found.median_step_s, found.settled_step_s))
    age = [f"age      policy versions between a row's oldest token and its training: {ages}"]
    return [
        f"a step   {median_s} (median), {settled_s} in steady state",
        f"rate     {number(found.rows_per_s)} rows/s, {number(found.tokens_per_s)} tokens/s",
        f"rows     {found.begun:,} begun, {found.trained:,} trained, {found.unfinished:,} unfinished"
        + "".join(f", {count:,} dropped: {reason}" for reason, count in found.dropped.items()),
        *(age if plan.freshness else []),
        *_unused(statement, sum(pool.devices for pool in plan.pools)),
        "",
        *columns(_pool_rows(plan, found)),
        *said_lines(statement),
    ]


def simulation_data(plan: Plan, found: Simulation, statement: Statement) -> dict[str, Any]:
    """Return a simulation as JSON data in seconds and bytes, including the timeline."""
    return {
        "plan": plan.name,
        "freshness": plan.freshness,
        "median_step_s": found.median_step_s,
        "settled_step_s": found.settled_step_s,
        "range_s": statement.range_s(found.settled_step_s),
        "rows_per_s": found.rows_per_s,
        "tokens_per_s": found.tokens_per_s,
        **asdict(found),
        **_said_of(statement),
    }


def calibration_lines(found: Calibration) -> list[str]:
    """Return a calibration as lines: every stage, measured and fitted, then the factors."""
    stages = [
        (one.stage, one.phase, seconds(one.measured_s), seconds(one.predicted_s), f"{one.error:+.1%}")
        for one in found.stages
    ]
    factors = [
        (name, f"{number(value)} s" if name.endswith("_s") else number(value))
        for name, value in asdict(found.factors).items()
    ]
    limits = [
        f"note: {name} was fitted to 1: the device is at least as fast as its description says"
        for name in found.at_limit
    ]
    limits += [
        f"note: {name} was fitted to {number(times)} times its guess; if the machine was busy during the "
        "run, calibrate with another one"
        for name, times in found.moved.items()
    ]
    head = ("stage", "phase", "measured", "fitted", "error")
    return [*columns([head, *stages], left=2), "", *columns([("factor", "value"), *factors]), *limits]


def calibration_data(found: Calibration) -> dict[str, Any]:
    """Return a calibration as JSON data."""
    return {**asdict(found), "stages": [{**asdict(one), "error": one.error} for one in found.stages]}


def plan_page(title: str, found: Simulation, lines: Sequence[str]) -> str:
    """Return the HTML page with the text of the command line and the first steps of a simulation."""
    timeline = draw_timeline(simulated_bars(found))
    where = "Made by Rillflow; plugins/planner/docs/planner.md explains how each number is predicted."
    body: list[Html] = [
        el("h1", title),
        *section("In numbers", [el("pre", "\n".join(lines))]),
        *section("Timeline", [el("section", timeline, class_="card wide")] if timeline else []),
        el("footer", where),
    ]
    return page(title, body)


def simulated_bars(found: Simulation) -> Sequence[Bar]:
    """Return the bars of the first steps, replica by replica; stages without devices come last."""
    until = sum(found.step_s[:SHOWN_STEPS])
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
        if span.start_s < until and span.lane <= MOST_LANES
    ]
    return sorted(bars, key=lambda bar: (bar.pool == BESIDE, bar.pool, bar.lane, bar.start_s))


def said_lines(statement: Statement) -> list[str]:
    """Return the accuracy of predictions and the assumptions."""
    sentences = (f"assumed: {sentence}" for sentence in statement.assumptions)
    return ["", f"accuracy: {statement.accuracy}", *sentences]


def pools_text(plan: Plan) -> str:
    """Return the models of each device group, and fused updates. Example: ``policy reference | critic``."""
    pools = (
        " ".join(name for name, unit in plan.units.items() if unit.pool == pool.name) for pool in plan.pools
    )
    fused = fused_of(plan)
    return " | ".join(pools) + (f", {' and '.join(fused)} fused" if fused else "")


def ranged(statement: Statement, spent: float, *, is_stage: bool = False) -> str:
    """Format predicted seconds with their range. Example: ``76.1 s (61.6 s to 96.6 s)``."""
    found = statement.range_s(spent, is_stage=is_stage) if spent else None
    told = "" if found is None else f" ({seconds(found[0])} to {seconds(found[1])})"
    return seconds(statement.corrected_s(spent)) + told


def _said_of(statement: Statement) -> Mapping[str, Any]:
    return {"accuracy": statement.accuracy, "assumptions": list(statement.assumptions)}


def _unused(statement: Statement, devices: int) -> list[str]:
    there = statement.problem.hardware.devices
    return [f"unused: {there - devices} of {there} devices"] if there > devices else []


def _head(found: Decision) -> Iterator[str]:
    """Yield the step, the devices, the whole run, and the effect of off-policy steps."""
    best, statement = found.best, found.statement
    step_s, hardware, devices = found.step_s, statement.problem.hardware, best.evaluation.devices
    how = ", as simulated," if best.plan.freshness and not statement.stack else ""
    yield f"a step: {ranged(statement, step_s)}{how} on {devices} devices"
    for line in _unused(statement, devices):
        yield f"{line}; they would not improve the plan"
    larger = next((one for one in found.ranking.sizes if one.devices > hardware.devices), None)
    if larger is not None and larger.best is not None and larger.gain is not None:
        more = "" if how else f"{ranged(statement, larger.best.evaluation.step_s)} a step, "
        how = ", both without fusion" if fused_of(best.plan) else how and ", both computed without simulation"
        yield f"on {larger.devices} devices: {more}{larger.gain:+.0%} rows per second{how}"
        yield from _gain_error(found, "twice the devices", "doubled")
    yield from _ahead(found)
    yield from _fusion(found)
    yield from _gathering(found)
    price = sum(pool.devices * hardware.fleet(pool.machine_type).price_per_hour for pool in best.plan.pools)
    steps = statement.steps or 100
    spent = statement.corrected_s(steps * step_s) / HOUR_S * price
    cost = f", {number(spent)} {hardware.fleets[0].currency}" if price else ""
    yield f"{steps:,} steps: {ranged(statement, steps * step_s)}{cost}"
    if best.plan.freshness:
        updates = "1 update" if best.plan.freshness == 1 else f"{best.plan.freshness} updates"
        counted = f"the rows of up to {best.plan.freshness:g} steps begin before their weights have arrived"
        why = counted if hardware.engine.counts else f"rows come from weights up to {updates} old"
        yield (
            f"freshness {best.plan.freshness}: training is off-policy, because {why}; this affects what the "
            "policy learns"
        )


def _gain_error(found: Decision, what: str, name: str) -> Iterator[str]:
    """Yield how far predicted changes of a step were off for published pairs."""
    published = found.statement.problem.hardware.published
    error: Gain | None = vars(published)[name] if published else None
    if error is not None and found.statement.error is not None:
        yield f"  such changes of a step from {what}, in published pairs left out of the fit: {error.text}"


def _ahead(found: Decision) -> Iterator[str]:
    """Yield the best step of every freshness bound that was tried."""
    bounds: dict[float, float] = {}
    times = zip_longest(found.ranking.best, found.simulated)
    for one, simulated in times:
        step_s = one.evaluation.step_s if simulated is None else shown_s(found.statement, one, simulated)
        bounds.setdefault(one.plan.freshness, step_s)
    if 0 in bounds and len(bounds) > 1:
        ahead = ", ".join(
            f"{ranged(found.statement, step_s)} at freshness {bound} ({step_s / bounds[0] - 1:+.0%} a step)"
            for bound, step_s in sorted(bounds.items())
            if bound
        )
        yield f"in step {ranged(found.statement, bounds[0])}; generation ahead of training {ahead}"
        yield from _gain_error(found, "running ahead", "ahead")


def _fusion(found: Decision) -> Iterator[str]:
    """Yield the best fused plan beside the best plan without fusion."""
    fusion, statement = found.ranking.fusion, found.statement
    if fusion is None:
        return
    plain = ranged(statement, fusion.plain.evaluation.step_s)
    if fusion.best is None:
        yield f"fusion is not possible here: best plan {plain}, because {fusion.why}"
        return
    plan, least = fusion.best.plan, "at least " if fusion.is_bound else ""
    grids = "; ".join(f"{name} {plan.units[name].grid}" for name in fused_of(plan))
    best = f"{least}{ranged(statement, fusion.best.evaluation.step_s)} ({grids})"
    if fusion.why:
        yield f"fusion does not pay here: best fused plan {best}, best plan {plain}, because {fusion.why}"
    else:
        yield f"fused: {best}, best without: {plain}, gain {fusion.gain:.1%}"


def _gathering(found: Decision) -> Iterator[str]:
    """Yield the settings that gather the last rows of generation, and what they gain."""
    one = found.gathering
    if one is not None:
        yield (
            f"gathering the last rows: generation and scoring take {seconds(one.seconds)} instead of "
            f"{seconds(one.without_s)} ({one.seconds / one.without_s - 1:+.0%}) with schedule.gather_rows = "
            f'{one.rows}, schedule.gather_replicas = {one.replicas}, schedule.gather_by = "{one.by}"'
            + ("; for assumed lengths: measure them with --lengths RUN first" if one.is_assumed else "")
        )


def _sensitivity(found: Decision) -> Iterator[str]:
    for one in found.variations:
        step = ranged(found.statement, one.step_s) if one.step_s < float("inf") else "does not fit"
        pools = pools_text(found.ranking.best[one.best].plan)
        flips = f"; then the placement {pools} is better" if one.best else ""
        yield f"with {one.what}: {step}{flips}"


def _best_rows(found: Decision) -> Rows:
    goal = "" if found.objective.goal in (Goal.STEP, Goal.DEVICES) else found.objective.goal.value
    if found.objective.goal is Goal.COST:
        goal = f"cost of a step, {found.statement.problem.hardware.fleets[0].currency}"
    head = ("", "device groups", "devices", "freshness", "step", "simulated", goal, "weakness", "")
    rows = (
        (
            f"{place}.",
            pools_text(one.plan),
            " + ".join(str(pool.devices) for pool in one.plan.pools),
            str(one.plan.freshness),
            ranged(found.statement, one.evaluation.step_s),
            "" if simulated is None else ranged(found.statement, simulated),
            number(one.value) if goal else "",
            one.cause or "",
            one.why,
        )
        for place, (one, simulated) in enumerate(zip_longest(found.ranking.best, found.simulated_s), 1)
    )
    return [head, *rows]


def _unit_rows(plan: Plan) -> Rows:
    rows: Rows = [("model", "device group", "devices", "trains and scores on", "generates with")]
    for name, unit in plan.units.items():
        pool, tp = plan.pool(unit.pool), f"tp {unit.generate_tp}" if unit.generate_tp else ""
        rows.append((name, pool.name, f"{pool.devices} x {pool.machine_type}", str(unit.grid), tp))
    return rows


def _stage_rows(statement: Statement, one: Ranked) -> Rows:
    """Return the seconds of each stage; those of streamed generation last until its last row has ended."""
    rows: Rows = [("stage", "device group", "takes")]
    for timing in one.evaluation.timings:
        spent = one.evaluation.seconds[timing.stage]
        rows.append((timing.name, timing.pool or BESIDE, ranged(statement, spent, is_stage=True)))
    return rows


def _overlap(best: Ranked) -> list[str]:
    """Return the sentence why stages of streamed generation may take longer than a step."""
    told = "  generation takes from its first row to its last; it overlaps with the training of other steps"
    return [told] if best.plan.freshness else []


def _pool_rows(plan: Plan, found: Simulation) -> Rows:
    rows: Rows = [("device group", "devices", "busy", "idle", "peak memory per device")]
    for pool in found.pools:
        busy, idle = f"{1 - pool.idle_share:.0%}", f"{pool.idle_share:.0%}"
        rows.append((pool.pool, str(plan.pool(pool.pool).devices), busy, idle, size(pool.peak_bytes)))
    return rows


def _size_rows(found: Decision) -> Rows:
    rows: Rows = [("devices", "step", "rows/s", "gain", "device groups")]
    for one in found.ranking.sizes:
        gain = "" if one.gain is None else f"{one.gain:+.0%}"
        step = ranged(found.statement, one.best.evaluation.step_s) if one.best else "nothing fits"
        pools = pools_text(one.best.plan) if one.best else ""
        rows.append((str(one.devices), step, number(one.rows_per_s), gain, pools))
    return rows


def _warnings(found: Decision) -> Iterator[str]:
    """Yield a warning where twice the devices gain little."""
    hardware = found.statement.problem.hardware
    for before, one in pairwise(found.ranking.sizes):
        if one.gains_little and one.gain is not None:
            gain = f"{one.gain:.1%} over {before.devices}, less than {LITTLE:.0%}"
            yield f"warning: {one.devices} devices gain {gain}"
    for fleet in hardware.fleets:
        is_unsaid = fleet.between_bandwidth == fleet.device.inside_bandwidth
        larger = any(one.devices > hardware.devices for one in found.ranking.sizes)
        if is_unsaid and fleet.devices == fleet.per_machine and larger:
            yield f"note: {fleet.name} has no bandwidth between machines; the speed within one is used"


def _placement(plan: Plan, statement: Statement) -> list[str]:
    """Return the recipe's sections, with the recomputation that the planner chose, if a run can follow the
    plan.
    """
    parted = plan.streams or plan.freshness % 1
    if parted or any(unit.grid.ep > 1 for unit in plan.units.values()):
        return ["", "a recipe cannot express this placement; --out writes it to a plan file"]
    order = ['mode = "ahead"', f"freshness = {plan.freshness}"] if plan.freshness else []
    rows = ['mode = "gathering"'] if plan.gather_rows else []
    rows += [f"{key} = {inline_text(vars(plan)[key])}" for key in GATHERED if plan.gather_rows]
    placed = (f"{key} = {inline_text(value)}" for key, value in plan.placement.items())
    recomputes = f"gradient_checkpointing = {str(statement.problem.recomputes).lower()}"
    chosen = ["", "[policy]", recomputes] if statement.may_recompute else []
    ordered = ["", "[schedule]", *order, *rows] if order or rows else []
    return [*chosen, *ordered, "", "[placement]", *placed]


def _ranked_data(statement: Statement, one: Ranked, times: Sequence[PoolTime]) -> dict[str, Any]:
    """Return a ranked plan as JSON data.

    Idle shares of its pools come from the simulation if there is one.
    """
    spent, idle = one.evaluation, {time.pool: {"idle_share": time.idle_share} for time in times}
    return {
        **asdict(one.plan),
        **{key: vars(one)[key] for key in ("value", "cause", "why")},
        "step_s": spent.step_s,
        "range_s": statement.range_s(spent.step_s),
        "devices": spent.devices,
        "stages": [asdict(timing) for timing in spent.timings],
        "pool_use": [asdict(pool) | idle.get(pool.name, {}) for pool in spent.pools],
    }
