"""Published pairs of steps: in step, and with generation on devices of its own; each through the planner.

    pair ─ two runs ─> cluster, Problem, Plan ─┬─ evaluate ─> computed seconds
                                               └─ simulate ─> simulated seconds

What a page does not tell is assumed, and said in ``told``. Where the lengths of answers are missing and the
seconds of an update in step are there, the mean is the one with which the planner computes that update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

from published import verl
from published.models import shape
from published.nemo import graph, placed
from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import read_hardware
from rillflow_planner.problem import Problem, Work
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

STEPS = 6
"""Simulated steps apart, at least."""
AREAL_TOKENS = 9400.0
"""AReaL's mean answer: its effective throughput with bound 0, 128.7 thousand tokens a second (figure 5c),
times the seconds of a step in step, 41.0 h / 250, over 512 x 16 rows, without a prompt of 200.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One side of a pair."""

    step_s: float
    """Published seconds of a step; of the same unit on both sides, if only a ratio is published."""
    training: int
    """Devices that train."""
    sampling: int = 0
    """Further devices that generate."""
    ahead: float = 0
    """Freshness."""
    streams: int = 0
    """Minibatches that training takes at once."""
    scored: int = 1
    """Forward passes."""
    engine: Mapping[str, bool] = field(default_factory=dict)
    """Engine settings that differ from those of the stack."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two published runs of one workload."""

    name: str
    """Name of the change between the two runs."""
    model: str
    device: str
    like: str
    """Shipped factor set."""
    prompts: int
    samples: int
    limit: int
    minibatches: int
    one: Run
    other: Run
    mean: float = 0.0
    """Mean tokens of an answer; 0: as ``update_s`` tells."""
    update_s: float = 0.0
    """Published seconds of the first side's update."""
    sigma: float = 0.9
    packed: int = 32768
    """Tokens of a micro-batch on the devices that share a row."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Training's tp, pp, cp, ep; without any, the fastest layout for each side."""
    generate_tp: int = 0
    """Devices that share a copy, with ``axes``."""
    is_sharded: bool = False

    def problem(self, run: Run, mean: float) -> Problem:
        """The step of one side."""
        devices = run.training + run.sampling
        machines = {"name": "all", "device": self.device, "devices": devices, "per_machine": 8}
        machines["between"] = "50 GB/s"
        cluster = {"like": self.like, "machine_type": [machines], "engine": dict(run.engine)}
        workload = Workload(
            prompts=self.prompts,
            samples=self.samples,
            prompt=Lengths(kind="fixed", limit=200),
            response=lengths_of_mean(mean, self.limit, self.sigma),
            minibatches=self.minibatches,
            tokens_per_micro_batch=self.packed,
        )
        return Problem(
            graph=graph(run.scored),
            shapes={"policy": shape(self.model)},
            workload=workload,
            hardware=read_hardware(cluster, self.name),
            samples_apart=run.sampling > 0,
            freshness=run.ahead,
            layouts=LAYOUTS["fsdp" if self.is_sharded else "megatron"],
        )

    def plan(self, run: Run) -> Plan:
        """The placement of one side."""
        return self._plan(run, self.axes, self.generate_tp) if self.axes else _fastest(self, run)

    def _plan(self, run: Run, axes: Mapping[str, int], generate_tp: int) -> Plan:
        own = {axis: size for axis, size in axes.items() if axis != "ep"}
        dp = run.training // math.prod(own.values())
        grid = Grid(dp=dp, ep=axes.get("ep", 1), is_sharded=self.is_sharded, **own)
        return replace(placed(grid, generate_tp, run.sampling, run.ahead), streams=run.streams)

    def layouts(self, run: Run) -> Iterator[Plan]:
        """Every layout with tp and copies within a machine, and up to 4 pipeline stages."""
        for tp, pp, copy in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
            if run.training % (tp * pp) == 0:
                yield self._plan(run, {"tp": tp, "pp": pp}, copy)

    @property
    def mean_tokens(self) -> float:
        """Published mean tokens of an answer, or the one that the published update tells."""
        return self.mean or _mean_of(self)

    def computed_s(self, run: Run) -> float:
        """Seconds of a step by formulas."""
        step = self.problem(run, self.mean_tokens)
        return evaluate(step, CostModel(step), self.plan(run)).step_s

    def simulated_s(self, run: Run) -> float:
        """Seconds of a step, simulated."""
        step = self.problem(run, self.mean_tokens)
        steps = max(STEPS, 2 * int(run.ahead + 1)) if run.sampling else 2
        return simulate(step, CostModel(step), self.plan(run), steps=steps).settled_step_s


@cache
def _fastest(pair: Pair, run: Run) -> Plan:
    """Return the layout with the least computed seconds."""
    step, found = pair.problem(run, pair.mean), dict[float, Plan]()
    costs = CostModel(step)
    for plan in pair.layouts(run):
        with suppress(PlanError):
            found.setdefault(evaluate(step, costs, plan).step_s, plan)
    return found[min(found)]


