"""Given layout: read the axes of ``--layout`` as a plan, or say which one the runtime cannot have.

tp=4,pp=2,generate=4 ─ axes ─> Grid ─ contradictions ─> Plan
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedUnit
from rillflow.placement.tables import Reader, values, whole
from rillflow_planner.cost_model.options import copy_sizes, copy_sizes_of, cuts_heads, cuts_model
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem

_AXES: Mapping[str, Reader] = dict.fromkeys(
    ("tp", "pp", "cp", "ep", "generate", "separate", "streams"), whole(1)
) | {"fsdp": whole(0, 1)}


def layout_of(text: str, problem: Problem, bounds: Sequence[float], stack: str = "") -> Plan:
    """Return the plan of a given layout, such as ``tp=4,pp=2,generate=4,separate=64``; models share a grid.

    Args:
        text: the axes.
        problem: the step, with the grids that its runtime supports.
        bounds: freshness bounds, of which a given layout has one.
        stack: the published stack; empty for Rillflow.

    Raises:
        PlanError: an axis is unknown, given twice, or one that the runtime cannot have.
    """
    said = axes_of(text)
    fleet, apart, layouts = problem.hardware.fleets[0], said.get("separate", 0), problem.layouts
    for several, what in ((problem.hardware.fleets, "machine types"), (bounds, "freshness bounds")):
        if len(several) > 1:
            raise PlanError(
                f"--layout is given with {len(several)} {what}",
                why="a given layout is one plan, on one machine type, with one bound",
                fix="name one, or leave --layout out to search",
            )
    tp, pp, cp = (said.get(axis, 1) for axis in ("tp", "pp", "cp"))
    ways, trained, streams = tp * pp * cp, fleet.devices - apart, said.get("streams", 0)
    generate, freshness = said.get("generate", 1 if "tp" not in said else tp), bounds[0]
    if (
        trained < 1
        or trained % ways
        or (apart or trained) % generate
        or bool(apart) != bool(freshness or streams)
    ):
        raise PlanError(
            f"--layout is {text!r}, for {fleet.devices} devices and freshness {freshness:g}",
            why=f"{trained} devices train in groups of {ways}, and {apart or trained} generate in groups of "
            f"{generate}; above freshness 0, or with streams=N, generation has separate devices (separate=N)",
            fix="choose axes that divide the devices, such as tp=4,pp=2,generate=4",
        )
    is_sharded = bool(said.get("fsdp", False not in layouts.sharded))
    grid = Grid(dp=trained // ways, pp=pp, tp=tp, cp=cp, ep=said.get("ep", 1), is_sharded=is_sharded)
    for role, shape in problem.shapes.items():
        samples = generate if role == "policy" else 0
        for what, why in _contradictions(problem, shape, grid, samples, apart):
            raise PlanError(
                f"--layout has {what}, for {stack or 'Rillflow'} and {shape.name}",
                why=why,
                fix="change this axis, or leave --layout out, and the best layout is searched",
            )
    pools = [fleet.pool("train", trained)]
    units = {role: PlannedUnit(pool="train", grid=grid) for role in problem.shapes}
    units["policy"] = replace(units["policy"], generate_tp=0 if apart else generate)
    if apart:
        pools.append(fleet.pool("sample", apart))
        own = Grid(dp=apart // generate, tp=generate)
        units[SAMPLER] = PlannedUnit(pool="sample", grid=own, generate_tp=generate)
    return Plan(
        name=problem.graph.name, pools=tuple(pools), units=units, freshness=freshness, streams=streams
    )


def axes_of(text: str) -> dict[str, int]:
    """Return the axes of a layout. Example: ``axes_of("tp=4, generate=2") == {"tp": 4, "generate": 2}``."""
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    names = [name for name, _, _ in parts]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise PlanError(
            f"--layout has {doubled} twice", why="an axis has one size", fix="leave one of the two out"
        )
    return values({name: int(one) if one.isdecimal() else one for name, _, one in parts}, _AXES, "--layout")


def _contradictions(
    problem: Problem, shape: ModelShape, grid: Grid, generate: int, apart: int
) -> Iterator[tuple[str, str]]:
    """Yield an axis that this runtime or model cannot have, and the reason.

    Unlike in a search, tp and cp may cross machines: published runs do so.
    """
    layouts, ranks = problem.layouts, grid.dp * grid.cp * grid.tp
    if grid.is_sharded not in layouts.sharded:
        why = "this runtime " + ("holds parameters whole" if grid.is_sharded else "shards parameters over dp")
        yield f"fsdp={int(grid.is_sharded)}", why
    if grid.tp > 1 and not (layouts.cuts_layers and cuts_model(shape, layouts)):
        yield f"tp={grid.tp}", "this runtime trains such a model without tensor parallelism"
    if not cuts_heads(shape, grid.tp):
        yield f"tp={grid.tp}", f"it must divide {shape.heads} heads and {shape.kv_heads} key-value heads"
    most = shape.layers if layouts.cuts_layers and layouts.pipelines else 1
    if grid.pp > most:
        why = "this runtime has no pipelines" if most == 1 else f"the model has {most} layers"
        yield f"pp={grid.pp}", why
    if grid.cp > layouts.context:
        yield f"cp={grid.cp}", f"devices that share a row in this runtime: at most {layouts.context}"
    if grid.ep > 1:
        if not shape.is_mixture:
            yield f"ep={grid.ep}", "the model has no experts"
        elif shape.experts % grid.ep or ranks % grid.ep or grid.ep < grid.tp:
            why = f"it must divide {shape.experts} experts and a stage's {ranks} devices, and be at least tp"
            yield f"ep={grid.ep}", why
        elif not layouts.mixes_experts and (grid.pp * grid.tp > 1 or grid.is_sharded):
            yield f"ep={grid.ep}", "expert parallelism works with dp alone in this runtime"
    machine = problem.hardware.fleets[0].per_machine
    copies = (
        copy_sizes(shape, apart, machine, layouts) if apart else copy_sizes_of(shape, grid, machine, layouts)
    )
    if generate and generate not in copies:
        yield f"generate={generate}", f"a copy may lie on {', '.join(map(str, copies))} devices"
