"""World: one start of a run, as ``app.launch`` and ``app.build`` make it, on simulated ranks.

    run directory ─ open ─ newest checkpoint ─ rewind ─> backend, roles, source ─> phase ─ Loop ─> the end

Rillflow's own code here: ``controller``, ``runs``, ``workers`` without its backends, the sampler and the
weight transfer. The roles of ``roles.py`` replace models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any, cast

from rillflow.app.launch import restarted
from rillflow.controller.admission import CapacityBound, StalenessBound
from rillflow.controller.async_rollout import LEFT, AsyncRollout
from rillflow.controller.cadence import Cadence
from rillflow.controller.checkpoint import Checkpoint, latest_checkpoint
from rillflow.controller.decisions import Decisions, Event, decisions_of
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.controller.interrupt import Interruption
from rillflow.controller.loop import Loop
from rillflow.controller.open_step import Phase
from rillflow.controller.saved_flight import FLIGHT, KeptFlight, kept_flight
from rillflow.controller.source import DataStream, GroupSampling, Source
from rillflow.controller.step_executor import StepExecutor
from rillflow.controller.streamed_stages import streamed_stages
from rillflow.controller.tail_batching import ASIDE, TailBatching
from rillflow.controller.weight_sync import WeightSync
from rillflow.formulas import seeing
from rillflow.formulas.advantages import group_advantages
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import HELD_OUT_EPOCH, RowId
from rillflow.roles.sampler import Sampler
from rillflow.runs import layout
from rillflow.runs.progress import Progress
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow.tasks.prompts import PromptStream, StreamPosition
from rillflow.workers.awaited import Replies
from rillflow.workers.backend import Pool, Replacement
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending
from tests.simulation.backend import SimulatedBackend
from tests.simulation.disk import FakeDisk
from tests.simulation.roles import Factory, Passes, Policy, Reference, Reward, sampler
from tests.simulation.timeline import Timeline

DEADLINE_S = 600.0
SEED = 7
PROMPTS = 13
"""Prompts of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings of a run that decide its results."""

    freshness: int = 0
    """The freshness bound, k."""
    is_ready_first: bool = False
    """True if a step trains the groups that are ready first."""
    drops: bool = False
    """True if ready first drops late groups instead of waiting for them."""
    publishes: int = 1
    """Publishes per step, with ready first."""
    chunks: int = 1
    """Chunks of a step's answers, in order."""
    replicas: int = 1
    """Replicas of the sampler."""
    groups: int = 2
    """Groups of a step."""
    samples: int = 2
    """Rows of a group."""
    steps: int = 8
    """Steps of the run."""
    checkpoint_every: int = 2
    """Steps between two checkpoints."""
    checkpoint_s: float = 0.0
    """Fake seconds between two checkpoints; 0: only by steps."""
    evaluate_every: int = 3
    """Steps between two evaluations."""
    rows: int = 6
    """Rows that a replica samples at once."""
    has_scorer: bool = True
    """True if the reward has its own pool."""
    has_reference: bool = False
    """True if a reference follows the policy."""
    oversampling: float = 1.0
    """Prompts that a step begins for each trained one; above 1, the longest are deferred."""
    restarts: int = 0
    """Restarts of all ranks in a row, in one start of the run, if a rank dies."""


def step(flow: Any, prompts: Batch, config: Scenario) -> Any:
    """Sample, score, train and publish; remember a number and use it in the next step."""
    rollouts = flow.policy.generate(prompts, samples=config.samples)
    rewards = flow.reward.score(rollouts)
    advantages = flow.compute(group_advantages, rollouts, rewards, into="advantages", scale="off")
    shifted = flow.compute(shifted_by, advantages, into="advantages", shift=flow.recall("mean", 0.0))
    flow.remember("mean", flow.number(mean_reward, rewards))
    report = flow.policy.update(rollouts, shifted, passes=Passes())
    if config.has_reference:
        flow.reference.follow()
    flow.publish(flow.policy)
    return report


