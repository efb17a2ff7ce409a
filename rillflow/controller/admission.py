"""Admission: decide which groups begin and which are trained, so that tokens are at most k versions old.

least_version(newest)   before a group begins: the lowest version that it may begin under
begin(group)            when a group begins; its version is fixed from then on
complete(group)         when all rows of a group have ended and are scored, in any order of groups
take()                  the groups of the next batch, or none yet
more(count)             further groups in addition to the last batch, or none yet
give_up(group)          when a group in flight will not be completed

may a group begin under version v? ── yes ─> it is *due*: with batch (v + k + 1) c - 1 at the latest
complete groups ─ the earliest due first ─> batch b, trained by version b // c of the policy

A group is all rows of a prompt. Its version is the version of its oldest token. Weights are published after
every c batches. The age of the group in batch b is b // c - v.

``StalenessBound`` begins no group that could become too old. Let u(d) be the number of groups that are begun,
not trained and are due at d or earlier. Let b be the next batch and P the groups per batch. The invariant is

    u(d) <= (d + 1 - b) P      for every d >= b - 1

- Beginning keeps it: a group may begin only if the invariant, with the group counted, holds for every d from
  its due on.
- Forming batch b keeps it: batch b is formed only if the remaining groups fit into the later batches, u(d) <=
  (d - b) P for every d >= b. The earliest due of the complete groups are taken. This choice leaves the fewest
  groups for every d at once. If it does not fit, no choice does, and the batch waits.
- Giving up a group and taking more groups for a batch make u(d) smaller.
- d = b after forming gives u(b) = 0: no group due at b is left, so every later trained group is due later.
  Hence no group is trained in a batch after its due, of version v + k: its age is at most k.  (The bound.)
- It never stalls: if no group may begin under the newest weights, u(d) >= (d + 1 - b) P >= P for some d >= b,
  so P groups are in flight. Once all are complete, the earliest due leave u(d) - P <= (d - b) P behind.

``CapacityBound`` limits the mean, like AReaL's capacity. It begins groups while fewer than (k + v + 1) c P
are begun and not dropped, takes them as they complete, and drops those that became too old.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from fractions import Fraction
from typing import Generic, Protocol, TypeVar


class Versioned(Protocol):
    """A group, as far as the rule knows it."""

    @property
    def version(self) -> int:
        """Policy version of the group's oldest token; constant after ``begin``."""


GroupT = TypeVar("GroupT", bound=Versioned)


