"""Ranks: collectives among the ranks of one pool.

    part(groups)     the same among some of them: the ranks along one axis of a mesh
    sum_(tensors)    every rank has the sum of all, added in the order of ranks: the same bits on every
                     rank, in every backend and every time, which a ring's order would not promise
    gather(tensor)   every rank has everyone's
    stack(tensor)    the same where all have one shape: one collective instead of two

A sum goes bucket by bucket, whatever lies in it; a bucket is cut into as many parts as there are ranks:

    tensors ── a bucket's worth ──> given ─ all_to_all ─> received ─ own part of everyone's, added ─┐
       ^──────────────────────────── given <──────────── all_gather <───────────────────────────────┘

So 2 (p - 1) / p of the bytes cross, as a ring needs, and two buckets are all the memory it takes. Of a small
sum, where the collectives take longer than their bytes, every rank gets everything and adds it up: one
collective, the same additions. Between processes a sum may be made a collective at a time (``summing``), with
other work while each is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from rillflow.errors import ClusterError

SMALL = 2**17
"""Elements that a rank receives for a sum at most, for the sum to be made in one collective."""
BUCKET_BYTES = 2**26
"""What is summed at once of a sum that is not small."""


class Stranded(ClusterError):
    """A rank could not go on without another one, whose own failure is the cause where there is one."""


class Ranks(Protocol):
    """This rank among those of its pool."""

    rank: int
    """Which one, from 0."""
    size: int
    """How many there are."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all ranks; shapes and types are the same on all."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in order; first sizes may differ."""

    def stack(self, tensor: Tensor) -> Tensor:
        """[ranks, ...] every rank's tensor, in order; shapes and types are the same on all."""

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """This rank among those of its own group.

        Args:
            groups: ranks among these; disjoint, together all of them. Every rank calls it with the same.
        """


