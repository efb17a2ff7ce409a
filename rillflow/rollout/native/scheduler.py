"""Scheduler: which rows run in the next step, and in which slot. Events in, instructions out; no torch.

    add ─> waiting ─ admit ─> slots 0 .. n-1, without a hole ─ leave ─> free slots
              ^                                │                          │ taken by the next waiting row,
              └────────── requeue ─────────────┘                          └ else by the last running one

Rows are admitted first come, first served. A row that shares its prefix with one that is in a slot
takes the keys and values from there, so a prompt is read once for all of its samples: samples of one
prompt wait one behind the other, so the slot of the last admitted one still holds them.

    tokens    p p p p p s s s . . .      p prompt, s sampled before (a resumed row)
    prefix    └──────────────┘           read at once: keys and values alone are wanted
    fed one by one           └ s . . .   each pass reads one token and draws the next

A row at step ``t`` feeds the token at position ``t - start_step``, because a running row moves by one
token in every step. So ``start_step`` alone says where a row is, and nothing has to be counted.

A step feeds one token of every running row, and beside them the prefixes of the rows that are new in
this step; a new row reads its prefix and its first own token in the same pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.rollout import Rollout

PREFILL_TOKENS = 8192
"""How many prefix tokens one step reads at most, padding counted; one prefix always fits."""


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One row, from ``add`` until it is handed back."""

    rollout: Rollout
    """The row's tokens as far as they were collected."""
    sampling: SamplingConfig
    """How its tokens are drawn."""
    prefix: tuple[int, ...]
    """The tokens whose keys and values are made in one go; the token after them is fed first."""
    limit: int
    """Tokens at which the row ends, prompt included."""
    slot: int = -1
    """Its place among the running rows; -1 while it waits."""
    start_step: int = 0
    """The step at which position 0 would have been fed."""
    first_sample_step: int = 0
    """The step of its first own draw; until then it repeats tokens it has."""
    last_step: int = 0
    """The step whose draw reaches the limit."""
    collected_step: int = 0
    """The first step whose draw is not yet in ``rollout``."""
    uniforms: Tensor | None = None
    """Random numbers of its first draws, made in bulk while it waits; None when not made yet."""

    @property
    def group(self) -> tuple[int, int]:
        """Which prompt this is a sample of."""
        return self.rollout.row.group

    def start(self, slot: int, clock: int) -> None:
        """Run from step ``clock`` on: feed the token after the prefix."""
        self.slot = slot
        self.start_step = clock - len(self.prefix)
        self.first_sample_step = self.collected_step = self.start_step + len(self.rollout.tokens) - 1
        self.last_step = self.start_step + self.limit - 2

    def wait(self) -> None:
        """Leave the running rows; whatever was made for the old position is void."""
        self.slot = -1
        self.uniforms = None


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Take the beginning of a cache row over into another slot, before the pass."""

    source: int
    """The slot to read."""
    target: int
    """The slot to write."""
    length: int
    """How many positions."""


@dataclass(kw_only=True)
class Prefill:
    """Read these tokens in this pass, for all of these slots."""

    tokens: tuple[int, ...]
    """The prefix."""
    slots: list[int] = field(default_factory=list)
    """Every slot that holds the prefix afterwards."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one pass does."""

    clock: int
    """The step's number."""
    rows: tuple[Sequence, ...]
    """The running rows by slot; each is fed one token."""
    admitted: tuple[Sequence, ...]
    """Those of them that are new in this step."""
    copies: tuple[Copy, ...]
    """Prefixes taken over from another slot; done first, in this order."""
    moves: tuple[Copy, ...]
    """Rows that change their slot, with all that belongs to them; done after the copies."""
    prefills: tuple[Prefill, ...]
    """Prefixes to read."""
    longest: int
    """Cache positions that the longest row sees."""


class _Intake:
    """The rows a step admits, and where their prefixes come from."""

    def __init__(self) -> None:
        self.admitted: list[Sequence] = []
        self.copies: list[Copy] = []
        self.prefills: list[Prefill] = []
        self._by_slot: dict[int, Prefill] = {}
        self._longest = 0

    def fits(self, sequence: Sequence, prefill_tokens: int) -> bool:
        """Whether the step can read this prefix too; prefixes lie side by side, so the longest one counts."""
        longest = max(self._longest, len(sequence.prefix))
        return (
            not self.prefills or not sequence.prefix or longest * (len(self.prefills) + 1) <= prefill_tokens
        )

    def admit(self, sequence: Sequence, prefix_slot: int | None) -> None:
        """``prefix_slot`` is a slot that holds the prefix, or will once this step's prefixes are read."""
        slot, prefix = sequence.slot, sequence.prefix
        self.admitted.append(sequence)
        if prefix_slot in self._by_slot:
            prefill = self._by_slot[prefix_slot]
            prefill.slots.append(slot)
            self._by_slot[slot] = prefill
        elif prefix_slot is not None:
            if prefix_slot != slot:
                self.copies.append(Copy(source=prefix_slot, target=slot, length=len(prefix)))
        elif prefix:
            self._by_slot[slot] = Prefill(tokens=prefix, slots=[slot])
            self.prefills.append(self._by_slot[slot])
            self._longest = max(self._longest, len(prefix))


