"""Recommended layouts are ones that the runtime would run, by rules written here a second time.

``python -m plugins.planner.tests.test_runtimes`` counts refused ones among 200 drawn problems.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "planner"))

from drawn_plans import Drawn, recommended

from rillflow.app.meshes import unfit
from rillflow.placement.grid import Grid
from rillflow.placement.mesh import require_whole_beside_experts
from rillflow.placement.plan import SAMPLER
from rillflow.workers.config import MeshSizes
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.model_shape import ModelShape

MACHINE = 8
STACKS = ("gpu", "nemo-rl", "verl")


@given(seed=st.integers(0, 1 << 30), stack=st.sampled_from(STACKS))
@settings(max_examples=20, deadline=None)
def test_a_runtime_refuses_no_recommended_layout(seed: int, stack: str) -> None:
    one = recommended(seed, stack)
    assert one is None or not list(refusals(one))


def refusals(one: Drawn) -> Iterator[str]:
    """Yield why the runtime of a drawn problem would refuse its plan."""
    workload, layouts = one.problem.workload, one.problem.layouts
    for unit in one.problem.units:
        placed, shape = one.plan.units[unit.name], unit.shape
        grid, copy = placed.grid, max(placed.generate_tp, 1)
        devices = one.plan.pool(placed.pool).devices
        if grid.devices != devices or devices % copy:
            yield f"{grid} with copies of {copy} on {devices} devices"
        if MACHINE % (grid.tp * grid.cp) and unit.name != SAMPLER:
            yield f"{grid} crosses machines"
        if layouts.is_own:
            yield from _rillflow(grid, copy, shape)
        else:
            trains = one.problem.training.intersection(unit.stages)
            rows = workload.rows // (workload.minibatches if trains else 1)
            yield from _published(grid, copy, shape, rows, is_sampler=unit.name == SAMPLER)
            if layouts is LAYOUTS["fsdp"] and unit.name != SAMPLER and grid.pp * grid.tp > 1:
                yield f"FSDP with {grid}"
            if layouts is LAYOUTS["fsdp"] and shape.heads % grid.cp:
                yield f"Ulysses with {grid} of {shape.heads} heads"


def _rillflow(grid: Grid, copy: int, shape: ModelShape) -> Iterator[str]:
    """Yield what ``rillflow check`` or the start of a run would say."""
    fsdp = grid.dp if grid.is_sharded else 1
    mesh = MeshSizes(dp=grid.dp, pp=grid.pp, tp=grid.tp, fsdp=fsdp, ep=grid.ep)
    yield from map(str, unfit(mesh, copy, shape.heads, shape.kv_heads, shape.layers))
    require_whole_beside_experts("grid", ep=grid.ep, fsdp=fsdp, pp=grid.pp, tp=grid.tp)
    if grid.dp % grid.ep or (grid.ep > 1 and shape.experts % grid.ep):
        yield f"ep {grid.ep} of {shape.experts} experts on dp {grid.dp}"
    if shape.is_mixture and max(grid.tp, copy) > 1:
        yield "tensor parallelism of a mixture"
    if MACHINE % copy:
        yield f"copies of {copy} cross machines"


def _published(grid: Grid, copy: int, shape: ModelShape, rows: int, *, is_sampler: bool) -> Iterator[str]:
    """Yield what Megatron-core, verl and vLLM assert of sizes."""
    if shape.heads % copy or (shape.kv_heads % copy and copy % shape.kv_heads):
        yield f"vLLM: {shape.heads} heads, {shape.kv_heads} of keys on tensor parallel size {copy}"
    if MACHINE % copy and copy % MACHINE:
        yield f"copies of {copy} on machines of {MACHINE}"
    if is_sampler:
        return
    if shape.heads % grid.tp or shape.kv_heads % grid.tp:
        yield f"{shape.heads} heads, {shape.kv_heads} query groups on tp {grid.tp}"
    if rows % grid.dp:
        yield f"{rows} rows of an optimiser step on dp {grid.dp}"
    if grid.ep > 1 and (shape.experts % grid.ep or (grid.dp * grid.cp * grid.tp) % grid.ep):
        yield f"ep {grid.ep} of {shape.experts} experts on {grid}"
    equal = [
        each
        for each in range(1, shape.layers + 1)
        if 2 <= shape.layers - each * (grid.pp - 2) <= 2 * each or shape.layers == each * grid.pp
    ]
    if not equal:
        yield f"{shape.layers} layers on pp {grid.pp}"


if __name__ == "__main__":
    for name in STACKS:
        plans = [one for one in (recommended(seed, name) for seed in range(200)) if one is not None]
        refused = [told for one in plans for told in refusals(one)]
        sys.stdout.write(
            f"{name}: {len(plans)} of 200 problems have a plan, {len(refused)} refusals {refused[:5]}\n"
        )
