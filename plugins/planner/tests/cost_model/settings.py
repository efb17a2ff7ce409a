"""A small model on small devices, with which the formulas' laws are shown."""

from __future__ import annotations

from dataclasses import replace

from rillflow.graph.graph import Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import PlannedPool
from rillflow_planner.cost_model.compute import Setting
from rillflow_planner.cost_model.options import Option
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.hardware import Device, EngineFactors, Factors, Fleet, Hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.workload import Lengths, Workload

SHAPE = ModelShape(
    name="small", hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, inner=4096, vocabulary=32000
)
MIXTURE = replace(SHAPE, name="mixture", experts=16, experts_per_token=2, expert_inner=1024)
DEVICE = Device(
    name="toy",
    memory_bytes=40e9,
    flops={"bfloat16": 100e12, "float32": 10e12},
    memory_bandwidth=1e12,
    inside_bandwidth=100e9,
    host_bandwidth=20e9,
)
FLEET = Fleet(name="toys", device=DEVICE, devices=32, per_machine=8, between_bandwidth=10e9)
WORKLOAD = Workload(
    prompts=64,
    samples=4,
    prompt=Lengths(kind="fixed", limit=128),
    response=Lengths(kind="lognormal", limit=2048, median=400, sigma=0.8),
    minibatches=2,
    tokens_per_micro_batch=4096,
)


def setting(
    *,
    shape: ModelShape = SHAPE,
    workload: Workload = WORKLOAD,
    fleet: Fleet = FLEET,
    factors: Factors | None = None,
    recomputes: bool = True,
) -> Setting:
    """What a stage's seconds depend on, with what is named changed."""
    step = replace(problem(workload=workload, fleet=fleet, factors=factors), recomputes=recomputes)
    return Setting(problem=step, shape=shape, fleet=fleet)


def graph() -> Graph:
    """A step of four roles."""
    ends = (
        ("policy", "generate"),
        ("reward", "score"),
        ("reference", "logprobs"),
        ("policy", "logprobs"),
        ("critic", "values"),
        ("controller", "gae"),
        ("critic", "update"),
        ("policy", "update"),
        ("policy", "publish"),
    )
    stages = tuple(
        Stage(index=place, role=role, endpoint=endpoint, reads=(), writes=())
        for place, (role, endpoint) in enumerate(ends)
    )
    return Graph(name="four roles", stages=stages, edges=())


def problem(
    *,
    shape: ModelShape = SHAPE,
    workload: Workload = WORKLOAD,
    fleet: Fleet = FLEET,
    factors: Factors | None = None,
    samples_apart: bool = False,
    offloads: bool = False,
    freshness: int = 0,
) -> Problem:
    """A step to be planned; the reward is a function."""
    return Problem(
        graph=graph(),
        shapes={"policy": shape, "reference": shape, "critic": replace(shape, is_scalar=True)},
        workload=workload,
        hardware=Hardware(
            name="toys",
            fleets=(fleet,),
            factors=factors or Factors(),
            engine=EngineFactors(offloads=offloads),
        ),
        samples_apart=samples_apart,
        freshness=freshness,
    )


def seat(pool: str, devices: int, grid: Grid, generate_tp: int = 1) -> Seat:
    """A unit of the small model on a pool; what it costs there is left open."""
    option = Option(
        grid=grid, generate_tp=generate_tp, seconds={}, resident_bytes=0, working_bytes=0, sampling_bytes=0
    )
    unit = Unit(name="policy", shape=SHAPE, stages=())
    return Seat(unit=unit, pool=PlannedPool(name=pool, machine_type="toys", devices=devices), option=option)