class Scheduler:
    """The state machine.

    Args:
        max_rows: rows that run at once.
        prefill_tokens: see ``PREFILL_TOKENS``.
    """

    def __init__(self, max_rows: int, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self.clock = 0
        """The number of the next step."""
        self._waiting: deque[Sequence] = deque()
        self._rows: dict[RowId, Sequence] = {}
        self._slots: list[Sequence] = []  # a free slot keeps who left it: its prefix is still in the cache
        self._free: set[int] = set()
        self._prefix_slots: dict[tuple[int, int], int] = {}

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""
        return bool(self._rows)

    @property
    def running(self) -> list[Sequence]:
        """The running rows, by slot."""
        return [sequence for slot, sequence in enumerate(self._slots) if slot not in self._free]

    def waiting(self, most: int) -> list[Sequence]:
        """The next waiting rows, at most so many."""
        return list(islice(self._waiting, most))

    def add(self, sequence: Sequence) -> None:
        """A row is to run.

        Raises:
            RolloutError: a row of this id waits or runs already.
        """
        row = sequence.rollout.row
        if row in self._rows:
            raise twice(row)
        self._rows[row] = sequence
        self._waiting.append(sequence)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Rows have ended or were taken out; their slots are free."""
        for sequence in sequences:
            del self._rows[sequence.rollout.row]
            if sequence.slot < 0:
                self._waiting.remove(sequence)
            else:
                self._free.add(sequence.slot)
                sequence.wait()
        if len(self._free) == len(self._slots) and not self._waiting:
            self._forget()

    def find(self, row: RowId) -> Sequence:
        """The waiting or running row of this id.

        Raises:
            RolloutError: there is none.
        """
        if row not in self._rows:
            raise RolloutError(
                f"row ({row}) is not in the engine",
                why="it was never added, or has finished and was handed back",
            )
        return self._rows[row]

    def requeue(self) -> None:
        """Every running row waits again, before those that waited: what the cache holds has become void."""
        running = self.running
        for sequence in running:
            sequence.wait()
        self._waiting.extendleft(reversed(running))
        self._forget()

    def clear(self) -> None:
        """Forget every row."""
        self._waiting.clear()
        self._rows.clear()
        self._forget()

    def schedule(self) -> Step:
        """The next step; the clock moves on with it."""
        clock = self.clock
        self.clock += 1
        intake = _Intake()
        while self._waiting and (self._free or len(self._slots) < self._max_rows):
            sequence = self._waiting[0]
            prefix_slot = self._prefix_slot(sequence)
            if prefix_slot is None and not intake.fits(sequence, self._prefill_tokens):
                break
            self._waiting.popleft()
            sequence.start(self._take(sequence), clock)
            intake.admit(sequence, prefix_slot)
        moves = self._close_holes(clock)
        return Step(
            clock=clock,
            rows=tuple(self._slots),
            admitted=tuple(intake.admitted),
            copies=tuple(intake.copies),
            moves=moves,
            prefills=tuple(intake.prefills),
            longest=max((clock - sequence.start_step for sequence in self._slots), default=-1) + 1,
        )

    def _prefix_slot(self, sequence: Sequence) -> int | None:
        """A slot whose cache row begins with the sequence's prefix."""
        slot = self._prefix_slots.get(sequence.group)
        is_there = slot is not None and sequence.prefix and self._slots[slot].prefix == sequence.prefix
        return slot if is_there else None

    def _take(self, sequence: Sequence) -> int:
        """The lowest free slot, or a new one."""
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
            self._drop_prefix_slot(slot)
            self._slots[slot] = sequence
        else:
            slot = len(self._slots)
            self._slots.append(sequence)
        self._prefix_slots[sequence.group] = slot
        return slot

    def _close_holes(self, clock: int) -> tuple[Copy, ...]:
        moves = []
        while self._free:
            last = len(self._slots) - 1
            self._drop_prefix_slot(last)
            sequence = self._slots.pop()
            if last in self._free:
                self._free.remove(last)
                continue
            sequence.slot = self._take(sequence)
            moves.append(Copy(source=last, target=sequence.slot, length=clock - sequence.start_step))
        return tuple(moves)

    def _drop_prefix_slot(self, slot: int) -> None:
        group = self._slots[slot].group
        if self._prefix_slots.get(group) == slot:
            del self._prefix_slots[group]

    def _forget(self) -> None:
        self._slots.clear()
        self._free.clear()
        self._prefix_slots.clear()


def twice(row: RowId) -> RolloutError:
    """What is wrong with a second row of an id."""
    return RolloutError(
        f"row ({row}) is in the engine already",
        why="a row's random numbers and results are found by its id, so an id is there once",
        fix="give every row of a batch its own (epoch, prompt, sample)",
    )
