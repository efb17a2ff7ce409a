"""Ready first: sample groups without a pause, and form each step from the groups that are ready.

stream ─> table ─ begin ─> replicas: advance, advance, ... ─ rows ─> streamed stages ─> rule ─ take ─> step
            ^                 ^ between two of them: receive, serve        │ score, ...
            └──── again ──────┼───────────── given up, holder died ────────┘
                              └─ new weights, one replica after the other

``GroupTable`` knows which stage has which group. A replica runs its rows in short calls, two of which are in
flight. New groups and new weights are submitted between these calls. The controller therefore knows the
version that a replica samples with, and begins a group only if the admission rule (controller.admission)
allows it. Rows that run when new weights arrive continue with the new weights. Stages that read only sampled
rows, such as a reward, run as soon as a group is sampled (controller.streamed_stages): a slow group delays no
other. A group is ready when all of them are done.

loop          ``until``, in the thread of the training loop, whenever that has to wait
consumes      results of replicas and streamed stages; parcels of finished steps; prompts of the stream
waits for     the first result of a replica, of a streamed stage, or of the oldest open step
unblocked by  those ranks; each wait ends at the deadline
produces      calls to replicas and streamed stages; ready groups for the rule
shutdown      healthy: the phase's last step trains the last groups. Checkpoint, stop or error: prompts of
              groups that no complete step has trained are sampled again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any

from rillflow.controller.admission import StalenessBound
from rillflow.controller.decisions import Decisions
from rillflow.controller.executor import GroupExecutor, GroupPart
from rillflow.controller.flow import StageResult
from rillflow.controller.group_table import GENERATE, TRAIN, GroupTable
from rillflow.controller.replicas import SamplerReplica
from rillflow.controller.source import (
    ChunkedResult,
    ChunksToCome,
    DataStream,
    GroupSampling,
    OpenedStep,
    Source,
    one_by_one,
)
from rillflow.controller.streamed_stages import StageWorker
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.errors import RolloutError
from rillflow.graph.handle import Options
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Max, Mean, Metric, Sum
from rillflow.roles.sampler import GroupId
from rillflow.workers.config import SAMPLER
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending, joined, wait_for_any
from rillflow.workers.values import Facts, Lie, shares

LEFT = "left"
"""Key in the position in the data for groups that were drawn and that no step has trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupInFlight:
    """A group whose rows have begun."""

    id: GroupId
    """Epoch and prompt id."""
    version: int
    """Publishes of the phase before the group's first token."""
    replica: SamplerReplica
    """Replica that samples the group."""
    call: int
    """Number of the replica's call that begins the group; earlier calls report on rows that were given up."""


