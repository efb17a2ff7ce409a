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

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from rillflow.controller.admission import StalenessBound
from rillflow.controller.decisions import CLOSING, Decisions, Event
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flight import GroupInFlight
from rillflow.controller.flow import StageResult
from rillflow.controller.group_table import GENERATE
from rillflow.controller.repeated_flight import RepeatedFlight
from rillflow.controller.saved_flight import FLIGHT, FlightSave, KeptFlight
from rillflow.controller.source import (
    ChunkedResult,
    DataStream,
    GroupSampling,
    OpenedStep,
    Source,
    one_by_one,
)
from rillflow.controller.streamed_stages import StageWorker
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.errors import RillflowError, RolloutError, RunDirectoryError
from rillflow.graph.handle import Options
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Max, Mean, Metric, Sum
from rillflow.workers.arguments import Facts, shares
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending, joined, wait_for, wait_for_any

LOOK_S = 0.05
"""Seconds between two looks at a replica that is being replaced."""
LEFT = "left"
"""Key in the position in the data for groups that were drawn and that no step has trained."""


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
        kept: groups in flight of the checkpoint to resume from; None to begin with none.
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
        kept: KeptFlight | None = None,
    ) -> None:
        super().__init__(executor, stream, sync=sync, chunks=chunks)
        self._rule, self._how, self._wanted = rule, how, how.groups
        self._step_groups, self._parts, self._decisions = step_groups, parts, decisions or Decisions()
        self._flight = RepeatedFlight(
            executor,
            stream,
            sync=sync,
            how=how,
            most_rows=most_rows,
            capacity=4 * (rule.freshness + 2) * step_groups,
            workers=streamed,
            decisions=self._decisions,
            again=[*one_by_one(again)] if again is not None else [],
        )
        if kept is not None:
            self._flight.restore(kept)
        self._waited_s, self._step, self._is_forming = 0.0, 0, False
        self._beside_step: int | None = 0
        """Step of the sampler's other calls; None if the repeated run made none."""
        self._is_deciding = kept is None and self._decisions.head is None
        """Whether the run decides by itself: there are no decisions to repeat, or no more."""
        self._formed_steps: int = kept.state["formed"] if kept is not None else 0
        self._state: Mapping[str, Any] = kept.state if kept is not None else {}
        """State of the groups in flight when the newest step was opened."""
        self._owed = inf
        """Groups that the open step has not taken, at k = 0: no other group may begin with its version."""
        self._close: Callable[[], Sequence[Pending] | None] = tuple

    @property
    def publishes_chunks(self) -> bool:  # type: ignore[override]
        """See Source."""
        return self._parts > 1

    def begin(self, close: Callable[[], Sequence[Pending] | None], after: int) -> None:
        """See Source."""
        self._close, self._flight.after = close, after

    def take(self, step: int, groups: int) -> Batch:
        """Return the prompts of a step's groups, whose rows ``rows`` then returns.

        At k = 0 and in chunks, the groups have only begun; each chunk is formed when its first stage runs.
        """
        self._step, self._waited_s = step, 0.0
        self._owed = inf if self._rule.freshness else groups
        if self._chunks > 1:
            return self._in_chunks_to_come(groups)
        data = self._ready(self._rule.take if self._rule.freshness else lambda: self._rule.more(groups))
        self._wanted -= groups
        self._formed_steps += bool(self._rule.freshness)
        return data

    def more(self, groups: int) -> Batch:
        """See Source."""
        self._wanted += groups
        self._owed += groups
        data = self._ready(lambda: self._rule.more(groups))
        self._wanted -= groups
        return data

    def opened(self) -> OpenedStep:
        """See Source; the metrics are of the groups in flight when the step was formed."""
        flight = self._flight
        measured: dict[str, Metric] = {
            "flight/steps/mean": Mean(total=len(flight.groups) / self._step_groups, count=1),
            "flight/waited_seconds/mean": Mean(total=self._waited_s, count=1),
            "flight/given_up/sum": Sum(value=len(flight.dropped)),
            "flight/lag/max": Max(value=flight.lag),
        }
        self._columns.clear()
        if not self._wanted:
            flight.dropped += [(group, "the phase ended before it was ready") for group in flight.table.left]
        if not self._rule.freshness:
            self._rule.batch += 1  # a step takes its groups one chunk or one round after the other
            self._formed_steps += 1
        dropped, flight.dropped = flight.dropped, []
        parcels = self._published()
        flight.published += len(parcels)
        return OpenedStep(measured=measured, given_up=dropped, parcels=parcels)

    def deliver(self, parcel: PackedWeights) -> None:
        """Have the replicas receive a version, one after the other."""
        self._flight.deliver(parcel)

    def settle(self, step: int) -> None:
        """See Source; later calls of the sampler belong to the evaluation."""
        is_repeated = self._head is not None and not self._decisions.may_leave
        if is_repeated and not self._decisions.has(["beside", step]):
            self._beside_step = None  # the run evaluated before it was resumed without its decisions
            self._run(
                lambda: self._flight.is_settled or self._head is None or self._head[0] in CLOSING, tuple
            )
            return
        self._run(lambda: self._flight.is_settled, tuple)
        self._beside_step = step
        self._beside()

    def rows(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending | None:
        """See Source."""
        made = super().rows(group, endpoint, args, options)
        if made is None:
            self._beside()
        return made

    def _beside(self) -> None:
        """Note that the sampler gets another call now, between those that run rows."""

        def is_turn() -> bool:
            head = self._head
            is_free = head is None and not self._flight.is_replacing
            return is_free or head == ["beside", self._beside_step]

        if self._beside_step is None:
            return
        self._run(is_turn, tuple)
        self._decisions.note("beside", self._beside_step)
        self._decisions.flush()

    def position(self) -> Mapping[str, Any]:
        """See Source; it includes the groups that were drawn and that no step has trained."""
        self._state = {
            **self._flight.state(self._step),
            "formed": self._formed_steps,
            "is_last": not self._wanted,
        }
        left = [list(group) for group in self._flight.table.left]
        return {**super().position(), LEFT: left, FLIGHT: self._state}

    def begin_saving(self, folder: Path) -> FlightSave | None:
        """See Source."""
        return self._flight.begin_saving(self._state, folder) if self._wanted and self._how.may_save else None

    def finish_saving(self, save: FlightSave, *, must: bool) -> bool:
        """See Source."""
        coming = self._decisions.coming()
        left = [each for each in range(len(self._flight.replicas)) if each not in save.saved]
        if self._head is not None and any(["save", each, save.step] not in coming for each in left):
            if not must:
                wait_for([part for _, made in save.saved.values() for part in made], self._how.deadline_s)
                self._flight.saves = [each for each in self._flight.saves if each is not save]
                return False
            while not save.is_written and (calls := self._flight.running_calls):
                wait_for_any(calls, self._how.deadline_s)
                self._hear()
            if save.state is None:
                save.write()
            self._flight.saves = [each for each in self._flight.saves if each is not save]
            wait_for(save.events[0], self._how.deadline_s)
        else:
            self._run(lambda: save.is_written, tuple)
        return True

    def save_sampled(self, stages: Sequence[StageResult], name: str) -> list[Pending]:  # noqa: ARG002
        """See Source; ``begin_saving`` saves the rows."""
        return []

    def until(self, done: Callable[[], bool]) -> None:
        """Run rows until ``done`` returns True, and close steps meanwhile.

        Raises:
            RolloutError: nothing runs, nothing may begin, and no pending call can change that.
            ClusterError, RillflowError: see ``Pending.read``.
        """
        self._run(done, self._close)

    @property
    def _head(self) -> Event | None:
        """The next decision to repeat; None if the run decides by itself, from now on or before."""
        head = self._decisions.head
        if head is None and not self._is_deciding:
            self._is_deciding = True
            self._take_over()
        return head

    def _take_over(self) -> None:
        """Decide by itself after the last decision of an interrupted run, or without its later ones."""
        flight, reason = self._flight, self._decisions.left
        if reason and (self._decisions.has_lost_steps or flight.groups):
            self._how.say(
                f"note: the run does not repeat all decisions of the interrupted one ({reason}), so its bits "
                "differ from here on; rows in flight are sampled again"
            )
        flight.leave("its rows were lost when the run resumed")
        self._rule.restart(self._formed_steps, flight.groups.values(), flight.complete.values())

    def _run(self, done: Callable[[], bool], close: Callable[[], Sequence[Pending] | None]) -> None:
        while True:
            self._hear()
            if self._head is not None and done():
                break  # a replay closes no step before the run did
            others = self._closed(close)
            if done():
                break
            if others is None:
                continue
            head = self._head
            if head is None:
                self._decide()
            else:
                self._flight.repeat()
                if head is not self._decisions.head:
                    continue  # the next decision may need nothing more
            self._decisions.flush()
            self._wait([*self._flight.events, *([others] if others else [])])
        self._decisions.flush()

    def _wait(self, events: Sequence[Sequence[Pending]]) -> None:
        """Wait until all results of one sequence are there, or a replacement may have gone on.

        Raises:
            RolloutError: there is nothing to wait for.
        """
        is_replacing = self._flight.is_replacing
        if any(all(part.is_ready for part in each) for each in events):
            return
        parts = [part for each in events for part in each]
        if parts and not is_replacing:
            wait_for_any(parts, self._how.deadline_s)
        elif is_replacing:
            self._executor.backend.sleep(LOOK_S)
        elif self._head is not None and self._decisions.may_leave:
            self._decisions.leave(f"nothing leads to {self._head}")
        else:
            raise self._stalled()

    def _hear(self) -> None:
        """Process finished calls, and tell the rule."""
        complete = self._flight.hear()
        lost, self._flight.lost = self._flight.lost, []
        if self._is_deciding:
            for group in lost:
                self._rule.give_up(group)
            for group in complete:
                self._rule.complete(group)

    def _closed(self, close: Callable[[], Sequence[Pending] | None]) -> Sequence[Pending] | None:
        """Have steps that are done closed; return the results that the next one waits for.

        A replay closes one at a time, and none before the run did; None if it closed one.
        """
        head = self._head
        if head is None:
            while (others := close()) is None:
                pass
            return others
        if self._flight.is_past(head):
            return ()
        names = ("deliver", "beside") if self._is_forming else ("deliver", "beside", "form")
        return close() if head[0] in names else ()

    def _ready(self, form: Callable[[], list[GroupInFlight]]) -> Batch:
        """Return the prompts of the groups that ``form`` returns, once it returns some."""
        flight, taken = self._flight, self._formed_by(form)
        size = -(-len(taken) // self._parts)
        prompts = concatenate([flight.table.prompt(each.id) for each in taken])
        chunks = [flight.gathered(taken[first : first + size]) for first in range(0, len(taken), size)]
        made = dict[str, Pending]()
        for stage in flight.table.stages:
            results, worked = [each[stage] for each in chunks], flight.worked(stage)
            if len(results) > 1:
                made[stage] = ChunkedResult.of(stage, results, worked)
            else:
                made[stage] = joined(stage, results, worked=worked)
        flight.taken(taken)
        return self._made(prompts, made)

    def _in_chunks_to_come(self, groups: int) -> Batch:
        """Begin a step's groups, and return their prompts; each chunk takes the groups that are ready."""
        flight = self._flight
        if len(flight.table.left) < groups:
            flight.draw(groups - len(flight.table.left))
        prompts = concatenate([*islice(flight.table.left.values(), groups)])
        sizes = [size for size in shares(groups, self._chunks) if size]
        worked: dict[str, list[Facts]] = {stage: [] for stage in flight.table.stages}
        made = dict[str, Pending]()

        def form() -> None:
            size = sizes.pop(0)
            taken = self._formed_by(lambda: self._rule.more(size))
            chunk = flight.gathered(taken)
            for stage, result in to_come.items():
                result.chunks.append(chunk[stage])
                worked[stage] += flight.worked(stage)
            flight.taken(taken)
            self._wanted -= size

        to_come = {stage: ChunkedResult(stage, len(sizes), form, worked=worked[stage]) for stage in worked}
        if self._head is None:
            self._decide()
        self._decisions.flush()
        return self._made(prompts, made | to_come)

    def _formed_by(self, form: Callable[[], list[GroupInFlight]]) -> list[GroupInFlight]:
        """Run rows until ``form`` returns groups; return them."""
        clock, taken = self._executor.backend.now, list[GroupInFlight]()
        began = clock()

        def is_formed() -> bool:
            if self._head is not None:
                taken.extend(self._recorded())
            else:
                taken.extend(form())
                self._drop_late(self._rule.dropped)
                self._rule.dropped.clear()
            return bool(taken)

        self._is_forming = True
        self.until(is_formed)
        self._is_forming = False
        self._waited_s += clock() - began
        self._owed -= len(taken)
        self._decisions.note("form", [list(each.id) for each in taken])
        self._decisions.flush()
        self._beside_step = self._step
        return taken

    def _recorded(self) -> list[GroupInFlight]:
        """Return the groups that the run took next, once they are ready."""
        head, complete = self._decisions.head or [""], self._flight.complete
        groups = [(epoch, prompt) for epoch, prompt in head[1]] if head[0] == "form" else []
        return [complete[each] for each in groups] if all(each in complete for each in groups) else []

    def _drop_late(self, groups: Sequence[GroupInFlight]) -> None:
        for group in groups:
            behind = self._rule.version - group.version
            self._flight.again(group, f"sampled {behind} versions before the weights that would train it")

    def _decide(self) -> None:
        """Submit all calls that the replicas and the streamed stages may run now."""
        late = self._rule.overdue(self._flight.unfinished)
        for group in late:
            self._rule.give_up(group)
        self._drop_late(late)
        self._flight.receive()
        self._flight.save()
        while self._begin():
            pass
        for replica in self._flight.replicas:
            while replica.may_call:
                self._flight.call(replica)
        self._flight.compute()

    def _begin(self) -> bool:
        """Begin a group on the replica with the most room; return whether one could begin."""
        flight, least = self._flight, self._rule.least_version(self._flight.newest)
        able = [each for each in flight.replicas if each.version >= least and each.has_room]
        if not able or len(flight.groups) >= self._owed or self._counted >= self._wanted:
            return False
        if not flight.table.ready(GENERATE):
            if flight.table.room < self._step_groups:
                return False
            flight.draw(self._step_groups)
        self._rule.begin(flight.begin(min(able, key=lambda each: each.rows)))
        return True

    @property
    def _counted(self) -> int:
        """Number of begun groups that the phase's last steps count on.

        If late groups are dropped, no step waits for a group that is being scored.
        """
        flight = self._flight
        return len(flight.complete) + flight.sampling if self._rule.drops else len(flight.groups)

    def _stalled(self) -> RillflowError:
        if self._head is not None:
            return RunDirectoryError(
                f"the replay waits for the decision {self._head}, and no call leads there",
                why="a replay repeats the decisions of decisions.jsonl in order",
                fix="replay with the version of Rillflow and the settings of the run",
            )
        newest = self._flight.newest
        least = self._rule.least_version(newest)
        return RolloutError(
            f"no row is running, and none may start before version {least} of the phase is published",
            why=f"the newest version is {newest}, and no open step could publish another; rows that "
            "start now would become older than schedule.freshness allows",
            fix="call flow.publish(flow.policy) in every step, or sample in order",
        )
