"""HybridFlow's placements and generation meshes: which wins at which size (arXiv 2409.19256, 8.3 and 8.4).

PPO, critic and reward as large as actor and reference or larger ─ search on 16 .. 128 A100 ─> best placement
16 devices, trained at tp 8, dp 2 ─> seconds of generation and transition by generate_tp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from published.models import shape
from rillflow.errors import PlanError
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.hardware import Fleet, Hardware, shipped_devices, shipped_stacks
from rillflow_planner.problem import Problem
from rillflow_planner.search import search
from rillflow_planner.workload import Lengths, Workload

MODELS = (
    ("Llama-7B", "Llama-7B"),
    ("Llama-13B", "Llama-13B"),
    ("Llama-34B", "Llama-34B"),
    ("Llama-70B", "Llama-70B"),
    ("Llama-13B", "Llama-70B"),
)
"""Of actor and reference, and of critic and reward."""
SIZES = (16, 32, 64, 96, 128)
COLOCATED, HALVES, STANDALONE = "together", "split", "apart"
"""All on the same devices; actor + reference against critic + reward; each on its own."""
PUBLISHED: Mapping[tuple[str, str], Mapping[int, str]] = {
    MODELS[1]: {16: COLOCATED, 32: COLOCATED, 64: COLOCATED, 96: HALVES, 128: STANDALONE},
    MODELS[2]: {32: COLOCATED, 64: COLOCATED, 96: HALVES, 128: HALVES},
    MODELS[4]: {64: COLOCATED, 96: HALVES, 128: "actor + reference + reward, critic"},
}
"""The best of those compared, as its section 8.3 says in words; 7B and 70B alone are not in it."""
ROWS_AT_ONCE = 256
"""What its engine runs at most when nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The best placement of a cluster, and others in seconds."""

    best: str
    best_s: float
    colocated_s: float
    split_s: float
    apart_s: float

    @property
    def least(self) -> str:
        """Of the three placements compared, the one that takes least."""
        seconds = {COLOCATED: self.colocated_s, HALVES: self.split_s, STANDALONE: self.apart_s}
        return min(seconds, key=lambda name: seconds[name])


def graph() -> Graph:
    """A step of PPO as its paper has it: eight stages."""
    stages = (
        _stage(0, "policy", "generate", ("tokens", "sampler_logprobs")),
        _stage(1, "reward", "score", ("rewards",)),
        _stage(2, "reference", "logprobs", ("reference_logprobs",)),
        _stage(3, "critic", "values", ("values",)),
        _stage(4, "controller", "gae", ("advantages",)),
        _stage(5, "critic", "update", ()),
        _stage(6, "policy", "update", ()),
        _stage(7, "policy", "publish", ()),
    )
    edges = (
        *(Edge(source=0, destination=place, fields=("tokens",)) for place in (1, 2, 3)),
        Edge(source=0, destination=4, fields=("sampler_logprobs",)),
        Edge(source=1, destination=4, fields=("rewards",)),
        Edge(source=2, destination=4, fields=("reference_logprobs",)),
        Edge(source=3, destination=4, fields=("values",)),
        Edge(source=0, destination=5, fields=("tokens",)),
        Edge(source=4, destination=5, fields=("advantages",)),
        Edge(source=0, destination=6, fields=("tokens",)),
        Edge(source=4, destination=6, fields=("advantages",)),
        Edge(source=6, destination=7, fields=()),
    )
    return Graph(name="four models", stages=stages, edges=edges)


def problem(model: str, devices: int, *, judge: str = "") -> Problem:
    """1,024 rows of 1,024 + 1,024 tokens, 8 optimiser steps, on machines of 8 A100 with 200 Gb/s.

    ``judge`` is the model of critic and reward; that of the others if nothing is said.
    """
    fleet = Fleet(
        name="a100",
        device=shipped_devices()["A100-80"],
        devices=devices,
        per_machine=8,
        between_bandwidth=25e9 / 8,
    )
    policy, scalar = shape(model), shape(judge or model, is_scalar=True)
    return Problem(
        graph=graph(),
        shapes={"policy": policy, "reference": policy, "reward": scalar, "critic": scalar},
        workload=Workload(
            prompts=1024,
            samples=1,
            prompt=Lengths(kind="fixed", limit=1024),
            response=Lengths(kind="fixed", limit=1024),
            minibatches=8,
            tokens_per_micro_batch=8192,
            rows_at_once=ROWS_AT_ONCE,
            shares_prompts=False,
        ),
        hardware=Hardware(name="a100", fleets=(fleet,), factors=shipped_stacks()["areal"].factors),
    )


def meshes(model: str) -> dict[int, float]:
    """Seconds of generation and transition by generate_tp, on 16 devices trained at tp 8, dp 2.

    The optimisers are cut over dp, and the three other models lie on the same devices.
    """
    step = problem(model, 16)
    costs = CostModel(step)
    grid = Grid(dp=2, tp=8)
    others = {
        unit.name: costs.option(unit, "a100", 16, replace(grid, is_sharded=True), 0)
        for unit in step.units
        if unit.name != "policy"
    }
    policy = next(unit for unit in step.units if unit.name == "policy")
    found = {}
    for size in (1, 2, 4, 8):
        option = costs.option(policy, "a100", 16, replace(grid, is_sharded=True), size)
        room = costs.room_bytes("a100", {**others, "policy": option})
        decoder = costs.decoder(policy, option, "a100", 16, room)
        if decoder is not None:
            found[size] = costs.generate_s(step.graph.stages[0], decoder) + option.seconds[7]
    return found


def placed(model: str, judge: str, devices: int) -> Placed | None:
    """The best placement of a cluster; none where nothing fits."""
    try:
        ranking = search(problem(model, devices, judge=judge), CostModel, kept=20)
    except PlanError:
        return None
    values = {_pools(one.plan): one.value for one in ranking.best}
    return Placed(
        best="; ".join(
            f"{'+'.join(names)} {pool.devices}"
            for pool in ranking.best[0].plan.pools
            for names in [_names(ranking.best[0].plan, pool.name)]
        ),
        best_s=ranking.best[0].value,
        colocated_s=values.get(TOGETHER, float("inf")),
        split_s=values.get(SPLIT, float("inf")),
        apart_s=values.get(APART, float("inf")),
    )


def _names(plan: Plan, pool: str) -> tuple[str, ...]:
    return tuple(sorted(name for name, unit in plan.units.items() if unit.pool == pool))


def _pools(plan: Plan) -> frozenset[tuple[str, ...]]:
    return frozenset(_names(plan, pool.name) for pool in plan.pools)


TOGETHER = frozenset({("critic", "policy", "reference", "reward")})
SPLIT = frozenset({("policy", "reference"), ("critic", "reward")})
APART = frozenset({("critic",), ("policy",), ("reference",), ("reward",)})


def _stage(index: int, role: str, endpoint: str, writes: tuple[str, ...]) -> Stage:
    return Stage(index=index, role=role, endpoint=endpoint, reads=(), writes=writes)
