"""Placement needs: contradictions between pools, grids, devices and fused updates.

    Resolved ─┬─ pool_needs ─────────> pools without ranks or roles, roles that are not there
              ├─ mesh_needs ─────────> grids that do not fill their pools, or cannot shard a new model
              ├─ fused_needs ────────> two updates that cannot run as one stage
              ├─ device_needs ───────> a device that ranks on Ray cannot have
              └─ graphs ─ require_independent ─> the second fused update must not need the first one's result

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rillflow.app.contradictions import Contradiction
from rillflow.app.meshes import impossible, unfit
from rillflow.app.resolved import Resolved
from rillflow.app.role_table import Start
from rillflow.app.schedule_needs import devices_for
from rillflow.config.problems import shown
from rillflow.errors import ConfigError, nearest
from rillflow.graph.graph import Graph
from rillflow.placement.plan import unaligned

_UPDATE = "update"


def device_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield a contradiction of a numbered device and ranks that are processes."""
    placement, device = resolved.recipe.placement, resolved.recipe.run.device
    if ":" in device and not placement.is_inline:
        yield Contradiction(
            f"run.device is {device}, and the pools have {sum(placement.pools.values())} ranks on Ray",
            why="Ray assigns every rank its own device and hides the others",
            fix='set run.device = "cuda"; CUDA_VISIBLE_DEVICES selects the devices that Ray may assign',
        )


def pool_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of empty or unused pools, and of roles that are unknown or on unknown pools."""
    placement, there, known = resolved.recipe.placement, [*resolved.roles], True
    for name, size in placement.pools.items():
        if size < 1:
            yield Contradiction(
                f"placement.pools.{name} is {size}",
                why="a pool needs at least one rank",
                fix="set it to 1",
            )
    for role, pool in placement.roles.items():
        if pool not in placement.pools:
            known = False
            yield Contradiction(
                f"placement.roles.{role} is {pool!r}",
                why=f"the pools are {', '.join(placement.pools)}",
                fix=nearest(pool, placement.pools),
            )
        if role not in there:
            known = False
            yield Contradiction(
                f"placement.roles has {role!r}, and the run has no such role",
                why=f"{resolved.recipe.algorithm.name} with these settings has {', '.join(there)}",
                fix=nearest(role, there),
            )
    used = {placement.pool_of(role) for role in there}
    for name in placement.pools if known else ():
        if name not in used:
            yield Contradiction(
                f"placement.pools.{name} has no role",
                why=f"the roles {', '.join(there)} are on {', '.join(sorted(used))}; "
                "roles without an entry are on the first pool",
                fix=f'write placement.roles = {{ ROLE = "{name}" }}, or remove the pool',
            )


def mesh_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of grids that do not fit their pools, or that cannot shard a new model."""
    placement, new = resolved.recipe.placement, resolved.recipe.policy.model.new
    problems = [*impossible(placement, resolved.models())]
    if new is not None and not problems:
        mesh = placement.mesh_of(resolved.trained_role)
        problems += unfit(mesh, placement.generate_tp, new.heads, new.kv_heads, new.layers)
    yield from map(Contradiction.of, problems)


