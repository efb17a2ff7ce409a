"""Ranks: collectives among the ranks of one pool.

    part(groups)     the collectives of a subgroup: the ranks along one axis of a mesh
    sum_(tensors)    all-reduce; adds in the order of ranks, so that every rank, backend and run gets the
                     same bits, which a ring's order would not guarantee
    gather(tensor)   all-gather; first sizes may differ
    stack(tensor)    all-gather of tensors with one shape, in one collective instead of two

A sum runs bucket by bucket over all tensors; each bucket is cut into as many parts as there are ranks:

    tensors ── one bucket ──> given ─ all_to_all ─> received ─ add own part of all ranks ─┐
       ^──────────────────────── given <───────── all_gather <────────────────────────────┘

Each rank sends 2 (p - 1) / p of the bytes, like a ring, and needs memory for two buckets. For a small sum,
latency exceeds transfer time, so every rank gathers everything and adds it: one collective, the same
additions. Between processes, ``summing`` runs a sum one collective at a time, so that other work can run
during each collective.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from rillflow.errors import ClusterError
from rillflow.workers.peer_connections import NewSockets, PeerConnections

SMALL = 2**17
"""Largest number of elements that a rank receives for a sum in one collective."""
BUCKET_BYTES = 2**26
"""Bucket size in bytes of a larger sum."""


class Stranded(ClusterError):
    """A rank cannot continue without another one; the other one's failure, if there is one, is the cause."""


def is_broken_collective(error: BaseException) -> bool:
    """Return whether an error is torch's form of a collective that another rank has left."""
    is_torch = isinstance(error, RuntimeError) and re.search(r"gloo|NCCL|c10d|socket", str(error)) is not None
    return is_torch or isinstance(error, dist.DistError)


class Ranks(Protocol):
    """This rank and its collectives with the others of its pool."""

    rank: int
    """Index of this rank, from 0."""
    size: int
    """Number of ranks."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all ranks; shapes and types are equal on all ranks."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in order; first sizes may differ."""

    def stack(self, tensor: Tensor) -> Tensor:
        """Return [ranks, ...] every rank's tensor, in order; shapes and types are equal on all ranks."""

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Return this rank within its own subgroup.

        Args:
            groups: disjoint subgroups that cover all ranks. Every rank must pass the same groups.
        """


class SingleRank:
    """A single rank, whose collectives return their input."""

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
    """The state that the threads of one pool share.

    Args:
        size: number of threads.
        deadline_s: longest wait of a thread for the others.
    """

    def __init__(self, size: int, deadline_s: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=deadline_s)
        self.given: list[list[Tensor]] = [[] for _ in range(size)]
        self._deadline_s = deadline_s
        self._parts: dict[tuple[int, ...], ThreadGroup] = {}
        self._parting = threading.Lock()

    def part(self, group: tuple[int, ...]) -> ThreadGroup:
        """Return the shared state of a subgroup, the same object for all its threads."""
        with self._parting:
            if group not in self._parts:
                self._parts[group] = ThreadGroup(len(group), self._deadline_s)
            return self._parts[group]

    def abort(self) -> None:
        """Abort all waits, here and in subgroups."""
        self.barrier.abort()
        with self._parting:
            parts = list(self._parts.values())
        for part in parts:
            part.abort()

    def mend(self) -> None:
        """Let the threads use collectives again, once none of them runs a call."""
        self.barrier.reset()
        for part in self._parts.values():
            part.mend()


class ThreadRanks:
    """A rank that is a thread of this process.

    Args:
        group: state shared with the others.
        rank: index of this rank.
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
                why="one of them failed, or ranks of the group took different branches of a method",
            ) from None


