"""Problem: the input of planning as data: the graph's stages, the models of the roles, rows and devices.

recipe, or options in its place; devices ─> Problem ─> cost_model ─> search, simulator
stage's endpoint ─> kind of work ─> the cost model's term
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import combinations

from rillflow.errors import PlanError, nearest
from rillflow.graph.graph import CONTROLLER, Graph, Stage
from rillflow.placement.plan import SAMPLER, Plan
from rillflow_planner.cost_model.options import LAYOUTS, Layouts
from rillflow_planner.hardware import Accuracy, Factors, Hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.workload import Workload

OWN = "rillflow"
"""Shipped factors that were fitted to Rillflow's own steps."""
UNFITTED = 'default factors, not compared with any run; like = "gpu" selects those of runs on a GPU'
HELD = 0.7
"""Smallest share of steps left out that a range, meant for 80%, must hold."""
UNTOLD = "unknown: a cluster file or --engine changes the factor set and names no source (calibrated = ...)"


class Work(StrEnum):
    """Kind of work, which determines the cost formula of a stage."""

    GENERATE = "generate"
    """Decode token by token; each token reads all weights and the KV cache."""
    SCORE = "score"
    """One forward pass over whole rows."""
    TRAIN = "train"
    """Forward and backward passes, and the optimiser."""
    PUBLISH = "publish"
    """Weight transfer from training to generation."""
    FUNCTION = "function"
    """A function of the rows that uses no device, such as a programmed reward."""
    FORMULA = "formula"
    """A formula over numbers in the controller."""