@seeing("row")
def shifted_by(advantages: Any, *, shift: float) -> Any:
    """Return advantages plus a number of the step before."""
    return advantages + shift


def mean_reward(rewards: Any) -> float:
    """Return the mean reward."""
    return float(rewards.double().mean())


class World:
    """One start of a run in a folder.

    Args:
        scenario: the run's settings.
        disk: the disk with the run's folder.
        timeline: clock, chance and faults of this start.
        repeat: decisions of a run to replay from its start; None to run.
    """

    algorithm = staticmethod(step)
    """The algorithm of every step."""

    def __init__(
        self,
        scenario: Scenario,
        disk: FakeDisk,
        timeline: Timeline,
        repeat: Sequence[Event] | None = None,
    ) -> None:
        self._repeat = repeat
        self.scenario, self.disk, self.timeline = scenario, disk, timeline
        self.backend = SimulatedBackend(timeline, DEADLINE_S)
        self.attempts = 0
        """Number of starts of all ranks."""
        self.interruption = Interruption(clock=timeline.clock)
        self.resumed_after = 0
        """Steps of the checkpoint from which the ranks were last started."""
        self.is_fresher = False
        """True if a checkpoint saved no rows for later steps, although they had been sampled."""
        self.said: list[str] = []
        """Output lines for the user."""

    def run(self) -> None:
        """Run the remaining steps, as ``rillflow run`` does.

        Raises:
            DriverKilled: a fault killed the driver.
            RillflowError: the run ended early, with an error for its user.
        """
        scenario, timeline = self.scenario, self.timeline
        with self.disk.watched(timeline), self.interruption.orderly(), ExitStack() as stack:
            opened = RunDirectory.open(
                self.disk.folder / "run",
                asdict(scenario),
                may_change=["replicas"],
                clock=timeline.clock,
            )
            run = stack.enter_context(opened)
            progress = stack.enter_context(Progress(total_steps={"only": scenario.steps}, quiet=True))
            restarted(
                partial(self._attempt, run, progress), scenario.restarts, run, progress, self.interruption
            )

    def _attempt(self, run: RunDirectory, progress: Progress, stack: ExitStack) -> None:
        """Start all ranks and train from the newest checkpoint, as ``app.launch`` does."""
        if self.attempts:
            self.backend = SimulatedBackend(self.timeline, DEADLINE_S)
        self.attempts += 1
        run.evidence.remove(layout.FINISHED)
        kept = latest_checkpoint(run.checkpoints, run.id)
        run.rewind(kept.step if kept else -1)
        self.resumed_after = kept.step if kept else 0
        self.is_fresher |= self._lacks_rows(kept)
        stack.callback(self._closed)
        self._train(run, kept, progress)
        run.write_json(layout.FINISHED, {"steps": self.scenario.steps})

    def _closed(self) -> None:
        if not self.timeline.is_over:  # otherwise ranks outlive the driver for a moment
            self.backend.close()

    def _lacks_rows(self, kept: Checkpoint | None) -> bool:
        scenario = self.scenario
        if kept is None or scenario.is_ready_first or not scenario.freshness or kept.step == scenario.steps:
            return False
        return not kept.sampled(kept.step + 1)

    def _train(self, run: RunDirectory, kept: Checkpoint | None, progress: Progress) -> None:
        scenario, clock = self.scenario, self.timeline.clock
        cadence = Cadence(
            evaluate_every=scenario.evaluate_every,
            checkpoint_every=scenario.checkpoint_every,
            checkpoint_s=scenario.checkpoint_s,
            keep_checkpoints=2,
            max_skipped=0,
        )
        executor, sync = self._roles(kept)
        loop = Loop(
            run, progress, cadence, self._evaluated, self.interruption, scenario.steps, DEADLINE_S, clock
        )
        state: dict[str, Any] = dict(kept.state) if kept else {"done": 0, "version": 0}
        loop.version = state["version"]
        place = dict(state["stream"]) if kept else {}
        left = [(epoch, prompt) for key in (LEFT, ASIDE) for epoch, prompt in place.pop(key, [])]
        flight = self._flight(run, kept, place.pop(FLIGHT, None))
        source = self._source(executor, sync, StreamPosition(**place), left, kept, flight)
        staged = StepExecutor(executor, source)
        phase = Phase(
            name="only",
            index=0,
            first=0,
            steps=scenario.steps,
            rows=scenario.groups,
            step=self.algorithm,
            config=scenario,
            flow=Flow(staged, state.get("numbers")),
            executor=staged,
            trained=("policy",),
            moving=("reference",) if scenario.has_reference else (),
            source=source,
            beside=None,
            evaluated=True,
            freshness=scenario.freshness,
        )
        loop.run_phase(phase, state["done"])

    def _flight(self, run: RunDirectory, kept: Checkpoint | None, state: Any) -> KeptFlight | Decisions:
        """Return the groups in flight of the checkpoint, or only the decisions to repeat."""
        if self._repeat is not None:
            return Decisions(None, self._repeat)
        events = decisions_of(run.path)
        if kept is None or state is None:
            return Decisions(run, events)
        scenario = self.scenario
        return kept_flight(
            kept,
            state,
            log=run,
            events=events,
            replicas=scenario.replicas,
            needs_rows=True,
        )

    def _roles(self, kept: Checkpoint | None) -> tuple[GroupExecutor, WeightSync]:
        """Make the roles on their ranks."""
        scenario, backend = self.scenario, self.backend
        scorer = [Pool(name="scorers", size=1)] if scenario.has_scorer else []
        backend.open([Pool(name="main", size=1), Pool(name="answers", size=scenario.replicas), *scorer])
        apart = Mesh.of(dp=scenario.replicas, tp=1)
        groups = {
            "policy": Group("policy", endpoints_of(Policy), mesh=Mesh.of(dp=1), pool="main", backend=backend),
            "sampler": Group(
                "sampler", endpoints_of(Sampler), mesh=apart, pool="answers", backend=backend, of="policy"
            ),
            "reward": Group(
                "reward",
                endpoints_of(Reward),
                mesh=Mesh.of(dp=1),
                pool="scorers" if scorer else "main",
                backend=backend,
            ),
        }
        model = kept.model("policy") if kept else None
        counted = Mesh(axes=apart.axes, ranks=tuple(1 + rank for rank in apart.ranks))
        groups["policy"].start(Factory(make=Policy, arguments=(model, kept.state["version"] if kept else 0)))
        self._sampler = Factory(make=sampler, arguments=(counted, scenario.rows))
        groups["sampler"].start(self._sampler)
        groups["reward"].start(Factory(make=Reward))
        if scenario.has_reference:
            endpoints = endpoints_of(Reference)
            groups["reference"] = Group(
                "reference", endpoints, mesh=Mesh.of(dp=1), pool="main", backend=backend
            )
            followed = kept.model("reference") if kept else None
            groups["reference"].start(Factory(make=Reference, arguments=(followed,)))
        executor = GroupExecutor(groups, backend)
        sync = WeightSync(executor, DEADLINE_S)
        ready = scenario.is_ready_first
        sync.begin(is_ahead=scenario.freshness > 0, keeps_initial=ready)
        return executor, sync

    def _source(
        self,
        executor: GroupExecutor,
        sync: WeightSync,
        position: StreamPosition,
        left: Sequence[tuple[int, int]],
        kept: Checkpoint | None,
        flight: KeptFlight | Decisions,
    ) -> Source:
        scenario = self.scenario
        prompts = PromptStream(range(PROMPTS), seed=SEED, position=position)
        data = DataStream(take=partial(taken, prompts), state=prompts.state)
        done = kept.state["done"] if kept else 0
        how = GroupSampling(
            groups=(scenario.steps - done) * scenario.groups,
            samples=scenario.samples,
            sampling=None,
            replicas=executor.groups["sampler"].mesh.groups("tp"),
            deadline_s=DEADLINE_S,
            restarts=2,
            restart=partial(self._restart, executor, sync),
            say=self.said.append,
        )
        if scenario.oversampling > 1:
            return TailBatching(
                executor,
                data,
                how=how,
                prompts=scenario.oversampling,
                begun_samples=scenario.samples,
                aside=batch(left) if left else None,
                sync=sync,
            )
        if not scenario.is_ready_first:
            return Source(
                executor,
                data,
                sync=sync,
                chunks=scenario.chunks,
                kept=kept.sampled if kept else lambda _: (),
            )
        return self._ready_first(executor, data, sync, how, left, flight)

    def _ready_first(
        self,
        executor: GroupExecutor,
        data: DataStream,
        sync: WeightSync,
        how: GroupSampling,
        left: Sequence[tuple[int, int]],
        flight: KeptFlight | Decisions,
    ) -> AsyncRollout:
        scenario = self.scenario
        rule: type[StalenessBound[Any]] = CapacityBound if scenario.drops else StalenessBound
        return AsyncRollout(
            executor,
            data,
            sync,
            rule=rule(
                freshness=scenario.freshness,
                prompts=scenario.groups,
                published=Fraction(1, scenario.publishes),
            ),
            how=how,
            step_groups=scenario.groups,
            parts=scenario.publishes,
            chunks=1,
            most_rows=scenario.rows,
            streamed=streamed_stages(
                {"reward.score": [(["policy.generate"], {})]},
                executor,
                changing=["policy"],
                most=(scenario.freshness + 1) * scenario.groups,
                step_rows=scenario.groups * scenario.samples,
            ),
            decisions=flight if isinstance(flight, Decisions) else flight.decisions,
            again=batch(left) if left else None,
            kept=None if isinstance(flight, Decisions) else flight,
        )

    def _restart(
        self, executor: GroupExecutor, sync: WeightSync, ranks: Sequence[int]
    ) -> Iterator[Replacement | Replies | Pending]:
        """Replace ranks of the sampler, as ``RoleGroups.restart_sampler`` does."""
        group = executor.groups["sampler"]
        yield self.backend.replace([group.places[rank] for rank in ranks])
        yield (made := group.begin_restart(ranks, self._sampler))
        made.read(DEADLINE_S)
        yield (connected := sync.connect(ranks))
        connected.wait(DEADLINE_S)

    def _evaluated(self, executor: GroupExecutor) -> Sequence[Evaluation]:
        """Evaluate two held-out prompts."""
        rollouts = executor.call("policy", "generate", [batch([(HELD_OUT_EPOCH, n) for n in range(2)])], {})
        scores = executor.call("reward", "score", [rollouts], {})
        found = executor.apply(graded, scores, place=rollouts.places[0])
        return [cast(Evaluation, found.read(DEADLINE_S))]


def graded(scores: Batch) -> Evaluation:
    """Return the evaluation of scored rows."""
    return Evaluation(count=len(scores), mean_reward=mean_reward(scores.dense("rewards")), is_accuracy=False)


def order_of_prompts(count: int) -> list[tuple[int, int]]:
    """Return epoch and prompt of the first groups of the stream."""
    return [(draw.epoch, draw.row) for draw in PromptStream(range(PROMPTS), seed=SEED).take(count)]


def taken(stream: PromptStream[int], count: int) -> Batch:
    """Return the next prompts of a stream."""
    return batch([(draw.epoch, draw.row) for draw in stream.take(count)])


def batch(prompts: Sequence[tuple[int, int]]) -> Batch:
    """Return prompts as a batch."""
    return Batch(
        ids=row_ids([RowId(epoch, prompt, 0) for epoch, prompt in prompts]),
        fields={
            "tokens": Ragged.from_rows([[prompt] for _, prompt in prompts]),
            "columns": Ragged.from_text(['{"prompt": "?"}'] * len(prompts)),
        },
    )