class ProcessRanks:
    """A rank that is a process of a torch.distributed group.

    Args:
        group: the process group; its ranks are the processes in ascending order.
        members: the processes of the group.
        deadline_s: longest wait of a collective for a missing rank.
        connections: this process's connections to the others of its world.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        deadline_s: float,
        connections: PeerConnections,
    ) -> None:
        self.group = group
        """Process group for direct calls of torch.distributed."""
        self._deadline_s, self._connections = deadline_s, connections
        self._parts = list[tuple[Sequence[Sequence[int]], ProcessRanks | None]]()
        self.members = tuple(members)
        self.rank = self.members.index(dist.get_rank())
        self.size = len(self.members)

    @staticmethod
    def join(rank: int, size: int, store: Store, backend: str = "gloo", *, deadline_s: float) -> ProcessRanks:
        """Join the other processes of a pool.

        Args:
            rank: index of this process.
            size: number of processes.
            store: a new store where they find each other.
            backend: backend of torch.distributed; ``cpu:gloo,cuda:nccl`` for tensors on either device.
            deadline_s: longest wait of a collective, of all ranks or of a subgroup, for one of them.
        """
        connections = PeerConnections()
        world = _world(connections, backend, store, rank, size, deadline_s)
        return ProcessRanks(world, range(size), deadline_s, connections)

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """See Ranks; every process makes every group, as torch.distributed requires."""
        found, own = self._made(groups), _own(groups, self.rank)
        if found is None:
            self._parts.append((groups, None))
            return SingleRank()
        members = [self.members[rank] for rank in own]
        ranks = ProcessRanks(found, members, self._deadline_s, self._connections)
        self._parts.append((groups, ranks))
        return ranks

    def _made(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make process groups; return this rank's, or None if the rank is alone."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        with self._connections.growing() as sockets:
            for group in map(sorted, groups):
                members = [self.members[rank] for rank in group]
                timeout = timedelta(seconds=self._deadline_s)
                found = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
                if found is not None:
                    made[tuple(group)] = found
        own = made.get(_own(groups, self.rank))
        if own is not None:
            self._connections.keep(sockets, _listening(sockets, own))
        return own

    @property
    def is_broken(self) -> bool:
        """Whether this process has left its collectives."""
        return self._connections.is_broken

    def abort(self) -> None:
        """Leave all collectives: those that wait for this rank fail on the others, and later ones here."""
        self._connections.shut()

    def mend(self, backend: str, store: Store) -> None:
        """Connect the world and its subgroups again; every rank of the world calls it on the world.

        Groups of this class work afterwards. FSDP, DTensor and pipelines keep their broken ones: state can be
        saved, and no pass can run.

        Args:
            backend: see ``join``.
            store: a new store where the processes find each other.
        """
        dist.destroy_process_group()
        self._connections.is_broken = False
        self.group = _world(self._connections, backend, store, self.rank, self.size, self._deadline_s)
        self._mend_parts()

    def _mend_parts(self) -> None:
        for groups, part in self._parts:
            found = self._made(groups)
            if part is not None and found is not None:
                part.group = found
                part._mend_parts()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """See Ranks."""
        for _ in self.summing(tensors):
            pass

    def summing(self, tensors: Sequence[Tensor]) -> Iterator[dist.Work]:
        """Run the same sum one collective at a time: start it, yield it, wait for it when resumed.

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
        """Replace tensors [N] with ``length`` elements in total by their sums, bucket by bucket."""
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


def _world(
    connections: PeerConnections, backend: str, store: Store, rank: int, size: int, deadline_s: float
) -> dist.ProcessGroup:
    """Return the process group of all processes; see ``ProcessRanks.join``."""
    timeout = timedelta(seconds=deadline_s)
    with connections.growing() as sockets:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    assert dist.group.WORLD is not None  # it has just been made
    connections.keep(sockets, _listening(sockets, dist.group.WORLD))
    return dist.group.WORLD


def _listening(sockets: NewSockets, group: dist.ProcessGroup) -> list[int]:
    """Return the ports that the processes of a new group listen on."""
    own = torch.tensor(sockets.listening)
    found = own.new_empty(group.size(), len(own))
    dist.all_gather(list(found.unbind()), own, group=group)
    return [int(port) for port in found.flatten()]


def _own(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """Return the group of a rank."""
    return next(tuple(sorted(group)) for group in groups if rank in group)


def _waited(work: dist.Work | None) -> Iterator[dist.Work]:
    """Yield a collective in flight, then wait for it."""
    assert work is not None  # this rank is in the group
    yield work
    work.wait()


def _added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in the given order, in a new tensor."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _over(flat: Sequence[Tensor], buffer: Tensor, bucket: slice, *, back: bool) -> None:
    """Copy the bucket's elements of the concatenated tensors into a buffer, or ``back`` from it."""
    start = 0
    for tensor in flat:
        first, last = max(bucket.start, start), min(bucket.stop, start + len(tensor))
        if first < last:
            here = tensor[first - start : last - start]
            there = buffer[first - bucket.start : last - bucket.start]
            (here if back else there).copy_(there if back else here)
        start += len(tensor)
