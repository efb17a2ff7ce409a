"""Layout: a plan as the simulator takes it: tasks with their pools and seconds, replicas, slow devices.

problem, costs, plan ─ evaluate ─> seconds, transfers, seats, decoders ─┬─> tasks of a step, a batch, a group
seed, settings ─ draws ─> slow devices ─────────────────────────────────┴─> replicas, each with its pace

Where rows flow, training takes **batches**: a step's rows; those of m minibatches where weights are published
every m; those of one minibatch where a step is streamed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from rillflow.errors import PlanError
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.cost_model.generation import Decoder
from rillflow.planner.cost_model.transfers import Seat
from rillflow.planner.evaluate import StepEvaluation, evaluate
from rillflow.planner.plan import SAMPLER, Plan
from rillflow.planner.problem import Problem, Work
from rillflow.planner.schedule import StageTask, tasks_of
from rillflow.planner.simulator.draws import Row, rows_of, slow_devices
from rillflow.planner.simulator.replica import Replica
from rillflow.planner.workload import require_within

_GREEDY = "greedy"
"""The endpoint that answers every prompt once."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a simulation assumes beside the plan.

    Example:
        Settings(straggler_share=0.05, straggler_factor=1.5)
    """

    parts: int = 0
    """In how many parts a step's rows are handed on, in order, every step sampled by one version, as runs do;
    0: by groups as they end, where the plan lets rows flow."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """By role that is a function, the pool whose ranks compute it; others run beside all devices."""
    straggler_share: float = 0.0
    """The share of devices that are slow; which ones follows from the seed."""
    straggler_factor: float = 1.0
    """How many times as long a slow device takes."""

    def __post_init__(self) -> None:
        require_within("parts", self.parts, 0, 1_000_000)
        require_within("straggler_share", self.straggler_share, 0.0, 1.0)
        require_within("straggler_factor", self.straggler_factor, 1.0, 1e6)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is simulated."""

    problem: Problem
    """The step."""
    costs: CostModel
    """Its cost model."""
    plan: Plan
    """Where its units lie."""
    settings: Settings
    """What is assumed beside."""
    seed: int
    """Of all that is drawn."""

    @cached_property
    def evaluation(self) -> StepEvaluation:
        """What the plan costs on paper."""
        return evaluate(self.problem, self.costs, self.plan)

    @cached_property
    def tasks(self) -> tuple[StageTask, ...]:
        """The stages, in the order of the program; those of slow pools take longer."""
        stages, seconds = self.problem.graph.stages, self.evaluation.seconds
        return tasks_of(
            self.problem.graph,
            seconds=[seconds[stage.index] * self._pace(stage.index) for stage in stages],
            pools=[self.pool_of(stage.index) for stage in stages],
            transfers=self.evaluation.transfers_s,
        )

    @cached_property
    def by_group(self) -> tuple[StageTask, ...]:
        """The stages that take groups one by one where rows flow, with the seconds of one group.

        They score, read nothing but what groups bring, and share their pool only with stages of that kind. A
        function takes groups in turn.
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
        """The stages of a batch where rows flow; those of all groups but the last have travelled by then."""
        apart = {task.stage for task in self.by_group} | set(self.generating)
        found = []
        for task in self.tasks:
            if task.stage in self.problem.publishing:
                found.append(task if self.plan.weights == "exposed" else replace(task, seconds=0.0))
            elif task.stage not in apart:
                share, last = 1.0 / self.batches, 1.0 / self.problem.workload.prompts
                found.append(_shared(task, share, last, apart))
        return tuple(found)

    @property
    def parts(self) -> int:
        """In how many parts a step's rows are handed on in order."""
        return max(1, self.settings.parts)

    @property
    def flows(self) -> bool:
        """Whether rows flow from stage to stage as they end; else in order, step by step."""
        plan = self.plan
        return not self.settings.parts and (plan.freshness > 0 or plan.streams or plan.publish_every > 0)

    @property
    def batches(self) -> int:
        """Batches of a step."""
        minibatches, every = self.problem.workload.minibatches, self.plan.publish_every
        return minibatches if self.plan.streams else minibatches // (every or minibatches)

    @property
    def published(self) -> int:
        """Batches after which weights are published."""
        return (self.plan.publish_every or self.problem.workload.minibatches) if self.plan.streams else 1

    @cached_property
    def generating(self) -> Mapping[int, Seat]:
        """The unit behind each stage that generates, in the order of the program."""
        units = self.evaluation.units.values()
        owners = {index: seat for seat in units for index in seat.unit.stages}
        return {index: owners[index] for index in sorted(self.problem.generating)}

    @cached_property
    def lanes(self) -> Mapping[str, int]:
        """Replicas by pool; 0 of a pool that does not generate."""
        found = {pool.name: 0 for pool in self.plan.pools}
        for stage, unit in self.generating.items():
            found[unit.pool.name] = max(found[unit.pool.name], self.decoder(stage).replicas)
        return found

    def begun(self, what: str) -> int:
        """The ``prompts`` that begin in a round, or the ``samples`` of each, greedy ones not counted."""
        wanted, share = vars(self.problem.workload)[what], vars(self.plan)[f"oversample_{what}"]
        return math.ceil(float(wanted * share) - 1e-9)

    def pool_of(self, stage: int) -> str:
        """Whose devices a stage holds; of one beside them a name of its own, which no pool has."""
        role = self.problem.graph.stages[stage].role
        return self.evaluation.timings[stage].pool or self.settings.functions.get(role, f"beside: {stage}")

    def decoder(self, stage: int) -> Decoder:
        """The replicas of a stage that generates."""
        found = self.generating[stage].decoder
        assert found is not None, "a unit that generates is seated with a decoder"
        return found

    def rows(self, prompt: int) -> list[Row]:
        """The rows of a prompt; the last sample is the greedy one, if there is any."""
        samples = self.begun("samples") + any(self.is_greedy(stage) for stage in self.generating)
        return rows_of(self.problem.workload, prompt, seed=self.seed, samples=samples)

    def is_greedy(self, stage: int) -> bool:
        """Whether a stage answers every prompt once."""
        return self.problem.graph.stages[stage].endpoint == _GREEDY

    def replicas(self, stage: int) -> list[Replica]:
        """Fresh replicas of a stage that generates; one with a slow device is slow."""
        decoder, paces = self.decoder(stage), self._paces[self.pool_of(stage)]
        each, shares = max(len(paces) // decoder.replicas, 1), self.problem.workload.shares_prompts
        slow = [max(paces[place * each :][:each], default=1.0) for place in range(decoder.replicas)]
        return [Replica(decoder, slow=one, shares_prompts=shares) for one in slow]

    def peak_bytes(self, pool: str, cached: Mapping[int, float]) -> float:
        """The most the pool's fullest device holds.

        Args:
            pool: its name.
            cached: of each stage that generates, the most tokens the cache of a replica held.
        """
        use = next(one for one in self.evaluation.pools if one.name == pool)
        most = use.working_bytes
        for stage, tokens in cached.items():
            unit = self.generating[stage]
            if unit.pool.name == pool:
                filled = min(tokens / max(self.decoder(stage).capacity_tokens, 1), 1.0)
                most = max(most, unit.option.sampling_bytes + use.room_bytes * filled)
        return use.resident_bytes + most

    @cached_property
    def _paces(self) -> Mapping[str, list[float]]:
        """How many times as long each device of a pool takes."""
        slow = slow_devices(self.seed, self.evaluation.devices, self.settings.straggler_share)
        paces = iter([self.settings.straggler_factor if one else 1.0 for one in slow])
        return {pool.name: [*islice(paces, pool.devices)] for pool in self.plan.pools}

    def _pace(self, stage: int) -> float:
        """A stage of many devices is as slow as the slowest; weights on their way are not slowed."""
        is_slowed = stage not in self.problem.publishing
        return max(self._paces.get(self.pool_of(stage), [1.0])) if is_slowed else 1.0


def require_flow(layout: Layout) -> None:
    """Refuse to let rows flow where that is not simulated.

    Raises:
        PlanError: the plan asks for it.
    """
    plan, workload = layout.plan, layout.problem.workload
    pools = {layout.pool_of(stage) for stage in layout.generating}
    beside = [name for name, unit in plan.units.items() if unit.pool in pools and name != SAMPLER]
    what = why = ""
    if beside or not pools:
        what = f"generation shares a pool with {', '.join(beside)}"
        why = f"rows flow only where generation has devices of its own: {SAMPLER}"
    elif workload.minibatches % (plan.publish_every or 1) or workload.prompts % layout.batches:
        parts = f"{workload.minibatches} minibatches of {workload.prompts} prompts"
        what = f"publish_every is {plan.publish_every}, with {parts}"
        why = "a step has a whole number of batches of as many prompts each"
    elif max(plan.oversample_prompts, plan.oversample_samples) > 1.0:
        what = f"oversample_prompts is {plan.oversample_prompts:g}, samples {plan.oversample_samples:g}"
        why = "where rows flow, long ones hold nobody up: there are no rounds to leave them out of"
    elif not layout.problem.publishing:
        what, why = "no stage publishes weights", "rows would stay of version 0"
    if what:
        raise PlanError(f"freshness is {plan.freshness}: {what}", why=why, fix="change it, or freshness 0")


def _shared(task: StageTask, share: float, last: float, apart: Set[int] = frozenset()) -> StageTask:
    """A share of a task; of what comes from stages apart only the last part travels."""
    inputs = {source: spent * (last if source in apart else share) for source, spent in task.inputs.items()}
    return replace(task, seconds=task.seconds * share, inputs=inputs)
