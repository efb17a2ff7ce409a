"""Ready first: sample groups without a pause, and form each step from the groups that are ready.

stream ─> prompts ─ begin ─> replicas: advance, advance, ... ─ complete ─> rule ─ take ─> the step's data
             ^                   ^ between two of them: receive, serve      │
             └───── again ───────┼────────────── given up ──────────────────┘
                                 └─ new weights, one replica after the other

A replica runs its rows in short calls, two of which are in flight. New groups and new weights are submitted
between these calls. The controller therefore knows the version that a replica samples with, and begins a
group only if the admission rule (controller.admission) allows it. Rows that run when new weights arrive
continue with the new weights.

loop          ``until``, in the thread of the training loop, whenever that has to wait
consumes      results of replica calls; parcels of finished steps; prompts of the stream
waits for     the first result of a replica, or of the oldest open step
unblocked by  those ranks; each wait ends at the deadline
produces      calls to replicas; complete groups for the rule
shutdown      healthy: the phase's last step trains the last groups. Checkpoint, stop or error: prompts of
              groups that no complete step has trained are sampled again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rillflow.controller.admission import StalenessBound
from rillflow.controller.checkpoint import PROMPTS
from rillflow.controller.executor import GroupExecutor, write_rows
from rillflow.controller.flow import StageResult
from rillflow.controller.source import ChunkedResult, DataStream, GroupSampling, OpenedStep, Source
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.errors import RolloutError
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Max, Mean, Metric, Sum
from rillflow.roles.sampler import Advanced, GroupId, Sampler
from rillflow.workers.config import SAMPLER
from rillflow.workers.pending import Pending, joined, wait_for_any
from rillflow.workers.values import Facts

ADVANCE_S = 0.1
"""Seconds that a call runs rows; new weights and collected rows wait for about two calls."""
ASKED = 2
"""Calls of a replica in flight, so that the replica never idles between calls."""
MOST_PASSES = 256
"""Largest number of tokens that a call adds to a row."""
PAUSE_S = 0.02
"""Two calls with a shorter pause, in seconds, count as one span."""


@dataclass(kw_only=True, eq=False)
class SamplerReplica:
    """Ranks that hold one copy of the sampled weights."""

    ranks: Sequence[int]
    """Ranks of the sampler."""
    version: int = 0
    """Number of publishes of the phase that the replica has after its submitted calls."""
    rows: int = 0
    """Rows that have begun on the replica and are not reported as ended."""
    passes: int = 8
    """Tokens that a call adds to each row in about ``ADVANCE_S``."""
    turnover: int = 0
    """Rows that ended in the last finished call."""
    heard: int = 0
    """Number of finished calls."""
    asked: deque[Pending] = field(default_factory=deque)
    """Calls in flight."""
    arriving: Sequence[Pending] = ()
    """Weight transfers in flight."""
    begun: list[GroupInFlight] = field(default_factory=list)
    """Groups that begin with the next call."""
    given_up: list[GroupId] = field(default_factory=list)
    """Groups that the next call drops."""
    worked: list[Facts] = field(default_factory=list)
    """Times when the replica ran rows since the last step was formed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupInFlight:
    """A prompt whose rows have begun."""

    id: GroupId
    """Epoch and prompt id."""
    prompt: Batch
    """The prompt, a batch of one row."""
    version: int
    """Publishes of the phase before the group's first token."""
    replica: SamplerReplica
    """Replica that runs the group."""
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
        most_rows: largest number of rows of a replica at once.
        again: drawn prompts that no step had trained when the run was interrupted; they are sampled first.
    """

    is_salvageable = False

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
        most_rows: int,
        again: Batch | None,
    ) -> None:
        super().__init__(executor, stream, sync=sync, is_ahead=True)
        self._weights, self._rule, self._how, self._wanted = sync, rule, how, how.groups
        self._step_groups, self._parts, self._most_rows = step_groups, parts, most_rows
        self._replicas = [SamplerReplica(ranks=ranks) for ranks in how.replicas]
        self._prompts = deque(one_by_one(again) if again is not None else ())
        self._newest, self._waited_s = 0, 0.0
        self._parcel: PackedWeights | None = None
        self._running: dict[GroupId, GroupInFlight] = {}
        self._complete: dict[GroupId, GroupInFlight] = {}
        self._taken: list[GroupInFlight] = []
        self._dropped: list[tuple[GroupId, str]] = []
        self._close: Callable[[], Sequence[Pending]] = tuple

    @property
    def publishes_chunks(self) -> bool:  # type: ignore[override]
        """See Source."""
        return self._parts > 1

    def begin(self, close: Callable[[], Sequence[Pending]]) -> None:
        """See Source."""
        self._close = close

    def take(self, step: int, groups: int) -> Batch:  # noqa: ARG002
        """Return the prompts of ready groups, whose rows ``rows`` then returns."""
        data = self._ready(self._rule.take)
        self._wanted -= groups
        return data

    def more(self, groups: int) -> Batch:
        """See Source."""
        self._wanted += groups
        data = self._ready(lambda: self._rule.more(groups))
        self._wanted -= groups
        return data

    def opened(self) -> OpenedStep:
        """See Source; the metrics are of the rows in flight when the step was formed."""
        steps = (len(self._running) + len(self._complete)) / self._step_groups
        measured: dict[str, Metric] = {
            "flight/steps/mean": Mean(total=steps, count=1),
            "flight/waited_seconds/mean": Mean(total=self._waited_s, count=1),
            "flight/given_up/sum": Sum(value=len(self._dropped)),
            "flight/lag/max": Max(value=self._newest - min(each.version for each in self._replicas)),
        }
        self._taken.clear()
        dropped, self._dropped = self._dropped, []
        return OpenedStep(measured=measured, given_up=dropped, parcels=self._published())

    def deliver(self, parcel: PackedWeights) -> None:
        """Have the replicas receive a version, one after the other."""
        self._newest, self._parcel = self._newest + 1, parcel

    def settle(self) -> None:
        """Wait until every replica has the version that was delivered last."""
        self._run(lambda: all(self._is_settled(each) for each in self._replicas), tuple)

    def begin_saving(self, folder: Path) -> Mapping[str, Any]:
        """See Source; the folder gets the prompts that were drawn and not trained, to be sampled again."""
        place, left = super().begin_saving(folder), self.outstanding()
        if left is not None:
            write_rows(str(folder / PROMPTS), left)
        return place

    def save_sampled(self, stages: Sequence[StageResult], name: str) -> list[Pending]:  # noqa: ARG002
        """See Source; rows in flight are not saved."""
        return []

    def outstanding(self) -> Batch | None:
        """Return the prompts that were drawn and that no step has trained; None if there are none."""
        begun = [*self._taken, *self._complete.values(), *self._running.values()]
        left = [*(each.prompt for each in begun), *self._prompts]
        return concatenate(left) if left else None

    def until(self, done: Callable[[], bool]) -> None:
        """Run rows until ``done`` returns True, and close steps meanwhile.

        Raises:
            RolloutError: nothing runs, nothing may begin, and no pending call can change that.
            ClusterError, RillflowError: see ``Pending.read``.
        """
        self._run(done, self._close)

    def _run(self, done: Callable[[], bool], close: Callable[[], Sequence[Pending]]) -> None:
        while True:
            self._hear()
            others = close()
            if done():
                return
            self._ask()
            asked = [list(each.asked)[:1] for each in self._replicas]
            events = [each for each in (*asked, *(one.arriving for one in self._replicas), others) if each]
            if not events:
                raise self._stalled()
            if not any(all(part.is_ready for part in each) for each in events):
                wait_for_any([part for each in events for part in each], self._how.deadline_s)

    def _ready(self, form: Callable[[], list[GroupInFlight]]) -> Batch:
        """Return the prompts of the groups that ``form`` returns, once it returns some."""
        clock, taken = self._executor.backend.now, list[GroupInFlight]()
        began = clock()

        def is_formed() -> bool:
            taken.extend(form())
            for group in self._rule.dropped:
                self._again(group)
            self._rule.dropped.clear()
            return bool(taken)

        self.until(is_formed)
        self._waited_s = clock() - began
        for each in taken:
            del self._complete[each.id]
        self._taken += taken
        size = -(-len(taken) // self._parts)
        data = [self._collected(taken[first : first + size]) for first in range(0, len(taken), size)]
        prompts = concatenate([each for part, _ in data for each in part])
        worked = [each for replica in self._replicas for each in replica.worked]
        for replica in self._replicas:
            replica.worked = []
        chunks = [rows for _, rows in data]
        if len(chunks) > 1:
            self._formed = prompts, ChunkedResult.of("policy.generate", chunks, worked)
        else:
            self._formed = prompts, joined("policy.generate", chunks, worked=worked)
        return prompts

    def _collected(self, groups: Sequence[GroupInFlight]) -> tuple[list[Batch], Pending]:
        """Return the prompts of complete groups, replica by replica, and their rows."""
        prompts, parts = [], []
        for replica in self._replicas:
            here = [each for each in groups if each.replica is replica]
            prompts += [each.prompt for each in here]
            if here:
                ids = [each.id for each in here]
                parts.append(self._executor.on_ranks(SAMPLER, replica.ranks, Sampler.collect, ids))
        return prompts, joined("policy.generate", parts)

    def _hear(self) -> None:
        """Process the finished calls of the replicas."""
        for replica in self._replicas:
            while replica.asked and replica.asked[0].is_ready:
                call = replica.asked.popleft()
                made: Advanced = call.read(self._how.deadline_s)
                replica.rows, replica.turnover = replica.rows - made.ended, made.ended
                facts = call.facts(self._how.deadline_s)
                if made.passes:
                    passes = round(ADVANCE_S * made.passes / max(facts[0].ended - facts[0].began, 1e-6))
                    replica.passes = max(1, min(MOST_PASSES, passes))
                for each in made.complete:
                    group = self._running.get(each)
                    if group and group.replica is replica and group.call <= replica.heard:
                        self._complete[each] = self._running.pop(each)
                        self._rule.complete(group)
                replica.heard += 1
                add_work(replica.worked, [*facts, *call.beside])
            if replica.arriving and all(each.is_ready for each in replica.arriving):
                self._weights.arrived(replica.arriving)
                replica.arriving = ()

    def _ask(self) -> None:
        """Submit all calls that the replicas may run now."""
        for group in self._rule.overdue(self._running.values()):
            self._rule.give_up(group)
            self._again(group)
        if not any(each.arriving for each in self._replicas):
            behind = [each for each in self._replicas if each.version < self._newest]
            if behind and self._parcel is not None:
                behind[0].arriving = self._weights.install(self._parcel, behind[0].ranks)
                behind[0].version = self._newest
        while self._begin():
            pass
        for replica in self._replicas:
            while len(replica.asked) < ASKED and (replica.rows or replica.given_up):
                prompts = concatenate([each.prompt for each in replica.begun]) if replica.begun else None
                how = (prompts, replica.given_up, replica.passes, self._how.samples, self._how.sampling)
                replica.asked.append(self._executor.on_ranks(SAMPLER, replica.ranks, Sampler.advance, *how))
                replica.begun, replica.given_up = [], []

    def _begin(self) -> bool:
        """Begin a group on the replica with the most room; return whether one could begin."""
        if len(self._running) + len(self._complete) >= self._wanted:
            return False
        least = self._rule.least_version(self._newest)
        able = [
            each
            for each in self._replicas
            if each.version >= least and len(each.asked) < ASKED and self._has_room(each)
        ]
        if not able:
            return False
        if not self._prompts:
            self._prompts.extend(one_by_one(self._stream.take(self._step_groups)))
        prompt, replica = self._prompts.popleft(), min(able, key=lambda each: each.rows)
        group = GroupInFlight(
            id=prompt.row_ids()[0].group,
            prompt=prompt,
            version=replica.version,
            replica=replica,
            call=replica.heard + len(replica.asked),
        )
        self._running[group.id] = group
        self._rule.begin(group)
        replica.begun.append(group)
        replica.rows += self._how.samples
        return True

    def _has_room(self, replica: SamplerReplica) -> bool:
        """Return whether new rows would run soon, counting running rows that are expected to end first."""
        room = self._most_rows + min(ASKED * replica.turnover, self._most_rows)
        return not replica.rows or replica.rows + self._how.samples <= room

    def _again(self, group: GroupInFlight) -> None:
        """Drop the rows of a group, and sample its prompt again."""
        group.replica.given_up.append(group.id)
        self._running.pop(group.id, None)
        self._complete.pop(group.id, None)
        self._prompts.appendleft(group.prompt)
        behind = self._rule.version - group.version
        self._dropped.append((group.id, f"sampled {behind} versions before the weights that would train it"))

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


def one_by_one(prompts: Batch) -> Iterable[Batch]:
    """Return every prompt as a batch of its own."""
    return (prompts.slice(place, place + 1) for place in range(len(prompts)))


def add_work(worked: list[Facts], more: Sequence[Facts]) -> None:
    """Merge the times of a call into those of earlier calls."""
    for each in more:
        for place, before in enumerate(worked):
            if before.place == each.place and 0 <= each.began - before.ended < PAUSE_S:
                worked[place] = replace(before, ended=each.ended)
                break
        else:
            worked.append(replace(each, rows=0))