ENDPOINTS: Mapping[str, Work] = {
    "generate": Work.GENERATE,
    "greedy": Work.GENERATE,
    "logprobs": Work.SCORE,
    "totals": Work.SCORE,
    "follow": Work.FORMULA,
    "values": Work.SCORE,
    "final_values": Work.SCORE,
    "score": Work.SCORE,
    "update": Work.TRAIN,
    "publish": Work.PUBLISH,
}
"""Kind of work by endpoint of a model; a role without a model computes a function."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A model, or a part of a role's work, that is placed as a whole.

    Example:
        Unit(name="critic", shape=shape, stages=(7, 11))
    """

    name: str
    """Name of the role, or ``sampler``."""
    shape: ModelShape
    """Shape of the model."""
    stages: tuple[int, ...]
    """Stages of the graph that the unit computes."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One step to plan.

    Example:
        Problem(graph=graph, shapes={"policy": shape}, workload=workload, hardware=hardware)
    """

    graph: Graph
    """Stages of the step and the fields between them."""
    shapes: Mapping[str, ModelShape]
    """Shape of each role's model; a role without one is a function."""
    workload: Workload
    """Rows, lengths and passes of a step."""
    hardware: Hardware
    """Devices and their efficiency."""
    samples_apart: bool = False
    """Whether generation is its own unit, ``sampler``, with a second copy of the policy's weights."""
    recomputes: bool = True
    """Whether the backward pass recomputes activations."""
    freshness: float = 0
    """Largest age of a trained token in policy versions."""
    layouts: Layouts = LAYOUTS["rillflow"]
    """Grids that are searched."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.shapes) - set(self.graph.roles))
        if unknown:
            raise PlanError(
                f"a model is given for the unknown role {unknown[0]!r}",
                why=f"the graph has the roles {', '.join(self.graph.roles)}",
            )

    def work(self, stage: Stage) -> Work:
        """Return the kind of work of a stage.

        Raises:
            PlanError: the planner does not know the endpoint.
        """
        if stage.role == CONTROLLER:
            return Work.FORMULA
        if stage.role not in self.shapes:
            return Work.FUNCTION
        if stage.endpoint not in ENDPOINTS:
            raise PlanError(
                f"the stage {stage.name} cannot be planned",
                why=f"the planner does not know the cost of the endpoint {stage.endpoint!r}",
                fix=nearest(stage.endpoint, ENDPOINTS),
            )
        return ENDPOINTS[stage.endpoint]

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units to place, in the order of the graph's roles; the sampler last."""
        shapes = {role: self.shapes[role] for role in self.graph.roles if role in self.shapes}
        stages: dict[str, list[int]] = {role: [] for role in shapes}
        for stage in self.graph.stages:
            if self.samples_apart and self.work(stage) is Work.GENERATE:
                shapes[SAMPLER] = shapes[stage.role]
                stages.setdefault(SAMPLER, []).append(stage.index)
            elif stage.role in shapes:
                stages[stage.role].append(stage.index)
        return tuple(Unit(name=name, shape=shapes[name], stages=tuple(own)) for name, own in stages.items())

    @cached_property
    def generating(self) -> frozenset[int]:
        """Indices of the stages that generate."""
        return self._of_kind(Work.GENERATE)

    @cached_property
    def publishing(self) -> frozenset[int]:
        """Indices of the stages that bring weights to generation."""
        return self._of_kind(Work.PUBLISH)

    @cached_property
    def training(self) -> frozenset[int]:
        """Indices of the stages that change weights."""
        return self._of_kind(Work.TRAIN)

    @cached_property
    def fusable(self) -> tuple[tuple[Unit, Unit], ...]:
        """Pairs of units that each have one update, of which neither needs the result of the other.

        None if idle models leave the devices, because the state of both would have to stay.
        """
        updates = [
            (unit, self.training.intersection(unit.stages)) for unit in self.units if not self.offloads
        ]
        needs: dict[int, set[int]] = {}
        for edge in sorted(self.graph.edges, key=lambda edge: edge.destination):
            needs.setdefault(edge.destination, set()).update({edge.source}, needs.get(edge.source, ()))
        return tuple(
            (one, two)
            for (one, first), (two, second) in combinations(updates, 2)
            if len(first) == len(second) == 1
            and not any(needs.get(stage, set()) & (first | second) for stage in first | second)
        )

    def _of_kind(self, kind: Work) -> frozenset[int]:
        return frozenset(stage.index for stage in self.graph.stages if self.work(stage) is kind)

    @property
    def overhead_s(self) -> float:
        """Seconds of a step outside stages."""
        factors = self.hardware.factors
        return factors.step_s + factors.step_row_s * self.workload.rows

    @property
    def offloads(self) -> bool:
        """Whether an idle model keeps its state in host memory."""
        return self.hardware.engine.offloads and not self.samples_apart

    @property
    def refits(self) -> bool:
        """Whether whole tensors move to generation, at a measured rate; Rillflow moves what a rank lacks."""
        return self.layouts != Problem.layouts

    def apart(self, freshness: float = 0) -> Problem:
        """Return the same step with a separate sampler."""
        return replace(self, samples_apart=True, freshness=freshness)

    def of_plan(self, plan: Plan) -> Problem:
        """Return the same step with the plan's sampler and freshness bound."""
        return replace(self, samples_apart=SAMPLER in plan.units, freshness=plan.freshness)


