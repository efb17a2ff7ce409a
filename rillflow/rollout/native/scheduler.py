"""Scheduler: selects the rows of the next step and their cache rows. Events in, instructions out; no torch.

    add ─> waiting ─ admit ─> buckets of slots (see cache_layout) ─ leave ─> free cache rows
              ^                  │                            │ taken by the next waiting row,
              └──── requeue ─────┘                            └ else by the last running one of the bucket

Rows are admitted first come, first served. A row whose prefix is in the cache copies those keys and values
(see ``PrefixIndex``), so a prompt is read once for all of its samples.

    tokens    p p p p p s s s . . .      p prompt, s sampled before (a resumed row)
    prefix    └──────────────┘           read in one pass: only its keys and values are needed
    fed one by one           └ s . . .   each pass reads one token and draws the next

A running row advances by one token per step, so at step ``t`` it feeds the token at position
``t - start_step``. ``start_step`` is therefore all that a row's position needs.

A step feeds one token of every running row and reads the prefixes of the rows new in this step; a new row
reads its prefix and its first own token in the same pass. A prefix longer than a step's limit is read in
pieces: after each piece the row feeds the token behind it, and jumps to the next piece in the next step.

With a memory budget, the row that arrived last waits again, with its tokens kept, when earlier rows need
its memory. The first row always continues, so every row ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.cache_layout import (
    CacheLayout,
    CacheRow,
    Copy,
    LengthBucket,
    PrefixIndex,
    positions_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.rollout import Rollout

PREFILL_TOKENS = 8192
"""Maximum prefix tokens of one step, padding included; longer prefixes are read in pieces of a quarter."""
LEAST_SHARED = 64
"""Minimum length of a shared beginning that is copied from another prefix."""
AHEAD = 64
"""With a memory budget, a row is admitted only if every row keeps this many free positions."""
_T = TypeVar("_T")


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One row, from ``add`` until it is returned."""

    rollout: Rollout
    """The row with the tokens collected so far."""
    sampling: SamplingConfig
    """Sampling settings of the row."""
    prefix: tuple[int, ...]
    """Tokens whose keys and values are computed together; the token after them is fed first."""
    limit: int
    """Tokens at which the row ends, prompt included."""
    arrival: int = -1
    """Number of rows added before this one."""
    slot: int = -1
    """Index of the row among the running rows; -1 while it waits."""
    cache_row: CacheRow | None = None
    """Where its keys and values are; None while it waits."""
    read: int = 0
    """Prefix tokens in the cache after the last step that read some."""
    start_step: int = 0
    """The step at which position 0 would have been fed."""
    first_sample_step: int = 0
    """The step of the row's first own draw; before it, the row feeds tokens that it already has."""
    last_step: int = 0
    """The step whose draw reaches the limit."""
    collected_step: int = 0
    """The first step whose draw is not yet in ``rollout``."""
    cache: Tensor | None = None
    """[P, W] keys and values of its prefix's first P tokens, from before; None if they are to be computed."""
    is_private: bool = False
    """Whether its keys and values may come from older weights, so that no other row may copy them."""
    uniforms: Tensor | None = None
    """Random numbers of the row's next draws, made for many rows at once; None if not made yet."""

    def start(self, clock: int, read: int) -> None:
        """Start or resume at step ``clock`` with ``read`` tokens of the prefix in the cache."""
        if read != len(self.prefix) or self.read:
            self.uniforms = None
        self.read = read
        self.start_step = clock - read
        self.first_sample_step = self.collected_step = self.start_step + len(self.rollout.tokens) - 1
        self.last_step = self.start_step + self.limit - 2

    @property
    def shared_prefix(self) -> tuple[int, ...]:
        """Prefix tokens in the cache that other rows may copy."""
        return () if self.is_private else self.prefix[: self.read]

    def reach(self, clock: int) -> int:
        """Return the cache positions that it needs in this step."""
        ran = clock - self.start_step if self.cache_row is not None else 0
        return max(len(self.prefix), ran) + 1

    def wait(self) -> None:
        """Remove it from the running rows; state of its old position is reset."""
        self.slot, self.cache_row, self.read = -1, None, 0
        self.uniforms, self.is_private = None, False


