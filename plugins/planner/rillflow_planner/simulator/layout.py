"""Layout: a plan in the form that the simulator runs: tasks with pools and seconds, replicas.

problem, costs, plan ─ evaluate ─> seconds, transfers, seats, decoders ─┬─> tasks of a step, a batch, a group
                                                                        └─> replicas

When rows flow, training works in **batches**. A batch is a step's rows, or the rows of n minibatches if the
plan streams n at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from rillflow.errors import PlanError
from rillflow.placement.plan import SAMPLER, Plan
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.generation import Decoder
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.evaluate import StageTask, StepEvaluation, evaluate, tasks_of
from rillflow_planner.problem import Problem, Work
from rillflow_planner.simulator.draws import Row, rows_of
from rillflow_planner.simulator.replica import Replica
from rillflow_planner.workload import require_within

_GREEDY = "greedy"
"""Endpoint that answers every prompt once."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A plan to simulate."""

    problem: Problem
    """The step."""
    costs: CostModel
    """Cost model of the step."""
    plan: Plan
    """Placement of the units."""
    seed: int = 0
    """Seed of all draws."""
    parts: int = 0
    """Number of parts of a step's rows that move on in order, as in real runs; one version samples each step.
    With 0, complete groups move on if the plan lets rows flow.
    """
    functions: Mapping[str, str] = field(default_factory=dict)
    """Pool whose ranks compute a function, by role; other functions run outside all devices."""

    def __post_init__(self) -> None:
        require_within("parts", self.parts, 0, 1_000_000)

    @cached_property
    def evaluation(self) -> StepEvaluation:
        """Computed cost of the plan."""
        return evaluate(self.problem, self.costs, self.plan)

    @cached_property
    def tasks(self) -> tuple[StageTask, ...]:
        """Stages in program order."""
        stages, seconds = self.problem.graph.stages, self.evaluation.seconds
        return tasks_of(
            self.problem.graph,
            seconds=[seconds[stage.index] for stage in stages],
            pools=[self.pool_of(stage.index) for stage in stages],
            transfers=self.evaluation.transfers_s,
        )

    @cached_property
    def by_group(self) -> tuple[StageTask, ...]:
        """Stages that process groups one by one when rows flow, with the seconds of one group.

        These stages score, read only groups' data, and share their pool only with such stages. A function
        processes one group after the other.
        """
        graph, rest = self.problem.graph, [task for task in self.tasks if task.stage not in self.generating]
        kinds = (Work.SCORE, Work.FUNCTION)
        found = [task for task in rest if self.problem.work(graph.stages[task.stage]) in kinds]
        for _ in rest:
            known = {-1, *self.generating, *(task.stage for task in found)}
            mixed = {task.pool for task in rest if task.stage not in known}
            found = [task for task in found if task.pool not in mixed and known >= set(task.inputs)]
        share = 1.0 / self.problem.workload.prompts
        return tuple(_shared(task, share, share) for task in found)

    @cached_property
    def by_batch(self) -> tuple[StageTask, ...]:
        """Stages of a batch when rows flow; only the last group's transfer is still to be done."""
        apart = {task.stage for task in self.by_group} | set(self.generating)
        found = []
        for task in self.tasks:
            if task.stage in self.problem.publishing:
                found.append(task)
            elif task.stage not in apart:
                share, last = 1.0 / self.batches, 1.0 / self.problem.workload.prompts
                found.append(_shared(task, share, last, apart))
        return tuple(found)

    @property
    def flows(self) -> bool:
        """Whether rows flow from stage to stage as groups end; otherwise steps run in order."""
        return not self.parts and (self.plan.freshness > 0 or self.plan.streams > 0)

    @property
    def batches(self) -> int:
        """Number of batches per step."""
        minibatches = self.problem.workload.minibatches
        return minibatches // (self.plan.streams or minibatches)

    @cached_property
    def generating(self) -> Mapping[int, Seat]:
        """Unit of each stage that generates, in program order."""
        units = self.evaluation.units.values()
        owners = {index: seat for seat in units for index in seat.unit.stages}
        return {index: owners[index] for index in sorted(self.problem.generating)}

    @cached_property
    def lanes(self) -> Mapping[str, int]:
        """Number of replicas by pool; 0 for a pool that does not generate."""
        found = {pool.name: 0 for pool in self.plan.pools}
        for stage, unit in self.generating.items():
            found[unit.pool.name] = max(found[unit.pool.name], self.decoder(stage).replicas)
        return found

    def begun(self, what: str) -> int:
        """Return how many ``prompts`` begin in a round, or how many ``samples`` of each, without greedy
        ones.
        """
        wanted, share = vars(self.problem.workload)[what], vars(self.plan)[f"oversample_{what}"]
        return math.ceil(float(wanted * share) - 1e-9)

    def pool_of(self, stage: int) -> str:
        """Return the pool of a stage; a stage outside devices gets its own name, which no pool has."""
        role = self.problem.graph.stages[stage].role
        return self.evaluation.timings[stage].pool or self.functions.get(role, f"beside: {stage}")

    def decoder(self, stage: int) -> Decoder:
        """Return the decoder of a stage that generates."""
        found = self.generating[stage].decoder
        assert found is not None, "a unit that generates is seated with a decoder"
        return found

    def rows(self, prompt: int) -> list[Row]:
        """Return the rows of a prompt; the last sample is the greedy one, if there is one."""
        samples = self.begun("samples") + any(self.is_greedy(stage) for stage in self.generating)
        return rows_of(self.problem.workload, prompt, seed=self.seed, samples=samples)

    def is_greedy(self, stage: int) -> bool:
        """Return whether a stage answers every prompt once."""
        return self.problem.graph.stages[stage].endpoint == _GREEDY

    def replicas(self, stage: int) -> list[Replica]:
        """Return new replicas of a stage that generates."""
        decoder, shares = self.decoder(stage), self.problem.workload.shares_prompts
        return [Replica(decoder, shares_prompts=shares) for _ in range(decoder.replicas)]

    def peak_bytes(self, pool: str, cached: Mapping[int, float]) -> float:
        """Return the largest memory use of the pool's fullest device.

        Args:
            pool: name of the pool.
            cached: for each stage that generates, the most tokens in the cache of a replica.
        """
        use = next(one for one in self.evaluation.pools if one.name == pool)
        most = use.working_bytes
        for stage, tokens in cached.items():
            unit = self.generating[stage]
            if unit.pool.name == pool:
                filled = min(tokens / max(self.decoder(stage).capacity_tokens, 1), 1.0)
                most = max(most, unit.option.sampling_bytes + use.room_bytes * filled)
        return use.resident_bytes + most


