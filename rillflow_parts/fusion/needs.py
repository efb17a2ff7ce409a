"""Needs: two updates that cannot run as one fused stage are refused before a run.

    Resolved ─ fused_needs ───> roles, pools, grids and a schedule that contradict ``placement.fused``
    graphs ─── look_at_fused ─> the second fused update must not need the first one's result

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rillflow.app.placement_needs import pool_needs
from rillflow.config.problems import shown
from rillflow.errors import ConfigError, nearest
from rillflow_parts.fusion.alignment import unaligned
from rillflow_parts.fusion.config import fused_roles

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.resolved import Resolved
    from rillflow.graph.graph import Graph


def fused_needs(resolved: Resolved) -> Iterator[ConfigError]:
    """Yield contradictions of the two roles of ``placement.fused``; none before every role has a pool."""
    fused, specs = fused_roles(resolved.recipe), resolved.roles
    if not fused or [*pool_needs(resolved)]:
        return
    trained = [role for role, spec in specs.items() if spec.is_trained]
    said = f"placement.fused is {shown(list(fused))}"
    odd = [role for role in fused if role not in trained]
    if len(fused) != 2 or fused[0] == fused[1]:
        yield ConfigError(
            said,
            why="one update fills the pipeline bubbles of one other update",
            fix='name two trained models, such as placement.fused = ["policy", "critic"]',
        )
    elif fused[1] == "policy":
        yield ConfigError(
            said,
            why="the second model's stages are in reverse order, and the order of the policy's ranks is the "
            "order of the rows that they sample",
            fix=f"name the policy first: {shown(['policy', fused[0]])}",
        )
    elif odd:
        told = "is not trained" if odd[0] in specs else f"is not a role of {resolved.recipe.algorithm.name}"
        yield ConfigError(
            f"{said}, and {odd[0]} {told}",
            why=f"the run trains {', '.join(trained)}",
            fix=nearest(odd[0], trained) if len(trained) > 1 else "remove placement.fused",
        )
    else:
        yield from _apart(resolved, said)
        yield from _in_parts(resolved, said)


def _apart(resolved: Resolved, said: str) -> Iterator[ConfigError]:
    """Yield contradictions of pools and grids on which the two pipelines do not meet."""
    placement = resolved.recipe.placement
    one, other = fused_roles(resolved.recipe)
    pools, grids = [*map(placement.pool_of, (one, other))], [*map(placement.mesh_of, (one, other))]
    if pools[0] != pools[1]:
        yield ConfigError(
            f"{said}, and {one} is on pool {pools[0]}, {other} on pool {pools[1]}",
            why="each model's passes run in the other's idle time, so both need the same ranks",
            fix=f'set placement.roles.{other} = "{pools[0]}", or remove placement.fused',
        )
        return
    for found in unaligned(grids[0].grid, grids[1].grid):
        keys = sorted({f"placement.train_parallel.{placement.grid_key(each)}" for each in (one, other)})
        yield ConfigError(
            f"{said}, and {one} is trained with {grids[0]}, {other} with {grids[1]}",
            why=found.why,
            fix=f"{found.fix} in {' and '.join(keys)}, or remove placement.fused",
        )


def _in_parts(resolved: Resolved, said: str) -> Iterator[ConfigError]:
    """Yield contradictions of updates that receive their rows in parts."""
    config, parts = resolved.recipe.algorithm, resolved.recipe.schedule.chunks
    if parts > 1 and config.goes_by(parts):
        yield ConfigError(
            f"{said}, and schedule.stream_chunks is {parts}",
            why="each chunk is trained as it arrives, so the two updates do not begin together",
            fix="set schedule.stream_chunks = 1, or algorithm.shuffle = true; or remove placement.fused",
        )
    if resolved.recipe.schedule.publishes > 1:
        yield ConfigError(
            f"{said}, and schedule.syncs_per_step is {resolved.recipe.schedule.publishes}",
            why="the policy's update is cut into parts, with a publish after each",
            fix="set schedule.syncs_per_step = 1, or remove placement.fused",
        )


def look_at_fused(facts: RecipeFacts, report: Report) -> None:
    """Check that two fused updates do not need each other's results, and say how they are placed."""
    fused = fused_roles(facts.recipe)
    if not fused:
        return
    one, other = fused
    said = (
        f"updates of {one} and {other}: one fused stage; the pipeline stages of {other} are in reverse "
        "order. A rank holds the gradients of both, more than the memory of one update"
    )
    report.say("placement", [said])
    require_independent(fused, facts.resolved.graphs)


def require_independent(fused: Sequence[str], graphs: Sequence[Graph]) -> None:
    """Refuse a step whose second update needs the result of the first, or weights that it changed.

    Raises:
        ConfigError: the message names the stages between the two; or no step has both updates.
    """
    names = [f"{role}.update" for role in fused]
    found = [graph for graph in graphs if {*names} <= {stage.name for stage in graph.stages}]
    if not found:
        raise ConfigError(
            f"placement.fused names {' and '.join(fused)}, and no step calls {' and '.join(names)}",
            why=f"the steps are those of {', '.join(graph.name for graph in graphs)}",
            fix="remove placement.fused",
        )
    for graph in found:
        first, second = sorted(next(s.index for s in graph.stages if s.name == name) for name in names)
        if between := _way(graph, first, second):
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