@dataclass(kw_only=True, eq=False)
class Prefill:
    """Instruction to read these tokens in this pass, for all of these cache rows."""

    tokens: tuple[int, ...]
    """A prefix, or the part of a prefix that begins at ``begin``."""
    begin: int = 0
    """Position of the first token; those before it are in the cache."""
    cache_rows: list[CacheRow] = field(default_factory=list)
    """Every cache row that holds the tokens after the pass."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Instructions for one step."""

    clock: int
    """Number of the step."""
    rows: tuple[Sequence, ...]
    """The running rows by slot; each is fed one token."""
    admitted: tuple[Sequence, ...]
    """Rows of ``rows`` that are new in this step, or jump to the next piece of their prefix."""
    buckets: tuple[LengthBucket[Sequence], ...]
    """Memory of the rows, in the order of slots."""
    copies: tuple[Copy, ...]
    """Copies for rows that change their cache rows and for shared beginnings; all at once."""
    moves: tuple[tuple[int, int], ...]
    """Rows that change slots, as (from, to); all at once."""
    loads: tuple[tuple[CacheRow, Tensor], ...]
    """Keys and values from other engines, and where they are written."""
    prefills: tuple[Prefill, ...]
    """Prefixes to read."""
    reaches: tuple[int, ...]
    """Cache positions that the longest row of each bucket reads."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A row that may be admitted."""

    sequence: Sequence
    """The row."""
    source: CacheRow | None
    """Cache row to copy its beginning from; None for none."""
    shared: int
    """Length of that beginning in tokens."""


@dataclass(frozen=True, kw_only=True)
class _Seating:
    """Copies and moves that give every row its cache row and slot."""

    copies: list[Copy] = field(default_factory=list)
    """See ``Step``."""
    moves: list[tuple[int, int]] = field(default_factory=list)
    """See ``Step``."""