class StalenessBound(Generic[GroupT]):
    """Admission rule that begins no group that could become too old.

    Args:
        freshness: k, the bound.
        prompts: P, groups per batch.
        published: c, batches after which weights are published; 1 / n for n publishes within each batch.
    """

    drops = False
    """Whether groups that became too old are dropped."""

    def __init__(self, *, freshness: int, prompts: int, published: int | Fraction = 1) -> None:
        self.batch = 0
        """Number of the next batch, from 0."""
        self.dropped: list[GroupT] = []
        """Groups that no batch will take, in the order of detection; the caller may empty the list."""
        self.freshness = freshness
        """k, the bound."""
        self._prompts = prompts
        self._published = published
        self._begun: Counter[int] = Counter()
        self._ready: dict[int, deque[GroupT]] = defaultdict(deque)

    def restart(self, batch: int, begun: Iterable[GroupT], complete: Iterable[GroupT]) -> None:
        """Go on with the groups in flight of a run that something else decided so far."""
        self.batch = batch
        for group in begun:
            self.begin(group)
        for group in complete:
            self.complete(group)

    @property
    def version(self) -> int:
        """Version of the policy that trains the next batch, or its last rows."""
        return -(-(self.batch + 1) // self._published) - 1

    def least_version(self, newest: int) -> int:  # noqa: ARG002
        """Return the lowest version under which a group may begin, given the newest published version.

        This solves the invariant for the version: the due must come after the last full one.
        """
        full, counted = self.batch - 1, 0
        for room, due in enumerate(self._dues(), 1):
            counted += self._begun[due]
            if counted >= room * self._prompts:
                full = due
        return -(-(full + 2) // self._published) - self.freshness - 1

    def begin(self, group: GroupT) -> None:
        """Record that a group begins."""
        self._begun[self._due(group)] += 1

    def complete(self, group: GroupT) -> None:
        """Record that a group is complete and scored."""
        self._ready[self._due(group)].append(group)

    def give_up(self, group: GroupT) -> None:
        """Record that a begun group will never be complete."""
        self._begun[self._due(group)] -= 1

    def overdue(self, groups: Iterable[GroupT]) -> list[GroupT]:  # noqa: ARG002
        """Return the groups in flight that no batch will take; this rule never has any."""
        return []

    def more(self, count: int) -> list[GroupT]:
        """Return further groups for the last batch, earliest due first; none until ``count`` are complete."""
        if sum(map(len, self._ready.values())) < count:
            return []
        taken: list[GroupT] = []
        for due in self._dues():
            while self._ready[due] and len(taken) < count:
                taken.append(self._ready[due].popleft())
                self._begun[due] -= 1
        return taken

    def take(self) -> list[GroupT]:
        """Return the next batch, earliest due first, if the rest fits into later batches; else none."""
        taken, behind, left = Counter[int](), 0, self._prompts
        for room, due in enumerate(self._dues()):
            taken[due] = min(left, len(self._ready[due]))
            left -= taken[due]
            behind += self._begun[due] - taken[due]
            if behind > room * self._prompts:
                return []
        if left:
            return []
        self.batch += 1
        self._begun -= taken
        return [self._ready[due].popleft() for due, count in taken.items() for _ in range(count)]

    def _dues(self) -> range:
        """Return the batches at which groups in flight may be due."""
        return range(self.batch, max(self._begun, default=0) + 1)

    def _due(self, group: GroupT) -> int:
        return int((group.version + self.freshness + 1) * self._published) - 1


class CapacityBound(StalenessBound[GroupT]):
    """Admission rule that limits the number of begun groups and drops groups that become too old."""

    drops = True

    def __init__(self, *, freshness: int, prompts: int, published: int | Fraction = 1) -> None:
        super().__init__(freshness=freshness, prompts=prompts, published=published)
        self._alive = 0
        self._queue: deque[GroupT] = deque()

    def least_version(self, newest: int) -> int:
        """Return the lowest version not yet too old while fewer than (k + v + 1) c P live or were trained.

        Otherwise return ``newest`` + 1, under which no group can begin.
        """
        most = int((self.freshness + newest + 1) * self._published) * self._prompts
        if self._alive + self.batch * self._prompts >= most:
            return newest + 1
        return self.version - self.freshness

    def begin(self, group: GroupT) -> None:  # noqa: ARG002
        """Record that a group begins."""
        self._alive += 1

    def complete(self, group: GroupT) -> None:
        """Record that a group is complete and scored."""
        self._queue.append(group)

    def give_up(self, group: GroupT) -> None:  # noqa: ARG002
        """Record that a begun group will never be complete."""
        self._alive -= 1

    def overdue(self, groups: Iterable[GroupT]) -> list[GroupT]:
        """Return the groups in flight that are already too old for any batch."""
        return [group for group in groups if group.version < self.version - self.freshness]

    def take(self) -> list[GroupT]:
        """Return the next batch: the groups that completed first, with ages within the bound."""
        for group in self.overdue(self._queue):
            self._queue.remove(group)
            self.dropped.append(group)
            self.give_up(group)
        taken = self.more(self._prompts)
        self.batch += bool(taken)
        return taken

    def more(self, count: int) -> list[GroupT]:
        """Return further groups for the last batch; none until ``count`` are complete."""
        if len(self._queue) < count:
            return []
        self._alive -= count
        return [self._queue.popleft() for _ in range(count)]
