"""SamplerReplica: ranks that hold one copy of the sampled weights, and the calls that run rows on them.

    begin, give_up ─> call ─> advance ─> hear: groups that are complete ─> collect: their rows
    receive ─────────────────────┘ between two calls

A replica runs its rows in calls of about ``ADVANCE_S``. It has ``ASKED`` of them in flight, so that it never
idles between calls. Each call begins the groups, and drops those that were given up, since the call before.

consumes      groups that begin, groups that are given up, packed weights
waits for     nothing: the source waits for ``events``
unblocked by  its ranks
produces      complete groups, and their rows as references
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.source import GroupSampling, add_work, collected_each
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.records.batch import Batch, concatenate
from rillflow.roles.sampler import Advanced, GroupId, Sampler
from rillflow.workers.arguments import Facts
from rillflow.workers.backend import Place, RankDied
from rillflow.workers.config import SAMPLER
from rillflow.workers.pending import Pending
from rillflow.workers.restarts import Recovery

ADVANCE_S = 0.1
"""Seconds that a call runs rows; new weights and sampled rows wait for about two calls."""
ASKED = 2
"""Calls of a replica in flight, so that the replica never idles between calls."""
MOST_PASSES = 256
"""Largest number of tokens that a call adds to a row."""


@dataclass(kw_only=True, eq=False)
class SamplerReplica:
    """Ranks that hold one copy of the sampled weights."""

    executor: GroupExecutor
    """Has the ranks of the sampler."""
    sync: WeightSync | None
    """Transfers versions to the sampler; None if it has the policy's module."""
    how: GroupSampling
    """How groups are sampled."""
    number: int
    """Number of the replica."""
    most_rows: int
    """Largest number of rows at once."""
    recovery: Recovery
    """Its ranks, and their replacement."""
    version: int = 0
    """Number of publishes of the phase that the replica has after its submitted calls."""
    received: int = 0
    """The version that it received last, also by a process that has died."""
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
    begun: list[Batch] = field(default_factory=list)
    """Prompts that begin with the next call."""
    given_up: list[GroupId] = field(default_factory=list)
    """Groups that the next call drops."""
    collecting: dict[GroupId, Pending] = field(default_factory=dict)
    """Rows of complete groups, on their way to the store."""
    worked: list[Facts] = field(default_factory=list)
    """Times when the replica ran rows since the last step was formed."""
    is_recalled: bool = False
    """Whether its calls are not made again: a resumed run has the rows that came of them."""
    is_released: bool = False
    """Whether its rows go on elsewhere, so that it runs none until the next step."""
    restored: Mapping[GroupId, int] = field(default_factory=dict)
    """Groups that it has from a checkpoint, each with the number of its running rows."""

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"replica {self.number}"

    @property
    def ranks(self) -> Sequence[int]:
        """Its ranks of the sampler."""
        return self.how.replicas[self.number]

    @property
    def places(self) -> Sequence[Place]:
        """Its ranks."""
        return self.recovery.places

    @property
    def is_live(self) -> bool:
        """Whether it takes calls: it is not being replaced."""
        return self.recovery.is_live

    @property
    def events(self) -> Sequence[Sequence[Pending]]:
        """Lists of pending results; a list is due when all of it is ready."""
        return [[*self.asked][:1], self.arriving, [*self.collecting.values()][:1]]

    @property
    def next_call(self) -> int:
        """Number of the next call."""
        return self.heard + len(self.asked)

    @property
    def has_room(self) -> bool:
        """Whether the rows of a group that begins now would run soon, given the rows that end meanwhile."""
        room = self.most_rows + min(ASKED * self.turnover, self.most_rows)
        fits = not self.rows or self.rows + self.how.samples <= room
        return self.is_live and len(self.asked) < ASKED and fits

    def begin(self, prompt: Batch) -> None:
        """Begin a group with the next call."""
        self.begun.append(prompt)
        self.rows += self.how.samples

    @property
    def may_call(self) -> bool:
        """Whether a further call may be submitted, and would do something."""
        able = self.is_live and not self.is_released and len(self.asked) < ASKED
        return able and bool(self.rows or self.given_up)

    def give_up(self, group: GroupId) -> None:
        """Drop a group with the next call."""
        is_ended = self.collecting.pop(group, None) is not None
        if self.is_live and not is_ended:  # a new process has no rows
            self.given_up.append(group)

    def call(self) -> None:
        """Submit a call."""
        if self.is_recalled:
            self.heard += 1
            self.begun, self.given_up = [], []
            return
        prompts = concatenate(self.begun) if self.begun else None
        how = (prompts, self.given_up, self.passes, self.how.samples, self.how.sampling)
        self.asked.append(self.executor.on_ranks(SAMPLER, self.ranks, Sampler.advance, *how))
        self.begun, self.given_up = [], []

    def release(self, parts: Sequence[Sequence[GroupId]], *, with_caches: bool) -> list[list[Pending]]:
        """Have groups taken out after the submitted calls; for each rank, see ``Sampler.release``."""
        self.is_released = True
        how = (2 * len(parts) + 1, Sampler.release, parts, with_caches)
        return [self.executor.deal(SAMPLER, rank, *how) for rank in self.ranks]

    def take_over(self, rows: Sequence[Sequence[Pending]]) -> list[Pending]:
        """Have each of its ranks continue released rows."""
        how = (Sampler.take_over, self.how.samples, self.how.sampling)
        return [
            self.executor.on_rank(SAMPLER, rank, *how, *own)
            for rank, own in zip(self.ranks, rows, strict=True)
        ]

    def save(self, folder: Path | None) -> list[Pending]:
        """Have its rows written into a checkpoint's folder, if one is given, and go on from their tokens."""
        first, *others = self.ranks
        made = [self.executor.on_rank(SAMPLER, first, Sampler.save, folder, self._file)]
        return [*made, *(self.executor.on_rank(SAMPLER, rank, Sampler.save, None, "") for rank in others)]

    def restore(self, folder: Path) -> None:
        """Have it take over the rows of a checkpoint's folder."""
        how = (folder, self._file, self.how.samples, self.how.sampling)
        self.restored = self.executor.on_ranks(SAMPLER, self.ranks, Sampler.restore, *how).read(
            self.how.deadline_s
        )

    @property
    def _file(self) -> str:
        return f"replica-{self.number:03d}"

    def go_on(self, *, keeps_rows: bool) -> None:
        """Make its calls again from here on, with the rows of the checkpoint or without."""
        self.is_recalled = False
        self.rows = len(self.begun) * self.how.samples
        if keeps_rows:
            self.rows += sum(self.restored.values())
            # The process that had the other groups died before it saved its rows.
            self.given_up = [each for each in self.given_up if each in self.restored]
        else:
            self.begun, self.given_up = [], [*self.restored]

    def hear(self) -> Iterator[tuple[int, Advanced]]:
        """Yield the number and the result of each call that has finished; end transfers that have arrived.

        Raises:
            RankDied: one of its ranks died.
        """
        self.recovery.advance()
        deadline_s = self.how.deadline_s
        while self.asked and self.asked[0].is_ready:
            call = self.asked[0]
            made: Advanced = call.read(deadline_s)
            self.asked.popleft()
            self.rows, self.turnover = self.rows - made.ended, made.ended
            facts = call.facts(deadline_s)
            if made.passes:
                passes = round(ADVANCE_S * made.passes / max(facts[0].ended - facts[0].began, 1e-6))
                self.passes = max(1, min(MOST_PASSES, passes))
            add_work(self.worked, [*facts, *call.beside])
            yield self.heard, made
            self.heard += 1
        if self.sync is not None and self.arriving and all(each.is_ready for each in self.arriving):
            self.sync.arrived(self.arriving)
            self.arriving = ()

    def collect(self, groups: Sequence[GroupId]) -> None:
        """Have the rows of complete groups stored, so that they outlive the replica."""
        if not groups:
            return
        first, *others = self.ranks
        rows = self.executor.deal(SAMPLER, first, len(groups), collected_each, groups)
        if others:  # they ran the same rows
            self.executor.on_ranks(SAMPLER, others, collected_each, groups)
        self.collecting |= dict(zip(groups, rows, strict=True))

    def collected(self) -> Iterator[tuple[GroupId, Pending]]:
        """Yield the groups whose rows are stored now, and their rows.

        Raises:
            RankDied: the replica died before.
        """
        for group, rows in [*self.collecting.items()]:
            if not rows.is_ready:
                return
            rows.wait(self.how.deadline_s)
            del self.collecting[group]
            self.recovery.succeeded()
            yield group, rows

    def lose(self, died: RankDied) -> None:
        """Forget all rows, and have the replica replaced.

        Raises:
            RankDied: it died too often; the error is the first death in a row.
        """
        self.recovery.lose(died)
        self.heard += len(self.asked)
        self.asked.clear()
        self.rows, self.turnover, self.version, self.arriving = 0, 0, -1, ()
        self.begun, self.given_up, self.restored, self.is_recalled = [], [], {}, False

    def receive(self, parcel: PackedWeights, version: int) -> None:
        """Receive a version between two calls."""
        assert self.sync is not None, "only a sampler on ranks of its own receives versions"
        self.arriving = self.sync.install(parcel, self.ranks)
        self.version = self.received = version