class Scheduler:
    """The state machine.

    Args:
        max_rows: maximum running rows.
        prefill_tokens: see ``PREFILL_TOKENS``.
        layout: layout of the cache memory.
        shares_parts: whether a row may copy a part of another row's prefix and read only the rest.
    """

    def __init__(
        self,
        max_rows: int,
        prefill_tokens: int = PREFILL_TOKENS,
        *,
        layout: CacheLayout[Sequence] | None = None,
        shares_parts: bool = True,
    ) -> None:
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._shares_parts = shares_parts
        self.layout: CacheLayout[Sequence] = layout or CacheLayout()
        """Cache rows of the running rows."""
        self.room: float = inf
        """Maximum positions of the cache, over all rows."""
        self.clock = 0
        """Number of the next step."""
        self._arrivals = count()
        self._waiting: deque[Sequence] = deque()
        self._rows: dict[RowId, Sequence] = {}
        self._index = PrefixIndex()
        self._lasts: float = -1  # the layout is valid until this step if no row arrives or leaves

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""
        return bool(self._rows)

    @property
    def running(self) -> list[Sequence]:
        """The running rows, by slot."""
        return [row for bucket in self.layout.buckets for row in bucket.members if row.cache_row is not None]

    def waiting(self, most: int) -> list[Sequence]:
        """Return the next waiting rows, at most ``most``."""
        return list(islice(self._waiting, most))

    def add(self, sequence: Sequence) -> None:
        """Add a row.

        Raises:
            RolloutError: a row of this id waits or runs already.
        """
        row = sequence.rollout.row
        if row in self._rows:
            raise twice(row)
        self._rows[row] = sequence
        sequence.arrival = next(self._arrivals)
        self._waiting.append(sequence)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Remove rows that ended or were aborted; other rows can reuse their cache contents."""
        for sequence in sequences:
            del self._rows[sequence.rollout.row]
            if sequence.cache_row is None:
                self._waiting.remove(sequence)
            else:
                self._vacate(sequence)
        if len(self._waiting) == len(self._rows) == 0:
            self.forget()

    def find(self, row: RowId) -> Sequence:
        """Return the waiting or running row of this id.

        Raises:
            RolloutError: there is none.
        """
        return row_in(self._rows, row)

    def overdue(self) -> list[Sequence]:
        """Return the latest running rows that must wait because the others need their memory."""
        stay = sorted(self.running, key=lambda row: row.arrival)
        gone: list[Sequence] = []
        while self.clock >= self._lasts and len(stay) > 1 and not self._fits(stay):
            gone.append(stay.pop())
        return gone

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Move running rows back to the front of the waiting ones, in order of arrival."""
        back = sorted(sequences, key=lambda row: row.arrival)
        for sequence in back:
            self._vacate(sequence)
        self._waiting.extendleft(reversed(back))

    def forget(self) -> None:
        """Discard all cache contents and buckets; no row runs."""
        self.drop_index()
        self.layout.buckets = []

    def drop_index(self) -> None:
        """Stop sharing the present contents of the cache with other rows, now and when their rows leave."""
        self._index = PrefixIndex()
        for row in self.running:
            row.is_private = True

    def take_caches(self) -> list[Sequence]:
        """Drop the caches that rows have brought and not used; return these rows."""
        rows = [row for row in self._waiting if row.cache is not None]
        for row in rows:
            row.cache = None
        return rows

    def clear(self) -> None:
        """Remove every row."""
        self._waiting.clear()
        self._rows.clear()
        self.forget()

    def schedule(self) -> Step:
        """Return the next step and advance the clock."""
        clock, running = self.clock, self.running
        reading = [row for row in running if clock - row.start_step < len(row.prefix)]
        entries = self._entries(running, reading)
        begins = [(row, clock - row.start_step) for row in reading]
        begins += [(self._waiting.popleft(), entry.shared) for entry in entries]
        pieces: dict[tuple[tuple[int, ...], int], tuple[Prefill, list[Sequence]]] = {}
        for row, begin in begins:
            row.start(clock, begin + self._piece(len(row.prefix) - begin))
            self._lasts = -1
            if row.read > begin:
                piece = Prefill(tokens=row.prefix[begin : row.read], begin=begin)
                pieces.setdefault((row.prefix, begin), (piece, []))[1].append(row)
        seating = self._seat(running, entries)
        for row in reading:
            self._index.put(_cache_row(row), row.shared_prefix)
        for prefill, rows in pieces.values():
            prefill.cache_rows += map(_cache_row, rows)
        loads = []
        for sequence in (entry.sequence for entry in entries):
            if sequence.cache is not None:
                loads.append((_cache_row(sequence), sequence.cache))
                sequence.cache = None
        buckets = tuple(self.layout.buckets)
        starts = ([row.start_step for row in bucket.members] for bucket in buckets)
        self.clock += 1
        return Step(
            clock=clock,
            rows=tuple(self.running),
            admitted=tuple(row for row, _ in begins),
            buckets=buckets,
            copies=tuple(seating.copies),
            moves=tuple(seating.moves),
            loads=tuple(loads),
            prefills=tuple(prefill for prefill, _ in pieces.values()),
            reaches=tuple(clock - min(each, default=clock) + 1 for each in starts),
        )

    def _piece(self, unread: int) -> int:
        """Return the number of prefix tokens to read in one step when ``unread`` are left."""
        return unread if unread <= self._prefill_tokens else max(1, self._prefill_tokens // 4)

    def _entries(self, running: Rows[Sequence], reading: Rows[Sequence]) -> list[_Entry]:
        """Return the waiting rows that the next step admits."""
        entries: list[_Entry] = []
        spent = sum(self._piece(len(row.prefix) - row.read - 1) for row in reading)
        unfinished, longest = {row.prefix for row in reading}, 0
        fresh, beginnings = set[tuple[tuple[int, ...], int]](), set[tuple[int, ...]]()
        for sequence in islice(self._waiting, self._max_rows - len(running)):
            prefix = sequence.prefix
            entry = self._entry(sequence)
            unread, piece = len(prefix) - entry.shared, (prefix, entry.shared)
            if unread and (piece not in fresh or unread > self._prefill_tokens):
                longest = max(longest, self._piece(unread))
                is_full = spent + longest * (len(fresh) + 1) > self._prefill_tokens
                # Another row reads the same tokens now: wait, then copy them.
                if prefix in unfinished or piece in fresh or ((spent or fresh) and is_full):
                    break
                beginning = prefix[:LEAST_SHARED] if self._shares_parts and not entry.shared else ()
                if len(beginning) == LEAST_SHARED and beginning in beginnings:
                    break
                fresh.add(piece)
                beginnings.add(beginning)
            entries.append(entry)
        return entries[: self._admissible(running, entries)]

    def _entry(self, sequence: Sequence) -> _Entry:
        """Return the row with the cache row of its cached beginning, if that is long enough to copy."""
        if sequence.cache is not None:
            return _Entry(sequence=sequence, source=None, shared=len(sequence.cache))
        source, shared = self._index.find(sequence.prefix) or (None, 0)
        if shared == len(sequence.prefix) or (self._shares_parts and shared >= LEAST_SHARED):
            return _Entry(sequence=sequence, source=source, shared=shared)
        return _Entry(sequence=sequence, source=None, shared=0)

    def _admissible(self, running: Rows[Sequence], entries: Rows[_Entry]) -> int:
        """Return how many of these rows fit into memory."""
        coming = [entry.sequence for entry in entries]
        low, high = 0 if running else min(1, len(coming)), len(coming)
        while low < high:
            middle = high if high == len(coming) else (low + high + 1) // 2
            if self._fits([*running, *coming[:middle]], AHEAD):
                low = middle
            else:
                high = middle - 1
        return low

    def _fits(self, rows: Rows[Sequence], ahead: int = 0) -> bool:
        """Return whether these rows fit into memory."""
        if self.room == inf:
            return True
        return positions_of(self.layout.arranged(rows, self.clock, is_tight=True, ahead=ahead)) <= self.room

    def _arranged(self, rows: Rows[Sequence]) -> list[LengthBucket[Sequence]]:
        """Return the roomiest buckets that fit into memory.

        One way fits: ``overdue`` made room for the second one, and ``_admissible`` admits rows by the third.
        """
        ways: list[dict[str, Any]] = [{}, {"is_tight": True}, {"is_tight": True, "ahead": AHEAD}]
        tried = (self.layout.arranged(rows, self.clock, **way) for way in ways)
        return next(buckets for buckets in tried if positions_of(buckets) <= self.room)

    def _seat(self, running: Rows[Sequence], entries: Rows[_Entry]) -> _Seating:
        """Give every row its cache row and slot."""
        found, slot = _Seating(), 0
        if self.clock < self._lasts:
            return found
        rows = [*running, *(entry.sequence for entry in entries)]
        buckets = self._arranged(rows)
        self.layout.buckets, self._lasts = buckets, inf
        ran = {row.cache_row for row in running}
        origins = {row: (row.cache_row, self.clock - row.start_step) for row in running}
        origins |= {entry.sequence: (entry.source, entry.shared) for entry in entries}
        held = dict[CacheRow, tuple[int, ...]]()
        for bucket in buckets:
            for index, row in enumerate(bucket.members):
                target, (source, length) = CacheRow(bucket.name, index), origins[row]
                if source is not None and source != target:
                    found.copies.append(Copy(source=source, target=target, length=length))
                if row.cache_row != target:
                    held[target] = (
                        row.shared_prefix if row.cache_row is None else self._index.at(row.cache_row)
                    )
                if row.slot >= 0 and row.slot != slot:
                    found.moves.append((row.slot, slot))
                row.cache_row, row.slot, slot = target, slot, slot + 1
                self._lasts = min(self._lasts, row.start_step + bucket.length)
        for free, target in self._displaced(found.copies, ran, {row.cache_row for row in rows}).items():
            held[free] = self._index.at(target)
            found.copies.append(Copy(source=target, target=free, length=len(held[free])))
        for target, tokens in held.items():
            self._index.put(target, tokens)
        self._index.keep(self.layout.kept_rows)
        return found

    def _displaced(
        self, copies: Rows[Copy], ran: Collection[CacheRow | None], runs: Collection[CacheRow | None]
    ) -> dict[CacheRow, CacheRow]:
        """Return free sources of copies, with the targets whose contents should move there to survive."""
        rows = {bucket.name: bucket.rows for bucket in self.layout.buckets}
        return {
            copy.source: copy.target
            for copy in (copies if self._shares_parts else ())
            if copy.source.bucket == copy.target.bucket and copy.source.row < rows[copy.source.bucket]
            if copy.source not in runs and copy.target not in ran and self._index.at(copy.target)
        }

    def _vacate(self, sequence: Sequence) -> None:
        """Free the row's cache row; its keys and values stay usable until another row takes it."""
        if self._shares_parts and not sequence.is_private:
            fed = sequence.rollout.tokens[: self.clock - sequence.start_step]
            self._index.put(_cache_row(sequence), fed)
        sequence.wait()
        self._lasts = -1


def _cache_row(row: Sequence) -> CacheRow:
    assert row.cache_row is not None, "a running row has one"
    return row.cache_row


def row_in(rows: Mapping[RowId, _T], row: RowId) -> _T:
    """Return an engine's entry for a row id.

    Raises:
        RolloutError: there is no such row.
    """
    if row not in rows:
        why = "it was never added, or has finished and was returned"
        raise RolloutError(f"row ({row}) is not in the engine", why=why)
    return rows[row]


def twice(row: RowId) -> RolloutError:
    """Return the error for a row id that is already in the engine."""
    return RolloutError(
        f"row ({row}) is in the engine already",
        why="random numbers and results belong to a row's id, so the id must be unique",
        fix="give every row of a batch its own (epoch, prompt, sample)",
    )


def check_ids(rows: Iterable[RowId]) -> None:
    """Check that row ids are unique.

    Raises:
        RolloutError: two rows have the same id.
    """
    again = [row for row, times in Counter(rows).items() if times > 1]
    if again:
        raise twice(again[0])
