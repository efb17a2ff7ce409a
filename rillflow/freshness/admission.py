"""Admission: which groups may begin and which are trained, so that no trained token is older than k versions.

least_version(newest)   asked before a group begins: the least version that it may begin under
begin(group)            told as it begins; its version stays from then on
complete(group)         told when all its rows have ended and are scored, in any order of groups
take()                  asked for the next batch: its groups, or none yet
more(count)             asked for further groups beside the batch taken last, or none yet
give_up(group)          told that a group on its way will not be completed

may a group begin under version v? ── yes ─> it is *due*: with batch (v + k + 1) c - 1 at the latest
complete groups ─ the earliest due first ─> batch b, trained by version b // c of the policy

A group is all rows of a prompt; its version is that of its oldest token; weights are published after every c
batches; the group's age in batch b is b // c - v.

``HardBound`` lets nothing begin that could become too old. Write u(d) for the groups
begun, not trained and due at d or earlier, b for the next batch, P for the groups of one. The invariant is

    u(d) <= (d + 1 - b) P      for every d >= b - 1

- Beginning keeps it: a group may begin only if, counted in, it holds for every d from its own due on.
- Forming batch b keeps it: it is formed only if what stays behind fits into the batches after it,
  u(d) <= (d - b) P for every d >= b. Of the complete groups the earliest due are taken, which leaves the
  least behind for every d at once: if this choice does not do, none does, and the batch waits.
- Giving up a group and taking more beside a batch make u(d) smaller.
- d = b after forming says u(b) = 0: nothing due at b is left, so whatever is trained later is due later.
  Hence no group is trained in a batch after its due, of version v + k: its age is at most k.  (The bound.)
- It never stalls: if nothing may begin under the newest weights, u(d) >= (d + 1 - b) P >= P for some d >= b,
  so P groups are on their way; once all are complete the earliest due leave u(d) - P <= (d - b) P behind.

``MeanBound`` limits the mean alone, as AReaL's capacity does: it begins groups as long as fewer than
(k + v + 1) c P are begun and not dropped, takes them as they complete, and drops those that became too old.
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
        """The version of the policy that its oldest token is of; it stays from ``begin`` on."""


GroupT = TypeVar("GroupT", bound=Versioned)


class HardBound(Generic[GroupT]):
    """Nothing begins that could become too old.

    Args:
        freshness: k, the bound.
        prompts: P, groups of a batch.
        published: c, batches after which weights are published; 1 / n for n publishes within each.
    """

    def __init__(self, *, freshness: int, prompts: int, published: int | Fraction = 1) -> None:
        self.batch = 0
        """The number of the next batch, from 0."""
        self.dropped: list[GroupT] = []
        """Groups that no batch will take, in the order in which that was found; the caller may empty it."""
        self._freshness = freshness
        self._prompts = prompts
        self._published = published
        self._begun: Counter[int] = Counter()
        self._ready: dict[int, deque[GroupT]] = defaultdict(deque)

    @property
    def version(self) -> int:
        """Of the policy that trains the next batch, or the last rows of it."""
        return -(-(self.batch + 1) // self._published) - 1

    def least_version(self, newest: int) -> int:  # noqa: ARG002
        """The least version under which a group may begin now, where ``newest`` is the newest there is.

        The invariant, solved for the version: one after the last due that is full.
        """
        full, counted = self.batch - 1, 0
        for room, due in enumerate(self._dues(), 1):
            counted += self._begun[due]
            if counted >= room * self._prompts:
                full = due
        return -(-(full + 2) // self._published) - self._freshness - 1

    def begin(self, group: GroupT) -> None:
        """Note a group that begins."""
        self._begun[self._due(group)] += 1

    def complete(self, group: GroupT) -> None:
        """Note a group that is complete and scored."""
        self._ready[self._due(group)].append(group)

    def give_up(self, group: GroupT) -> None:
        """Note that a group which has begun will never be complete."""
        self._begun[self._due(group)] -= 1

    def overdue(self, groups: Iterable[GroupT]) -> list[GroupT]:  # noqa: ARG002
        """Those on their way that no batch will take; none ever."""
        return []

    def more(self, count: int) -> list[GroupT]:
        """Further groups beside the batch taken last, the earliest due first; none until all are there."""
        if sum(map(len, self._ready.values())) < count:
            return []
        taken: list[GroupT] = []
        for due in self._dues():
            while self._ready[due] and len(taken) < count:
                taken.append(self._ready[due].popleft())
                self._begun[due] -= 1
        return taken

    def take(self) -> list[GroupT]:
        """The next batch: the earliest due, if what stays behind fits into later ones; else none."""
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
        """The batches that groups on their way may be due with."""
        return range(self.batch, max(self._begun, default=0) + 1)

    def _due(self, group: GroupT) -> int:
        return int((group.version + self._freshness + 1) * self._published) - 1


class MeanBound(HardBound[GroupT]):
    """Groups begin by their number alone; those that have become too old are dropped whole."""

    def __init__(self, *, freshness: int, prompts: int, published: int | Fraction = 1) -> None:
        super().__init__(freshness=freshness, prompts=prompts, published=published)
        self._alive = 0
        self._queue: deque[GroupT] = deque()

    def least_version(self, newest: int) -> int:
        """Anything that is not too old already, while fewer than (k + v + 1) c P live or were trained."""
        most = int((self._freshness + newest + 1) * self._published) * self._prompts
        if self._alive + self.batch * self._prompts >= most:
            return newest + 1
        return self.version - self._freshness

    def begin(self, group: GroupT) -> None:  # noqa: ARG002
        """Note a group that begins."""
        self._alive += 1

    def complete(self, group: GroupT) -> None:
        """Note a group that is complete and scored."""
        self._queue.append(group)

    def give_up(self, group: GroupT) -> None:  # noqa: ARG002
        """Note that a group which has begun will never be complete."""
        self._alive -= 1

    def overdue(self, groups: Iterable[GroupT]) -> list[GroupT]:
        """Those on their way that no batch will take: they are too old already."""
        return [group for group in groups if group.version < self.version - self._freshness]

    def take(self) -> list[GroupT]:
        """Those that were complete first, of an age within the bound."""
        for group in self.overdue(self._queue):
            self._queue.remove(group)
            self.dropped.append(group)
            self.give_up(group)
        taken = self.more(self._prompts)
        self.batch += bool(taken)
        return taken

    def more(self, count: int) -> list[GroupT]:
        """Further groups beside the batch that was taken last; none until all are there."""
        if len(self._queue) < count:
            return []
        self._alive -= count
        return [self._queue.popleft() for _ in range(count)]