@cache
def _mean_of(pair: Pair) -> float:
    low, high = 20.0, 0.9 * pair.limit
    for _ in range(24):
        middle = (low * high) ** 0.5
        step = pair.problem(pair.one, middle)
        found = evaluate(step, CostModel(step), pair.plan(pair.one))
        update = next(
            index for index, stage in enumerate(step.graph.stages) if step.work(stage) is Work.TRAIN
        )
        low, high = (low, middle) if found.seconds[update] > pair.update_s else (middle, high)
    return low


def _areal(model: str, nodes: int, steps: int, hours: tuple[float, float], bound: int) -> Pair:
    """Table 1: in step on all devices against 3 in 4 of them that generate and the rest that trains."""
    devices = 8 * nodes
    one, other = (3600 * spent / steps for spent in hours)
    return Pair(
        name=f"AReaL, {model}, {devices} H800: in step to bound {bound}",
        model=model,
        device="H800",
        like="areal",
        prompts=512,
        samples=16,
        limit=27648,
        mean=AREAL_TOKENS,
        minibatches=4,
        one=Run(step_s=one, training=devices),
        other=Run(step_s=other, training=devices // 4, sampling=devices * 3 // 4, ahead=bound),
    )


_OFF = Pair(
    name="verl one step off, FSDP, 16 H20: in step to 12 + 4",
    model="Qwen2.5-7B",
    device="H20",
    like="verl",
    prompts=512,
    samples=12,
    limit=20480,
    sigma=verl.SIGMA,
    minibatches=16,
    packed=4 * 2 * 10240,
    axes={"cp": 4},
    is_sharded=True,
    generate_tp=2,
    update_s=286.0,
    one=Run(step_s=749.0, training=16),
    other=Run(
        step_s=520.0,
        training=12,
        sampling=4,
        ahead=1,
        engine={"counts": False, "interrupts": False, "drains": True},
    ),
)
_V1 = Pair(
    name="verl V1, 35B-A3B, 32 H100: in step to 16 + 16",
    model="Qwen3.5-35B-A3B",
    device="H100",
    like="areal",
    prompts=64,
    samples=8,
    limit=32768,
    mean=12720.0,
    minibatches=4,
    packed=34816,
    axes={"tp": 2, "pp": 2, "cp": 2, "ep": 4},
    generate_tp=4,
    one=Run(step_s=22.79 * 3600 / 150, training=32),
    other=Run(step_s=14.10 * 3600 / 150, training=16, sampling=16, ahead=1, streams=1),
)
PAIRS = (
    _OFF,
    replace(
        _OFF,
        name="verl one step off, Megatron, 16 H20: in step to 12 + 4",
        limit=8192,
        axes={"tp": 2, "pp": 2},
        is_sharded=False,
        like="areal",
        packed=2 * 10240,
        update_s=344.0,
        one=Run(step_s=699.0, training=16),
        other=replace(_OFF.other, step_s=566.0),
    ),
    Pair(
        name="verl fully async, 30B-A3B, 128 H20: in step to 32 + 96, staleness 0.5",
        model="Qwen3-30B-A3B",
        device="H20",
        like="areal",
        prompts=512,
        samples=16,
        limit=8192,
        minibatches=4,
        packed=2 * 10240,
        axes={"tp": 2, "cp": 2, "ep": 8},
        generate_tp=4,
        update_s=86.27,
        one=Run(step_s=497.89, training=128, scored=2),
        other=Run(step_s=282.75, training=32, sampling=96, ahead=0.5, streams=1),
    ),
    _V1,
    replace(
        _V1,
        name="verl V1, 35B-A3B, H100: 16 + 8 to 16 + 16",
        axes={"tp": 2, "pp": 2, "cp": 2, "ep": 8},
        one=replace(_V1.other, step_s=13.15 * 3600 / 100, sampling=8),
    ),
    _areal("Qwen2.5-1.5B", 16, 250, (41.0, 14.8), 8),
    _areal("Qwen2.5-7B", 24, 250, (57.7, 25.4), 8),
    _areal("Qwen2.5-14B", 32, 80, (48.8, 21.9), 4),
    _areal("Qwen2.5-32B", 48, 60, (51.1, 31.1), 4),
)
"""volcengine/verl: docs/advance/one_step_off.md, fully_async.md, v1_async_trainer.md (V1: August 2026, mean
lengths published; ``num_warmup_batches`` is the bound; the shape is approximate). AReaL: arXiv 2505.24298v5,
tables 1 and 3; bound 8 for mathematics and 4 for code. Its layouts, and lengths of its larger models, are not
published: the fastest layouts, and the lengths of the smallest model. verl with Megatron, V1 and AReaL have
the factors of NeMo-RL's Megatron.
"""