class AsyncRollout(Source):
    """Source of steps formed from the groups that are ready first.

    Args:
        executor: has the groups of ranks.
        stream: prompts of the phase.
        sync: transfers versions to the sampler.
        rule: admission rule of the freshness bound, with no group begun.
        how: how groups are sampled.
        step_groups: groups of a step.
        parts: parts of a step; each part is trained before the next version is published.
        chunks: at k = 0, number of chunks of a step, which are formed of the groups that are ready first.
        most_rows: largest number of rows of a replica at once.
        streamed: workers of the stages that run group by group.
        decisions: notes the decisions of the phase, or repeats those of a run.
        again: drawn prompts that no step had trained when the run was interrupted; they are sampled first.
    """

    def __init__(
        self,
        executor: GroupExecutor,
        stream: DataStream,
        sync: WeightSync,
        *,
        rule: StalenessBound[GroupInFlight],
        how: GroupSampling,
        step_groups: int,
        parts: int,
        chunks: int,
        most_rows: int,
        streamed: Sequence[StageWorker] = (),
        decisions: Decisions | None = None,
        again: Batch | None = None,
    ) -> None:
        super().__init__(executor, stream, sync=sync, chunks=chunks)
        self._rule, self._how, self._wanted = rule, how, how.groups
        self._step_groups, self._parts = step_groups, parts
        self._replicas = [
            SamplerReplica(executor=executor, sync=sync, how=how, number=number, most_rows=most_rows)
            for number in range(len(how.replicas))
        ]
        self._workers, self._decisions = streamed, decisions or Decisions()
        drawn = [*one_by_one(again)] if again is not None else []
        most = len(drawn) + 4 * (rule.freshness + 2) * step_groups
        self._table = GroupTable([each.stage for each in streamed], capacity=most)
        for prompt in drawn:
            self._table.add(prompt)
        self._newest, self._waited_s, self._step = 0, 0.0, 0
        self._to_begin: float = inf if rule.freshness else 0
        """Groups that may still begin; limited at k = 0, where a step's groups begin with its version."""
        self._parcels: dict[int, PackedWeights] = {}
        """Publishes of the phase that a replica has not received yet, by number."""
        self._flight: dict[GroupId, GroupInFlight] = {}
        """Groups that have begun and that no step has taken."""
        self._complete: set[GroupId] = set()
        """Those of them that a step may take."""
        self._columns: list[tuple[Pending, Mapping[str, Pending]]] = []
        """Rows of the step that is being opened, with the results of the streamed stages on them."""
        self._dropped: list[tuple[GroupId, str]] = []
        self._close: Callable[[], Sequence[Pending] | None] = tuple

    @property
    def publishes_chunks(self) -> bool:  # type: ignore[override]
        """See Source."""
        return self._parts > 1

    def begin(self, close: Callable[[], Sequence[Pending] | None]) -> None:
        """See Source."""
        self._close = close

    def take(self, step: int, groups: int) -> Batch:
        """Return the prompts of a step's groups, whose rows ``rows`` then returns.

        At k = 0 and in chunks, the groups have only begun; each chunk is formed when its first stage runs.
        """
        self._step = step
        self._waited_s, self._to_begin = 0.0, groups if not self._rule.freshness else inf
        if self._chunks > 1:
            return self._in_chunks_to_come(groups)
        data = self._ready(self._rule.take if self._rule.freshness else lambda: self._rule.more(groups))
        self._wanted -= groups
        return data

    def more(self, groups: int) -> Batch:
        """See Source."""
        self._wanted += groups
        self._to_begin += groups
        data = self._ready(lambda: self._rule.more(groups))
        self._wanted -= groups
        return data

    def streamed(self, stage: str, args: Sequence[Any]) -> Pending | None:
        """See Source."""
        return next((made.get(stage) for rows, made in self._columns if args and args[0] is rows), None)

    def opened(self) -> OpenedStep:
        """See Source; the metrics are of the groups in flight when the step was formed."""
        measured: dict[str, Metric] = {
            "flight/steps/mean": Mean(total=len(self._flight) / self._step_groups, count=1),
            "flight/waited_seconds/mean": Mean(total=self._waited_s, count=1),
            "flight/given_up/sum": Sum(value=len(self._dropped)),
            "flight/lag/max": Max(value=self._newest - min(each.version for each in self._replicas)),
        }
        self._columns.clear()
        self._decisions.step(self._step)
        if not self._rule.freshness:
            self._rule.batch += 1  # a step takes its groups one chunk or one round after the other
        dropped, self._dropped = self._dropped, []
        return OpenedStep(measured=measured, given_up=dropped, parcels=self._published())

    def deliver(self, parcel: PackedWeights) -> None:
        """Have the replicas receive a version, one after the other."""
        self._newest += 1
        self._decisions.note("deliver", self._newest)
        self._parcels[self._newest] = parcel

    def settle(self) -> None:
        """Wait until every replica has the version that was delivered last."""
        self._run(lambda: all(self._is_settled(each) for each in self._replicas), tuple)
        self._beside()

    def rows(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending | None:
        """See Source."""
        made = super().rows(group, endpoint, args, options)
        if made is None:
            self._beside()
        return made

    def _beside(self) -> None:
        """Note that the sampler gets another call now, between those that run rows."""
        if self._decisions.head is not None:
            self._run(lambda: self._decisions.head == ["beside"], tuple)
        self._decisions.note("beside")

    def position(self) -> Mapping[str, Any]:
        """See Source; it includes the groups that were drawn and that no step has trained."""
        return {**super().position(), LEFT: [list(group) for group in self._table.left]}

    def save_sampled(self, stages: Sequence[StageResult], name: str) -> list[Pending]:  # noqa: ARG002
        """See Source; rows in flight are not saved."""
        return []

    @property
    def left(self) -> Batch | None:
        """Prompts that were drawn and that no step has trained; None if there are none."""
        prompts = [*self._table.left.values()]
        return concatenate(prompts) if prompts else None

    def until(self, done: Callable[[], bool]) -> None:
        """Run rows until ``done`` returns True, and close steps meanwhile.

        Raises:
            RolloutError: nothing runs, nothing may begin, and no pending call can change that.
            ClusterError, RillflowError: see ``Pending.read``.
        """
        self._run(done, self._close)

    def _run(self, done: Callable[[], bool], close: Callable[[], Sequence[Pending] | None]) -> None:
        while True:
            self._hear()
            others = self._closed(close)
            if done():
                return
            head = self._decisions.head
            if head is None:
                self._decide()
            else:
                self._repeat()
                if head is not self._decisions.head:
                    continue  # the next decision may need nothing more
            running = [part for each in self._replicas for part in each.events]
            running += [part for each in self._workers for part in each.events]
            events = [each for each in (*running, others) if each]
            if not events:
                raise self._stalled()
            if not any(all(part.is_ready for part in each) for each in events):
                wait_for_any([part for each in events for part in each], self._how.deadline_s)

    def _closed(self, close: Callable[[], Sequence[Pending] | None]) -> Sequence[Pending]:
        """Have steps that are done closed; return the results that the next one waits for."""
        others: Sequence[Pending] | None = None
        while others is None:
            head = self._decisions.head
            if head is not None and head[0] not in ("deliver", "beside"):
                return ()  # the run closed no step before its next decision
            others = close()
        return others

    def _ready(self, form: Callable[[], list[GroupInFlight]]) -> Batch:
        """Return the prompts of the groups that ``form`` returns, once it returns some."""
        taken = self._formed_by(form)
        size = -(-len(taken) // self._parts)
        parts = [self._by_replica(taken[first : first + size]) for first in range(0, len(taken), size)]
        prompts = concatenate([self._table.prompt(each.id) for part in parts for one in part for each in one])
        lies = [Lie.new(is_whole=True) for _ in parts]
        made = dict[str, Pending]()
        for stage in self._table.stages:
            chunks = [self._gathered(stage, part, lie) for part, lie in zip(parts, lies, strict=True)]
            worked = self._worked(stage)
            is_one = len(chunks) == 1
            made[stage] = (
                joined(stage, chunks, worked=worked) if is_one else ChunkedResult.of(stage, chunks, worked)
            )
        self._trained(taken)
        self._formed = prompts, made[GENERATE]
        self._columns.append((made.pop(GENERATE), made))
        return prompts

    def _in_chunks_to_come(self, groups: int) -> Batch:
        """Begin a step's groups, and return their prompts; each chunk takes the groups that are ready."""
        self._draw(groups)
        prompts = concatenate([*islice(self._table.left.values(), groups)])
        sizes = [size for size in shares(groups, self._chunks) if size]
        worked: dict[str, list[Facts]] = {stage: [] for stage in self._table.stages}
        made = dict[str, ChunkedResult]()

        def form() -> None:
            size = sizes.pop(0)
            taken = self._formed_by(lambda: self._rule.more(size))
            part, lie = self._by_replica(taken), Lie.new(is_whole=True)
            for stage, result in made.items():
                result.chunks.append(self._gathered(stage, part, lie))
                worked[stage] += self._worked(stage)
            self._trained(taken)
            self._wanted -= size

        made |= {stage: ChunksToCome(stage, len(sizes), form, worked[stage]) for stage in worked}
        if self._decisions.head is None:
            self._decide()
        self._formed = prompts, made[GENERATE]
        self._columns.append((made[GENERATE], {stage: made[stage] for stage in self._table.stages[1:]}))
        return prompts

    def _formed_by(self, form: Callable[[], list[GroupInFlight]]) -> list[GroupInFlight]:
        """Run rows until ``form`` returns groups; return them."""
        began, taken = time.monotonic(), list[GroupInFlight]()

        def is_formed() -> bool:
            if self._decisions.head is not None:
                taken.extend(self._recorded())
            else:
                taken.extend(form())
                for group in self._rule.dropped:
                    self._again(group)
                self._rule.dropped.clear()
            return bool(taken)

        self.until(is_formed)
        self._waited_s += time.monotonic() - began
        self._decisions.note("form", [list(each.id) for each in taken])
        return taken

    def _recorded(self) -> list[GroupInFlight]:
        """Return the groups that the run took next, once they are ready."""
        head = self._decisions.head or [""]
        groups = [(epoch, prompt) for epoch, prompt in head[1]] if head[0] == "form" else []
        return [self._flight[each] for each in groups] if self._complete.issuperset(groups) else []

    def _trained(self, taken: Sequence[GroupInFlight]) -> None:
        """Forget groups that a step has taken."""
        for group in taken:
            self._table.done(TRAIN, group.id)
            del self._flight[group.id]
            self._complete.discard(group.id)

    def _by_replica(self, groups: Sequence[GroupInFlight]) -> list[list[GroupInFlight]]:
        """Return groups in the order of the replicas that sampled them, so that their rows need not move."""
        here = ([each for each in groups if each.replica is replica] for replica in self._replicas)
        return [each for each in here if each]

    def _gathered(self, stage: str, part: Sequence[Sequence[GroupInFlight]], lie: Lie) -> Pending:
        """Return a stage's result for groups of a step, which ``_by_replica`` has ordered."""
        places = self._executor.groups[SAMPLER].places
        held = [
            GroupPart(
                place=places[groups[0].replica.ranks[0]],
                rows={each.id: self._table.result(stage, each.id) for each in groups},
            )
            for groups in part
        ]
        return self._executor.gathered(stage, held, lie)

    def _worked(self, stage: str) -> list[Facts]:
        """Return the times when ranks worked for a stage since the last call."""
        workers: Sequence[SamplerReplica | StageWorker] = self._replicas
        if stage != GENERATE:
            workers = [each for each in self._workers if each.stage == stage]
        found = [each for worker in workers for each in worker.worked]
        for worker in workers:
            worker.worked = []
        return found

    def _hear(self) -> None:
        """Process the finished calls of the replicas and of the streamed stages."""
        for replica in self._replicas:
            for call, advanced in replica.hear():
                begun = [self._flight[each] for each in advanced.complete if each in self._flight]
                sampled = [each.id for each in begun if each.replica is replica and each.call <= call]
                for group, rows in (replica.collect(sampled) if sampled else {}).items():
                    self._table.done(GENERATE, group, rows)
        for worker in self._workers:
            for group, made in worker.hear(self._how.deadline_s).items():
                self._table.done(worker.stage, group, made)
        for group in self._table.take(TRAIN, len(self._flight), "the next step"):
            self._complete.add(group)
            if self._decisions.head is None:
                self._rule.complete(self._flight[group])

    def _decide(self) -> None:
        """Submit all calls that the replicas and the streamed stages may run now."""
        for group in self._rule.overdue(
            [each for each in self._flight.values() if each.id not in self._complete]
        ):
            self._rule.give_up(group)
            self._again(group)
        behind = [each for each in self._replicas if each.version < self._newest]
        if behind and not any(each.arriving for each in self._replicas):
            self._receive(behind[0], self._newest)
        while self._may_begin():
            pass
        for replica in self._replicas:
            while replica.may_call:
                self._call(replica)
        for number, worker in enumerate(self._workers):
            groups = self._table.take(worker.stage, worker.room, worker.name)
            if groups:
                self._compute(number, groups)
            worker.ask()

    def _may_begin(self) -> bool:
        """Begin a group on the replica with the most room; return whether one could begin."""
        least = self._rule.least_version(self._newest)
        able = [each for each in self._replicas if each.version >= least and each.has_room]
        if not able or not self._to_begin or self._counted >= self._wanted:
            return False
        replica = min(able, key=lambda each: each.rows)
        if not self._table.has_ready(GENERATE):
            if self._table.room < self._step_groups:
                return False
            self._add(self._step_groups)
        self._rule.begin(self._begin(replica))
        return True

    @property
    def _counted(self) -> int:
        """Number of begun groups that the phase's last steps count on.

        If late groups are dropped, no step waits for a group that is being scored.
        """
        if not self._rule.drops:
            return len(self._flight)
        begun = self._flight.values()
        return len(self._complete) + sum(each.replica.name in self._table.holders(each.id) for each in begun)

    def _repeat(self) -> None:
        """Repeat the decisions of a run as far as their results are there."""
        while head := self._decisions.head:
            name, *given = head
            if name == "draw":
                self._add(given[0])
            elif name == "begin":
                self._begin(self._replicas[given[0]])
            elif name == "again":
                self._again(self._flight[given[0][0], given[0][1]])
            elif name == "call":
                self._replicas[given[0]].passes = given[1]
                self._call(self._replicas[given[0]])
            elif name == "receive" and given[1] in self._parcels and not self._replicas[given[0]].arriving:
                self._receive(self._replicas[given[0]], given[1])
            elif name == "run" and self._may_compute(*given):
                worker, groups = self._workers[given[0]], [(epoch, prompt) for epoch, prompt in given[1]]
                self._compute(given[0], self._table.take(worker.stage, len(groups), worker.name, groups))
            else:
                break
        for worker in self._workers:
            worker.ask()

    def _may_compute(self, number: int, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether a worker can take groups now."""
        worker = self._workers[number]
        ready = self._table.ready(worker.stage)
        return worker.room > 0 and all((epoch, prompt) in ready for epoch, prompt in groups)

    # Decisions, each of which is noted

    def _begin(self, replica: SamplerReplica) -> GroupInFlight:
        """Begin the oldest group that waits."""
        (group,) = self._table.take(GENERATE, 1, replica.name)
        self._to_begin -= 1
        begun = GroupInFlight(id=group, version=replica.version, replica=replica, call=replica.next_call)
        self._flight[group] = begun
        replica.begin(self._table.prompt(group))
        self._decisions.note("begin", replica.number, group)
        return begun

    def _call(self, replica: SamplerReplica) -> None:
        self._decisions.note("call", replica.number, replica.passes)
        replica.call()

    def _receive(self, replica: SamplerReplica, version: int) -> None:
        self._decisions.note("receive", replica.number, version)
        replica.receive(self._parcels[version], version)
        oldest = min(each.version for each in self._replicas)
        least = self._newest if self._decisions.head is None else oldest + 1  # a replay needs each of them
        self._parcels = {number: each for number, each in self._parcels.items() if number >= least}

    def _compute(self, number: int, groups: Sequence[GroupId]) -> None:
        rows = {each: self._table.result(GENERATE, each) for each in groups}
        self._decisions.note("run", number, [list(each) for each in groups])
        self._workers[number].begin(rows)

    def _draw(self, groups: int) -> None:
        """Have at least so many groups in the table."""
        if len(self._table.left) < groups:
            self._add(groups - len(self._table.left))

    def _add(self, groups: int) -> None:
        self._decisions.note("draw", groups)
        for prompt in one_by_one(self._stream.take(groups)):
            self._table.add(prompt)

    def _again(self, group: GroupInFlight) -> None:
        """Drop the rows of a group, and sample its prompt again."""
        holders = self._table.holders(group.id)
        if group.replica.name in holders:
            group.replica.given_up.append(group.id)
        for worker in self._workers:
            if worker.name in holders:
                worker.give_up(group.id)
        behind = self._rule.version - group.version
        reason = f"sampled {behind} versions before the weights that would train it"
        self._decisions.note("again", group.id)
        del self._flight[group.id]
        self._complete.discard(group.id)
        self._table.add(self._table.drop(group.id, reason))
        self._dropped.append((group.id, reason))
        self._to_begin += 1

    def _is_settled(self, replica: SamplerReplica) -> bool:
        return replica.version == self._newest and not replica.arriving

    def _stalled(self) -> RolloutError:
        least = self._rule.least_version(self._newest)
        return RolloutError(
            f"no row is running, and none may start before version {least} of the phase is published",
            why=f"the newest version is {self._newest}, and no open step could publish another; rows that "
            "start now would become older than algorithm.freshness allows",
            fix="call flow.publish(flow.policy) in every step, or sample in order",
        )