class SingleRank:
    """One rank: nothing to add, nobody to hear from."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """See Ranks."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See Ranks."""
        return [tensor]

    def stack(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        return tensor[None]

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """See Ranks."""
        del groups
        return self


class ThreadGroup:
    """What the threads of one pool share.

    Args:
        size: threads.
        deadline_s: how long one waits for the others.
    """

    def __init__(self, size: int, deadline_s: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=deadline_s)
        self.given: list[list[Tensor]] = [[] for _ in range(size)]
        self._deadline_s = deadline_s
        self._parts: dict[tuple[int, ...], ThreadGroup] = {}
        self._parting = threading.Lock()

    def part(self, group: tuple[int, ...]) -> ThreadGroup:
        """What some of the threads share; the same for all of them."""
        with self._parting:
            if group not in self._parts:
                self._parts[group] = ThreadGroup(len(group), self._deadline_s)
            return self._parts[group]

    def abort(self) -> None:
        """Let nobody wait any longer, here or in a part."""
        self.barrier.abort()
        with self._parting:
            parts = list(self._parts.values())
        for part in parts:
            part.abort()

    def mend(self) -> None:
        """Let them meet again, once none of them is in a call."""
        self.barrier.reset()
        for part in self._parts.values():
            part.mend()


class ThreadRanks:
    """A rank that is a thread of this process.

    Args:
        group: shared with the others.
        rank: which one this is.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """See Ranks."""
        everyone = self._exchange(list(tensors))
        sums = [_added([theirs[index] for theirs in everyone]) for index in range(len(tensors))]
        self._meet()  # nobody writes before all have read
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See Ranks."""
        found = [theirs[0].clone() for theirs in self._exchange([tensor])]
        self._meet()
        return found

    def stack(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        return torch.stack(self.gather(tensor))

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """See Ranks."""
        group = _own(groups, self.rank)
        return ThreadRanks(self._group.part(group), group.index(self.rank))

    def _exchange(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        self._group.given[self.rank] = tensors
        self._meet()
        return list(self._group.given)

    def _meet(self) -> None:
        try:
            self._group.barrier.wait()
        except threading.BrokenBarrierError:
            raise Stranded(
                f"rank {self.rank} of {self.size} waits in a collective for ranks that do not come",
                why="one of them failed, or the ranks of a group took different ways through a method",
            ) from None


class ProcessRanks:
    """A rank that is a process of a torch.distributed group.

    Args:
        group: the group; its ranks are the processes' in ascending order.
        members: the processes in it.
        deadline_s: how long a collective waits for a rank that does not come.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], deadline_s: float) -> None:
        self.group = group
        """For what torch.distributed does itself."""
        self._deadline_s = deadline_s
        self.members = tuple(members)
        self.rank = self.members.index(dist.get_rank())
        self.size = len(self.members)

    @staticmethod
    def join(
        rank: int, size: int, store: Store, backend: str = "gloo", deadline_s: float = 3600.0
    ) -> ProcessRanks:
        """Join the other processes of a pool.

        Args:
            rank: which one this is.
            size: how many there are.
            store: where they find each other; new.
            backend: of torch.distributed; ``cpu:gloo,cuda:nccl`` where tensors are on either.
            deadline_s: how long a collective of these ranks, or of a part of them, waits for one of them.
        """
        timeout = timedelta(seconds=deadline_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        assert dist.group.WORLD is not None  # it has just been made
        return ProcessRanks(dist.group.WORLD, range(size), deadline_s)

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """See Ranks; every process makes every group, as torch.distributed asks."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in map(sorted, groups):
            members = [self.members[rank] for rank in group]
            timeout = timedelta(seconds=self._deadline_s)
            found = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
            if found is not None:
                made[tuple(group)] = found
        own = _own(groups, self.rank)
        if len(own) == 1:
            return SingleRank()
        return ProcessRanks(made[own], [self.members[rank] for rank in own], self._deadline_s)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """See Ranks."""
        for _ in self.summing(tensors):
            pass

    def summing(self, tensors: Sequence[Tensor]) -> Iterator[dist.Work]:
        """The same sum, a collective at a time: begun, given, and waited for when the next is asked for.

        No other sum of these ranks may begin before the iterator ends.
        """
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = [tensor.contiguous().view(-1) for tensor in alike]
            length = sum(map(len, flat))
            if length * self.size <= SMALL:
                everyones = [flat[0].new_empty(length) for _ in range(self.size)]
                work = dist.all_gather(everyones, torch.cat(flat), group=self.group, async_op=True)
                yield from _waited(work)
                _over(flat, _added(everyones), slice(0, length), back=True)
            else:
                yield from self._sum_by_buckets(flat, length)
            for tensor, sums in zip(alike, flat, strict=True):
                if not tensor.is_contiguous():
                    tensor.copy_(sums.view_as(tensor))

    def _sum_by_buckets(self, flat: Sequence[Tensor], length: int) -> Iterator[dist.Work]:
        """Replace tensors [N] of ``length`` elements in all by their sums, a bucket at a time."""
        share = -(-min(length, BUCKET_BYTES // flat[0].element_size()) // self.size)
        buffers = flat[0].new_zeros(2, self.size, share)
        for start in range(0, length, self.size * share):
            bucket = slice(start, min(length, start + self.size * share))
            given, received = buffers
            _over(flat, given.view(-1), bucket, back=False)
            work = dist.all_to_all_single(received, given, group=self.group, async_op=True)
            yield from _waited(work)
            for theirs in received[1:]:
                received[0] += theirs
            work = dist.all_gather(list(given.unbind()), received[0], group=self.group, async_op=True)
            yield from _waited(work)
            _over(flat, given.view(-1), bucket, back=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See Ranks."""
        lengths = self.stack(torch.tensor(tensor.shape[0], device=tensor.device)).tolist()
        filled = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        filled[: tensor.shape[0]] = tensor
        return [each[:count] for each, count in zip(self.stack(filled), lengths, strict=True)]

    def stack(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        found = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(found.unbind()), tensor.contiguous(), group=self.group)
        return found


def _own(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """The group of a rank."""
    return next(tuple(sorted(group)) for group in groups if rank in group)


def _waited(work: dist.Work | None) -> Iterator[dist.Work]:
    """A collective that was begun, then waited for."""
    assert work is not None  # this rank is of the group
    yield work
    work.wait()


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, into a new tensor."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _over(flat: Sequence[Tensor], buffer: Tensor, bucket: slice, *, back: bool) -> None:
    """Copy the bucket's elements of tensors that lie end to end into a buffer, or ``back`` from there."""
    start = 0
    for tensor in flat:
        first, last = max(bucket.start, start), min(bucket.stop, start + len(tensor))
        if first < last:
            here = tensor[first - start : last - start]
            there = buffer[first - bucket.start : last - bucket.start]
            (here if back else there).copy_(there if back else here)
        start += len(tensor)