def require_flow(layout: Layout) -> None:
    """Raise an error if rows cannot flow under this plan in the simulation.

    Raises:
        PlanError: the plan requests something that is not simulated.
    """
    plan, workload = layout.plan, layout.problem.workload
    pools = {layout.pool_of(stage) for stage in layout.generating}
    beside = [name for name, unit in plan.units.items() if unit.pool in pools and name != SAMPLER]
    what = why = ""
    if beside or not pools:
        what = f"generation shares its devices with {', '.join(beside)}"
        why = f"off-policy or streamed generation needs a pool of its own: {SAMPLER}"
    elif workload.minibatches % (plan.streams or 1) or workload.prompts % layout.batches:
        parts = f"{workload.minibatches} minibatches of {workload.prompts} prompts"
        what = f"streams is {plan.streams}, with {parts}"
        why = "a step must consist of whole batches with the same number of prompts"
    elif max(plan.oversample_prompts, plan.oversample_samples) > 1.0:
        what = f"oversample_prompts is {plan.oversample_prompts:g}, samples {plan.oversample_samples:g}"
        why = "off-policy or streamed generation has no rounds that could leave out long rows"
    elif not layout.problem.publishing:
        what, why = "no stage publishes weights", "all rows would come from version 0"
    if what:
        raise PlanError(
            f"freshness is {plan.freshness:g}: {what}", why=why, fix="change it, or freshness = 0"
        )


def _shared(task: StageTask, share: float, last: float, apart: Set[int] = frozenset()) -> StageTask:
    """Return a share of a task; for inputs from ``apart``, only the last part's transfer counts."""
    inputs = {source: spent * (last if source in apart else share) for source, spent in task.inputs.items()}
    return replace(task, seconds=task.seconds * share, inputs=inputs)


def asked(layout: Layout, handed_s: Mapping[int, Sequence[float]]) -> list[StageTask]:
    """Return the stages of a step in submission order: every stage of the first part, then of the second, ...

    Part p of stage s has the index s + p x number of stages; p is 0 for a stage that takes all rows. These
    stages run part by part: the policy's generation, and stages that only read such parts (scores, formulas).
    If the plan streams, updates do too, submitted after all previous stages of their role.

    Args:
        layout: the simulated plan.
        handed_s: for each stage that generates, the times when its parts are complete.
    """
    stages, work = layout.problem.graph.stages, layout.problem.work
    kinds = {Work.SCORE, Work.FUNCTION, Work.FORMULA} | ({Work.TRAIN} if layout.plan.streams else set())
    apart, chains = set[int](), list[list[StageTask]]([[]])
    for task in layout.tasks:
        stage, reads = stages[task.stage], set(task.inputs)
        if task.stage in handed_s:
            is_apart = not layout.is_greedy(task.stage)
        else:
            is_apart = work(stage) in kinds and bool(reads) and reads <= apart
        roles = {stages[one.stage].role for one in chains[-1]}
        if not is_apart or (task.stage in layout.problem.training and stage.role in roles):
            chains.append([])
        chains[-1].append(task)
        if is_apart:
            apart.add(task.stage)
        else:
            chains.append([])

    parts = {task.stage: max(layout.parts, 1) if task.stage in apart else 1 for task in layout.tasks}

    def of_part(task: StageTask, part: int) -> StageTask:
        share, handed, inputs = parts[task.stage], handed_s.get(task.stage, ()), dict[int, float]()
        seconds = task.seconds / share
        if handed:
            seconds = handed[part] - handed[part - 1] if part else handed[0 if share > 1 else -1]
        for source, spent in task.inputs.items():
            for one in [part] if share > 1 else range(parts.get(source, 1)):
                inputs[source + one * len(stages) if source >= 0 else source] = spent / share
        return replace(task, stage=task.stage + part * len(stages), seconds=seconds, inputs=inputs)

    whole = [(chain, parts[chain[0].stage]) for chain in chains if chain]
    return [of_part(task, part) for chain, share in whole for part in range(share) for task in chain]
