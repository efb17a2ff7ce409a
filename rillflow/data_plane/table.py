"""Table: groups x stages, as a state machine without input, output or clock. Events in, instructions out.

    begin ─> group g: slot g % capacity, one of   per stage:   BLOCKED ──columns written──> READY
      │                                                                                       │ take
      │ no slot: wait                               DONE <───── done ───── TAKEN <────────────┘
      │                                              │                       │ deadline passed, holder died
      v                                              │                       └──────────────> READY
    deleted after its last reader, cleared by the store, then the slot is reused

- A group is a prompt's rows; its number is its place in begin order.
- A stage's cells of a group become visible together, when the stage is done with it: no stage reads a partial
  row, and a worker that takes over from a dead holder writes all of them.
- **exactly-once** Only the lease of a group can finish it, once. When a lease ends, its unfinished groups
  return; a late result of its holder is refused, with the group's story.
- **bounded-table** At most ``capacity`` numbers lie between the oldest group not cleared and the newest. This
  is the back-pressure: a further group does not begin.

The hot path works on arrays over slots. No method reads a clock: ``now`` and deadlines are numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.data_plane.instructions import (
    Begun,
    Delete,
    Dropped,
    Finished,
    Ids,
    Instruction,
    Lease,
    Ready,
    Room,
)
from rillflow.data_plane.samplers import BLOCKED, DONE, READY, SAMPLERS, TAKEN, within
from rillflow.data_plane.schema import SOURCE, Schema
from rillflow.errors import StreamError, nearest

EVENTS_REMEMBERED = 4_096
"""Events kept for stories; each may cover many groups."""
_LOOK = 1_024
"""Slots that are checked at once for being free."""


@dataclass(frozen=True, kw_only=True)
class _Event:
    now: float
    text: str
    ids: Ids


class Table:
    """The control state of one stream.

    Args:
        schema: columns and stages.
        capacity: largest number of groups between the oldest that is not cleared and the newest.
        now: time of creation.
        first_lease: number of the first lease; a number that no earlier table gave refuses its holders.
    """

    def __init__(self, schema: Schema, *, capacity: int, now: float = 0.0, first_lease: int = 1) -> None:
        if capacity < 1:
            raise StreamError(f"a table for {capacity} groups", why="it needs at least 1")
        self.schema = schema
        self.capacity = capacity
        self.begun = 0
        """Number of groups that have begun, which is the number of the next group."""
        self.oldest = 0
        """Number of the oldest group that is not cleared."""
        self.is_closed = False
        """Whether the stream is closed to new groups."""
        self.dropped: Counter[str] = Counter()
        """Number of dropped groups, by reason."""
        self._stages = [stage.name for stage in schema.stages]
        self._writers = [SOURCE, *self._stages]
        bit = {column: 1 << place for place, column in enumerate(schema.columns)}
        self._reads = [sum(bit[column] for column in stage.reads) for stage in schema.stages]
        self._writes = [sum(bit[column] for column in schema.written_by(name)) for name in self._writers]
        self._reads_of = [
            [place for place, written in enumerate(self._writes) if written & reads] for reads in self._reads
        ]
        """Writers of the columns that each stage reads."""
        stages, writers = len(self._stages), len(self._writers)
        self._state = np.full((stages, capacity), DONE, np.uint8)
        self._lease = np.zeros((stages, capacity), np.int64)
        self._unread = np.zeros((writers, capacity), np.int16)
        """Stages that have not finished reading; 0 if nothing is stored."""
        self._held = np.zeros((writers, capacity), np.bool_)
        """Whether cells are written and not cleared by the store."""
        self._written = np.zeros(capacity, np.int64)
        self._left = np.zeros(capacity, np.int16)
        """Number of stages that are not done."""
        self._was_lost = np.zeros(capacity, np.bool_)
        self._rows = np.zeros(capacity, np.int64)
        self._tokens = np.zeros(capacity, np.int64)
        self._version = np.zeros(capacity, np.int64)
        self._leases: dict[int, Lease] = {}
        self._numbers = counter(first_lease)
        self._taken_at: dict[str, float] = {}
        self._events: deque[_Event] = deque(maxlen=EVENTS_REMEMBERED)
        self._made = now

    # Events

    def begin(
        self,
        count: int,
        *,
        holder: str,
        now: float,
        rows: int | Ids = 1,
        tokens: int | Ids = 0,
        version: int = 0,
    ) -> list[Instruction]:
        """Begin groups whose source columns are written; all of them, or none if there is no room.

        Raises:
            StreamError: the stream is closed, or the groups exceed the table's capacity.
        """
        if self.is_closed:
            raise StreamError(f"{holder} begins {count} groups", why="the stream is closed")
        if not 0 < count <= self.capacity:
            raise StreamError(
                f"{holder} begins {count} groups at once", why=f"the table has {self.capacity} slots"
            )
        if count > self.room:
            return []
        ids = np.arange(self.begun, self.begun + count)
        slots = ids % self.capacity
        self.begun += count
        self._state[:, slots], self._lease[:, slots] = BLOCKED, 0
        self._left[slots], self._was_lost[slots], self._written[slots] = len(self._stages), False, 0
        self._rows[slots], self._tokens[slots], self._version[slots] = rows, tokens, version
        self._note(now, f"begun by {holder}", ids)
        return [Begun(ids=ids), *self._appear(0, slots)]

    def take(
        self,
        stage: str,
        count: int,
        *,
        holder: str,
        now: float,
        deadline: float,
        least: int = 1,
        tokens: int | None = None,
        least_version: int | None = None,
        only: Ids | None = None,
    ) -> list[Instruction]:
        """Lease ready groups to a holder: return a Lease, Finished, or neither while there are too few.

        Args:
            stage: the stage.
            count: largest number of groups.
            holder: name of the holder.
            now: the time.
            deadline: time at which the groups become ready again.
            least: smallest number of groups; fewer only if a closed stream has no more.
            tokens: limit of the groups' total tokens, except for a single group.
            least_version: groups whose oldest token is from an older policy version are dropped.
            only: [N] groups to lease, in this order, if they are ready; None lets the stage's sampler choose.
        """
        place = self._place(stage)
        if not 0 < least <= count:
            raise StreamError(
                f"{holder} takes {least} to {count} groups",
                why="the smaller number is at least 1 and at most the larger",
            )
        out = self._drop_older(place, least_version, now) if least_version is not None else []
        state = self._in_order(self._state[place])
        ids = self.oldest + SAMPLERS[self.schema.stages[place].order](state, count)
        if only is not None:
            ids = only[np.isin(only, self.ready(stage))][:count]
        open_groups = int(np.count_nonzero(state != DONE))
        if self.is_closed and not open_groups:
            return [*out, Finished(stage=stage)]
        fit = within(self._tokens[ids % self.capacity], tokens) if tokens is not None else count
        if len(ids) < min(least, fit, open_groups if self.is_closed else least):
            return out
        ids = ids[:fit]
        slots = ids % self.capacity
        lease = Lease(
            number=next(self._numbers),
            stage=stage,
            holder=holder,
            since=now,
            deadline=deadline,
            ids=ids,
            rows=self._rows[slots],
            tokens=self._tokens[slots],
        )
        self._leases[lease.number] = lease
        self._state[place, slots], self._lease[place, slots] = TAKEN, lease.number
        self._taken_at[stage] = now
        self._note(now, f"taken for {stage} by {holder}", ids)
        return [*out, lease]

    def done(
        self,
        number: int,
        ids: Ids,
        *,
        now: float,
        tokens: int | Ids | None = None,
        version: int | None = None,
    ) -> list[Instruction]:
        """Complete groups of a lease, which the holder has read and whose output columns it has written.

        Raises:
            StreamError: the lease does not have one of the groups (any more); the table is then unchanged.
        """
        lease = self.lease(number, ids)
        place = self._place(lease.stage)
        slots = ids % self.capacity
        self._state[place, slots], self._lease[place, slots] = DONE, 0
        if tokens is not None:
            self._tokens[slots] = tokens
        if version is not None:
            self._version[slots] = version
        self._note(now, f"{lease.stage} done by {lease.holder}", ids)
        self._left[slots] -= 1
        out = self._appear(place + 1, slots) if self._writes[place + 1] else []
        for writer in self._reads_of[place]:
            self._unread[writer, slots] -= 1
            out += self._delete(writer, ids[self._unread[writer, slots] == 0])
        self._end_if_empty(lease)
        return out + self._finished()

    def expire(self, now: float) -> list[Instruction]:
        """End the leases whose deadline has passed; their groups become ready again."""
        late = [lease for lease in self._leases.values() if lease.deadline <= now]
        return [each for lease in late for each in self._give_back(lease, now, "passed its deadline")]

    def died(self, holder: str, now: float) -> list[Instruction]:
        """End all leases of a holder."""
        its = [lease for lease in self._leases.values() if lease.holder == holder]
        return [each for lease in its for each in self._give_back(lease, now, "died")]

    def give_back(self, number: int, now: float) -> list[Instruction]:
        """End the lease of a holder that cannot process its groups."""
        return self._give_back(self._leases[number], now, "gave them back") if number in self._leases else []

    def renew(self, number: int, deadline: float) -> None:
        """Move a lease's deadline.

        Raises:
            StreamError: the lease has ended.
        """
        lease = self.lease(number, np.zeros(0, np.int64))
        self._leases[number] = replace(lease, deadline=deadline)

    def drop(self, ids: Ids, reason: str, now: float) -> list[Instruction]:
        """Remove groups from the stream, even leased ones; groups that have already left are ignored."""
        self._check_begun(ids)
        ids = np.unique(ids[ids >= self.oldest])
        ids = ids[self._left[ids % self.capacity] > 0]
        if not len(ids):
            return []
        slots = ids % self.capacity
        self._was_lost[slots] |= (self._state[:, slots] == TAKEN).any(axis=0)
        numbers = np.unique(self._lease[:, slots])
        self._state[:, slots], self._lease[:, slots], self._left[slots] = DONE, 0, 0
        for number in numbers[numbers > 0].tolist():
            self._end_if_empty(self._leases[number])
        self._note(now, f"dropped: {reason}", ids)
        self.dropped[reason] += len(ids)
        out: list[Instruction] = [Dropped(ids=ids, reason=reason)]
        for writer in range(len(self._writers)):
            out += self._delete(writer, ids[self._unread[writer, slots] > 0])
            self._unread[writer, slots] = 0
        return out + self._finished()

    def cleared(self, writer: str, ids: Ids) -> list[Instruction]:
        """Record that the store has deleted cells; a repeated call has no effect.

        Raises:
            StreamError: a stage has yet to read one of them.
        """
        self._check_begun(ids)
        place = self._writers.index(writer)
        slots = ids[ids >= self.oldest] % self.capacity
        if self._unread[place, slots].any():
            raise StreamError(f"cells of {writer} are cleared before their last reader has finished")
        self._held[place, slots] = False
        return self._advance()

    def close(self, now: float) -> list[Instruction]:
        """Close the stream to new groups; existing ones continue."""
        if not self.is_closed:
            self.is_closed = True
            self._note(now, "closed", np.arange(0))
        return [Ready(stage=stage) for stage in self._stages]

    # Queries

    def lease(self, number: int, ids: Ids) -> Lease:
        """Return the lease that has all of these groups.

        Raises:
            StreamError: the lease does not have them, or has ended.
        """
        lease = self._leases.get(number)
        mine = (ids >= self.oldest) & (ids < self.begun)
        if lease is not None:
            mine &= self._lease[self._place(lease.stage), ids % self.capacity] == number
        for group in ids[~mine if lease else slice(None)][:1].tolist():
            raise StreamError(
                f"lease {number} does not hold group {group}", why=self.story(group), fix="take it again"
            )
        if lease is None:
            raise StreamError(f"there is no lease {number}", why="it has ended or never existed")
        if len(np.unique(ids)) != len(ids):
            raise StreamError(f"lease {number} reports one group as done twice")
        return lease

    def rows(self, ids: Ids) -> Ids:
        """Return rows [N] of live groups."""
        return self._rows.take(ids % self.capacity)

    def ready(self, stage: str) -> Ids:
        """Return the groups [N] that may be taken for a stage, in begin order."""
        return self.oldest + np.flatnonzero(self._in_order(self._state[self._place(stage)]) == READY)

    def unread(self, writer: str) -> Ids:
        """Return the groups [N] whose cells of a writer some stage has yet to read."""
        counts = self._in_order(self._unread[self._writers.index(writer)])
        return self.oldest + np.flatnonzero(counts)

    @property
    def room(self) -> int:
        """Number of groups that may begin now."""
        return self.capacity - (self.begun - self.oldest)

    @property
    def deadline(self) -> float:
        """Earliest deadline of all leases."""
        return min((lease.deadline for lease in self._leases.values()), default=float("inf"))

    def counts(self) -> dict[str, tuple[int, int, int, int]]:
        """Return the number of live groups that are blocked, ready, taken and done, by stage."""
        found = {}
        for stage, state in zip(self._stages, self._state, strict=True):
            blocked, ready, taken, done = np.bincount(self._in_order(state), minlength=4).tolist()
            found[stage] = (blocked, ready, taken, done)
        return found

    def story(self, group: int) -> str:
        """Return the events of a group, in order."""
        told = [f"{event.text} at {event.now:g} s" for event in self._events if group in event.ids]
        if not 0 <= group < self.begun:
            return f"group {group} has not begun; the newest is {self.begun - 1}"
        first = "" if len(told) and told[0].startswith("begun") else "... "
        return f"group {group}: {first}{', '.join(told)}"

    def waits(self, stage: str | None, now: float) -> str:
        """Return what a taker for ``stage``, or with None a beginner, waits for, and since when."""
        if stage is None:
            if self.room:
                return f"{self.room} groups may begin"
            return f"all {self.capacity} slots are in use; the oldest: {self.holds(now)}"
        place = self._place(stage)
        its = self.oldest + np.flatnonzero(self._in_order(self._state[place]) != DONE)
        if not len(its):
            last = max((event.now for event in self._events if event.text.startswith("begun")), default=None)
            since = f"for {now - (self._made if last is None else last):g} s"
            return f"{stage} waits for new groups: none has begun {since}"
        return f"{stage} waits: {self._blame(int(its[0]), place, now)}"

    def holds(self, now: float) -> str:
        """Return the holder that keeps the oldest group's cells from being deleted, and the group's story."""
        slot = self.oldest % self.capacity
        places = [place for place in range(len(self._stages)) if self._state[place, slot] != DONE]
        found = self._blame(self.oldest, places[0], now) if places else "the store has not cleared it"
        return f"{self.story(self.oldest)}; {found}"

    # Internals

    def _place(self, stage: str) -> int:
        if stage not in self._stages:
            raise StreamError(f"the stream has no stage {stage!r}", fix=nearest(stage, self._stages))
        return self._stages.index(stage)

    def _in_order(self, of_slots: NDArray[Any]) -> NDArray[Any]:
        """Return the live groups' entries, in begin order."""
        first, live = self.oldest % self.capacity, self.begun - self.oldest
        past = max(0, first + live - self.capacity)
        part = of_slots[first : first + live]
        return np.concatenate([part, of_slots[:past]]) if past else part

    def _note(self, now: float, text: str, ids: Ids) -> None:
        self._events.append(_Event(now=now, text=text, ids=ids))

    def _appear(self, writer: int, slots: Ids) -> list[Instruction]:
        """Record the cells of a writer, and return the stages that became ready."""
        self._written[slots] |= self._writes[writer]
        self._held[writer, slots] = True
        self._unread[writer, slots] = sum(writer in read for read in self._reads_of)
        out: list[Instruction] = []
        for place, reads in enumerate(self._reads):
            if reads & self._writes[writer]:
                able = slots[(self._written[slots] & reads) == reads]
                self._state[place, able] = READY
                out += [Ready(stage=self._stages[place])] if len(able) else []
        return out

    def _delete(self, writer: int, ids: Ids) -> list[Instruction]:
        was_lost = self._was_lost[ids % self.capacity]
        return [
            Delete(writer=self._writers[writer], ids=part, is_unread=is_unread)
            for part, is_unread in ((ids[~was_lost], True), (ids[was_lost], False))
            if len(part)
        ]

    def _give_back(self, lease: Lease, now: float, why: str) -> list[Instruction]:
        del self._leases[lease.number]
        place = self._place(lease.stage)
        ids = self._open(lease)
        slots = ids % self.capacity
        self._state[place, slots], self._lease[place, slots] = READY, 0
        self._was_lost[slots] = True
        self._note(now, f"returned from {lease.stage}, for {lease.holder} {why}", ids)
        return [Ready(stage=lease.stage)]

    def _open(self, lease: Lease) -> Ids:
        """Return the groups that a lease still has."""
        its = self._lease[self._place(lease.stage), lease.ids % self.capacity] == lease.number
        return lease.ids.compress(its)

    def _end_if_empty(self, lease: Lease) -> None:
        if not len(self._open(lease)):
            del self._leases[lease.number]

    def _drop_older(self, place: int, least_version: int, now: float) -> list[Instruction]:
        state, version = self._in_order(self._state[place]), self._in_order(self._version)
        older = self.oldest + np.flatnonzero((state == READY) & (version < least_version))
        reason = f"{self._stages[place]} takes version {least_version} or newer"
        return self.drop(older, reason, now)

    def _check_begun(self, ids: Ids) -> None:
        for group in ids[(ids < 0) | (ids >= self.begun)][:1].tolist():
            raise StreamError(f"there is no group {group}", why=self.story(group))

    def _advance(self) -> list[Instruction]:
        """Free the slots of cleared groups, oldest first."""
        before = self.oldest
        while self.oldest < self.begun:
            slots = np.arange(self.oldest, min(self.begun, self.oldest + _LOOK)) % self.capacity
            busy = np.flatnonzero((self._left[slots] > 0) | self._held[:, slots].any(axis=0))
            self.oldest += int(busy[0]) if len(busy) else len(slots)
            if len(busy):
                break
        return [Room(groups=self.room)] if self.oldest > before else []

    def _finished(self) -> list[Instruction]:
        """Wake the takers of a closed stream, which may have reached its end."""
        return [Ready(stage=stage) for stage in self._stages] if self.is_closed else []

    def _blame(self, group: int, place: int, now: float) -> str:
        slot, stage = group % self.capacity, self._stages[place]
        state = int(self._state[place, slot])
        if state == TAKEN:
            lease = self._leases[int(self._lease[place, slot])]
            return f"{lease.holder} has held group {group} for {stage} for {now - lease.since:g} s"
        if state == READY:
            last = self._taken_at.get(stage)
            said = (
                "no worker ever took a group" if last is None else f"no worker took one for {now - last:g} s"
            )
            return f"group {group} is ready for {stage}: {said}"
        missing = self._reads[place] & ~int(self._written[slot])
        writer = next(each for each, written in enumerate(self._writes) if written & missing)
        columns: Sequence[str] = self.schema.written_by(self._writers[writer])
        return f"{stage} lacks {', '.join(columns)} of group {group}; {self._blame(group, writer - 1, now)}"