def assumed(problem: Problem, *, lengths: str, seconds: str) -> Iterator[str]:
    """Yield a sentence for every assumption about a problem.

    Args:
        problem: the step.
        lengths: how to replace assumed lengths of answers; empty if they were given.
        seconds: how to give the duration of a reward function.
    """
    response = problem.workload.response
    if lengths and response.kind == "lognormal":
        yield (
            f"responses: log-normal, median {response.median:,.4g} tokens, sigma {response.sigma:.2g}, "
            f"clipped at {response.limit:,}; {lengths}"
        )
    for excluded in sorted({shape.excluded for shape in problem.shapes.values() if shape.excluded}):
        yield f"the language model alone is counted, without {excluded}"
    functions = [role for role in problem.graph.roles if role not in problem.shapes]
    if functions and not problem.workload.function_s:
        yield f"{' and '.join(functions)}: a function that takes no time; {seconds}"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A problem and its assumptions.

    It asks one of two questions: what a published stack would take, or what Rillflow's own best plan is.
    """

    problem: Problem
    """The step, its models and the devices."""
    assumptions: tuple[str, ...]
    """A sentence for each assumed number, with the option that replaces it."""
    steps: int = 0
    """Number of steps of the whole run; 0 if not given."""
    stack: str = ""
    """Published stack that the question is about; empty for Rillflow."""
    placed: Plan | None = None
    """Layout that the question gives; None to search for the best one."""
    may_recompute: bool = False
    """Whether the planner decides if activations are recomputed."""
    named: frozenset[str] = frozenset()
    """Settings that are given, not defaults of Rillflow."""

    @property
    def title(self) -> str:
        """The question, as a heading, and how unsure its answer is where no range can be shown."""
        step = f"{self.problem.graph.name} on {self.problem.hardware.name}"
        if not self.stack:
            hardware, what = self.problem.hardware, "given layout" if self.placed else "best plan"
            source = hardware.calibrated.partition(";")[0].partition(",")[0]
            borrowed = f", timed by {source}" if hardware.stack not in ("", OWN) and source else ""
            return f"{step}: Rillflow's {what}{borrowed}"
        layout = "the given" if self.placed else "the best"
        unsure = f"; unsure: {self.caution}" if self.caution else ""
        return f"{step}: what {self.stack} would take, with {layout} layout{unsure}"

    @property
    def unlike(self) -> str:
        """Why a stack's errors say little about this step, and the nearest steps that were measured."""
        known, dtype = self.problem.hardware.published, self.problem.workload.dtype
        if not self.stack or known is None:
            return ""
        near, kinds = known.unfitted, sorted({fleet.device.name for fleet in self.problem.hardware.fleets})
        if not known.devices:
            why = f"no step of {self.stack} was fitted"
        elif not {*kinds} <= {*known.devices}:
            why = f"its range is of {' and '.join(known.devices)}, not of {' and '.join(kinds)}"
        elif dtype != "bfloat16":
            why, near = (
                f"its range is of bfloat16, not of {dtype}",
                known.float8 if dtype == "float8" else None,
            )
        elif any(shape.keeps_attention for shape in self.problem.shapes.values()):
            why = "no step with linear or chunked attention was fitted"
        else:
            return ""
        return f"{why}; {near.text}" if near else why

    @property
    def error(self) -> Accuracy | None:
        """Errors of predictions of this very kind on published steps; None if there were no such steps."""
        known = self.problem.hardware.published
        if not self.stack or known is None or self.unlike:
            return None
        return known.placed if self.placed else known.searched

    @property
    def caution(self) -> str:
        """Why a stack's step has no range; empty if it has one."""
        error = self.error
        if not self.stack or self.problem.hardware.published is None or (error and error.held >= HELD):
            return ""
        few = error and f"steps left out of its fit took {error.low:g} to {error.high:g} times the prediction"
        return self.unlike or few or "no step of this stack was predicted with the best layout of a search"

    @property
    def accuracy(self) -> str:
        """Data behind the factors, and the measured error of this kind of prediction."""
        hardware, error = self.problem.hardware, self.error
        if not hardware.calibrated:
            return UNFITTED if hardware.factors == Factors() else UNTOLD
        told = f"factors fitted to {hardware.calibrated}"
        if error is None:
            kinds = " and ".join(sorted({fleet.device.name for fleet in hardware.fleets}))
            none = f"no steps of {self.stack or 'Rillflow'} on {kinds} were left out and predicted"
            return f"{told}; {self.caution or none}, so there is no range"
        unsure = ", too few to show one" if error.held < HELD else ""
        return (
            f"{told}; on published steps of models, releases and machines left out of the fit, the median "
            f"error is {error.median:.0%}, the largest {error.worst:.0%}; ranges of the other steps hold "
            f"{error.held:.0%} of them{unsure}"
        )

    def corrected_s(self, seconds: float) -> float:
        """Return predicted seconds of a step without the bias of a search for the smallest."""
        return seconds if self.error is None else self.error.bias * seconds

    def range_s(self, seconds: float, *, is_stage: bool = False) -> tuple[float, float] | None:
        """Return the range of 80% of the steps, or stages, with this prediction.

        None if it was not measured, or does not hold for steps left out.
        """
        error = self.error
        if error is None or error.held < HELD or (is_stage and not error.stage_low):
            return None
        low, high = (error.stage_low, error.stage_high) if is_stage else (error.low, error.high)
        return low * seconds, high * seconds