def fused_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of the two roles of ``placement.fused``; roles and pools are known."""
    fused, specs = resolved.recipe.placement.fused, resolved.roles
    if not fused:
        return
    trained = [role for role, spec in specs.items() if spec.is_trained]
    said = f"placement.fused is {shown(list(fused))}"
    odd = [role for role in fused if role not in trained]
    if len(fused) != 2 or fused[0] == fused[1]:
        yield Contradiction(
            said,
            why="one update fills the pipeline bubbles of one other update",
            fix='name two trained models, such as placement.fused = ["policy", "critic"]',
        )
    elif fused[1] == "policy":
        yield Contradiction(
            said,
            why="the second model's stages are in reverse order, and the order of the policy's ranks is the "
            "order of the rows that they sample",
            fix=f"name the policy first: {shown(['policy', fused[0]])}",
        )
    elif odd:
        told = "is not trained" if odd[0] in specs else f"is not a role of {resolved.recipe.algorithm.name}"
        yield Contradiction(
            f"{said}, and {odd[0]} {told}",
            why=f"the run trains {', '.join(trained)}",
            fix=nearest(odd[0], trained) if len(trained) > 1 else "remove placement.fused",
        )
    else:
        yield from _apart(resolved, said)
        yield from _in_parts(resolved, said)


def _apart(resolved: Resolved, said: str) -> Iterator[Contradiction]:
    """Yield contradictions of pools and grids on which the two pipelines do not meet."""
    placement = resolved.recipe.placement
    one, other = placement.fused
    pools, grids = (
        [placement.pool_of(each) for each in (one, other)],
        [placement.mesh_of(each) for each in (one, other)],
    )
    if pools[0] != pools[1]:
        yield Contradiction(
            f"{said}, and {one} is on pool {pools[0]}, {other} on pool {pools[1]}",
            why="each model's passes run in the other's idle time, so both need the same ranks",
            fix=f'set placement.roles.{other} = "{pools[0]}", or remove placement.fused',
        )
        return
    for found in unaligned(grids[0].grid, grids[1].grid):
        keys = sorted({f"placement.train_parallel.{placement.grid_key(each)}" for each in (one, other)})
        yield Contradiction(
            f"{said}, and {one} is trained with {grids[0]}, {other} with {grids[1]}",
            why=found.why,
            fix=f"{found.fix} in {' and '.join(keys)}, or remove placement.fused",
        )


def _in_parts(resolved: Resolved, said: str) -> Iterator[Contradiction]:
    """Yield contradictions of updates that receive their rows in parts."""
    config, parts = resolved.recipe.algorithm, resolved.recipe.schedule.chunks
    if parts > 1 and config.goes_by(parts):
        yield Contradiction(
            f"{said}, and schedule.stream_chunks is {parts}",
            why="each chunk is trained as it arrives, so the two updates do not begin together",
            fix="set schedule.stream_chunks = 1, or algorithm.shuffle = true; or remove placement.fused",
        )
    if resolved.recipe.schedule.publishes > 1:
        yield Contradiction(
            f"{said}, and schedule.syncs_per_step is {resolved.recipe.schedule.publishes}",
            why="the policy's update is cut into parts, with a publish after each",
            fix="set schedule.syncs_per_step = 1, or remove placement.fused",
        )


def require_independent(fused: Sequence[str], graphs: Sequence[Graph]) -> None:
    """Refuse a step whose second update needs the result of the first, or weights that it changed.

    Raises:
        ConfigError: the message names the stages between the two; or no step has both updates.
    """
    names = [f"{role}.{_UPDATE}" for role in fused]
    found = [graph for graph in graphs if {*names} <= {stage.name for stage in graph.stages}]
    if not found:
        raise ConfigError(
            f"placement.fused names {' and '.join(fused)}, and no step calls {' and '.join(names)}",
            why=f"the steps are those of {', '.join(graph.name for graph in graphs)}",
            fix="remove placement.fused",
        )
    for graph in found:
        first, second = sorted(next(s.index for s in graph.stages if s.name == name) for name in names)
        between = _way(graph, first, second)
        if between:
            stages = [graph.stages[index].name for index in between]
            raise ConfigError(
                f"placement.fused names {' and '.join(fused)}, and {stages[-1]} needs {stages[0]} first",
                why=f"the step of {graph.name} has {' -> '.join(stages)}",
                fix="remove placement.fused, or call both updates before anything reads their results",
            )


def _way(graph: Graph, first: int, second: int) -> list[int]:
    """Return stages that lead from one to another, by fields or by a role's weights; empty if none do."""
    before = {first: first}
    role = graph.stages[first].role
    for stage in graph.stages[first + 1 : second + 1]:
        sources = [edge.source for edge in graph.into(stage.index) if edge.source in before]
        if stage.role == role:
            sources.append(first)
        if sources:
            before[stage.index] = sources[0]
    if second not in before:
        return []
    way = [second]
    while way[-1] != first:
        way.append(before[way[-1]])
    return way[::-1]


def require_devices(resolved: Resolved) -> None:
    """Refuse pools with more ranks than this machine has CUDA devices; functions that score take none.

    Raises:
        ConfigError: the message has both numbers.
    """
    placement, there = resolved.recipe.placement, devices_for(resolved.recipe)
    taking = {
        placement.pool_of(role) for role, spec in resolved.roles.items() if spec.start is not Start.FUNCTIONS
    }
    wanted = sum(size for name, size in placement.pools.items() if name in taking)
    if there and wanted > there and not placement.is_inline:
        raise ConfigError(
            f"the pools {', '.join(sorted(taking))} have {wanted} ranks, and this machine has {there} CUDA "
            f"device{'s' if there > 1 else ''}",
            why="every rank that is a process takes a device of its own",
            fix='set placement.backend = "inline", where all ranks share one device, or run.device = "cpu"; '
            'or use fewer ranks (schedule.mode = "in_order" needs one)',
        )
