"""Delivery: a publish to samplers on ranks of their own, bucket by bucket, as references.

    policy.publish ─> digests ────────────────────────────────────────────────────────────────────┐
    each bucket: SentWeights.send ─> a packed tensor a receiver ─> ReceivedWeights.receive ─> serve ─> version

In step a bucket is received as soon as it is sent, and few are on their way at once. Ahead of it the sampler
has steps to sample first: all buckets of a version are packed beside the weights, which train on, and wait
as a ``Parcel`` until the step that samples with them begins.

consumes      the result of ``policy.publish``
waits for     in step, the receivers of a bucket once BUCKETS are on their way; ahead, nobody
unblocked by  those ranks; every wait ends at the deadline
produces      the version, once all samplers hold it and have compared its digests. No byte of a weight
              comes to the controller
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.dataflow.executor import GroupExecutor
from rillflow.errors import ClusterError
from rillflow.roles.policy import Policy
from rillflow.roles.publishing import Links, ReceivedWeights, SentWeights
from rillflow.roles.sampler import Sampler
from rillflow.workers.pending import Pending, wait_for

BUCKETS = 2
"""How many buckets may be on their way at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parcel:
    """A version that is packed and has not been received."""

    digests: Pending
    """Its digests."""
    buckets: Sequence[Mapping[int, Sequence[Pending]]]
    """Of every bucket, what each receiver gets."""

    @property
    def late(self) -> list[Pending]:
        """What has not been packed of it."""
        packed = (each for bucket in self.buckets for parts in bucket.values() for each in parts)
        return [each for each in (self.digests, *packed) if not each.is_ready]


class Delivery:
    """The weights of one policy, on their way to one sampler.

    Args:
        executor: has the groups of both.
        deadline_s: longest wait for any rank.
    """

    def __init__(self, executor: GroupExecutor, deadline_s: float) -> None:
        self._executor, self._deadline_s = executor, deadline_s
        source = executor.on_first_rank("policy", weights_of, SentWeights.lie)
        plan = executor.on_first_rank("sampler", weights_of, ReceivedWeights.plan, source)
        ends = {"policy": SentWeights.connect, "sampler": ReceivedWeights.connect}
        made = [executor.on_all_ranks(role, weights_of, connect, plan) for role, connect in ends.items()]
        wait_for(made, deadline_s)
        self._links: Links = made[0].read(deadline_s)
        self._first = len(executor.groups["policy"].places)
        self._is_ahead = False
        self._parcels: list[Parcel] = []

    def begin(self, *, is_ahead: bool) -> None:
        """Publish what the policy has, under the version it has; what follows is in step, or ahead of it."""
        self._is_ahead = False
        self(self._executor.on_all_ranks("policy", announce)).wait(self._deadline_s)
        self._is_ahead = is_ahead
        self._executor.moved.clear()  # no step has begun

    def __call__(self, published: Pending) -> Pending:
        """Bring what was just published to the sampler's ranks, or pack it for them; its version.

        Where a receiver has died, its failed result stands for the version: the step goes on to its end, so
        that the trained roles can be saved, and fails when its results are read.
        """
        executor, on_their_way = self._executor, deque[list[Pending]]()
        digests = executor.on_first_rank("policy", weights_of, SentWeights.what_was_published)
        if self._is_ahead:
            buckets = [self._sent(bucket) for bucket in range(len(self._links))]
            self._parcels.append(Parcel(digests=digests, buckets=buckets))
            return published
        try:
            for bucket in range(len(self._links)):
                on_their_way.append(self._received(bucket, self._sent(bucket)))
                if len(on_their_way) == BUCKETS:
                    self.arrived(on_their_way[0], [published])
                    on_their_way.popleft()
            while on_their_way:
                self.arrived(on_their_way[0], [published])
                on_their_way.popleft()
        except ClusterError:
            if failed := [each for part in on_their_way for each in part if each.has_failed]:
                return failed[0]
            raise
        executor.moved["policy.digest"] = [*published.facts(self._deadline_s), *published.beside]
        return executor.on_all_ranks("sampler", serve, digests)

    def take(self) -> list[Parcel]:
        """What was published ahead of the steps that sample with it, and not taken yet."""
        parcels, self._parcels = self._parcels, []
        return parcels

    def install(self, parcel: Parcel, ranks: Sequence[int] | None = None) -> list[Pending]:
        """Have the sampler, or one of its replicas, receive a parcel after what it was given before.

        Returns:
            What is to be waited for.
        """
        ranks = range(len(self._executor.groups["sampler"].places)) if ranks is None else ranks
        moved = list[Pending]()
        for bucket, packed in enumerate(parcel.buckets):
            own = {rank: parts for rank, parts in packed.items() if rank - self._first in ranks}
            moved += self._received(bucket, own)
        return [self._executor.on_ranks("sampler", ranks, serve, parcel.digests), *moved]

    def arrived(self, moved: Sequence[Pending], beside: Sequence[Pending] = ()) -> None:
        """Wait for what crosses, and for more; keep what is known of the former alone: its bytes may go."""
        wait_for([*beside, *moved], self._deadline_s)
        for each in moved:
            self._executor.moved.setdefault(each.stage, []).extend(each.facts(self._deadline_s))

    def _sent(self, bucket: int) -> dict[int, list[Pending]]:
        """Have a bucket packed; what each receiver gets, in the order of the links."""
        packed: dict[int, list[Pending]] = {}
        for sender, receivers in self._links[bucket].items():
            parts = self._executor.deal("policy", sender, len(receivers), send, bucket)
            for receiver, part in zip(receivers, parts, strict=True):
                packed.setdefault(receiver, []).append(part)
        return packed

    def _received(self, bucket: int, packed: Mapping[int, Sequence[Pending]]) -> list[Pending]:
        """Have a bucket received; what was packed, and its receivers."""
        arriving = [
            self._executor.on_rank("sampler", rank - self._first, receive, bucket, *parts)
            for rank, parts in packed.items()
        ]
        return [*(part for parts in packed.values() for part in parts), *arriving]


def weights_of(role: Policy | Sampler, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a role's end of the way; as the role was made, it is of that method's class."""
    return method(role.weights, *arguments)


def announce(policy: Policy) -> None:
    """Take the digests of what the policy has now."""
    policy.announce()


def send(policy: Policy, bucket: int) -> Any:
    """One packed tensor for each rank this one has something for."""
    return weights_of(policy, SentWeights.send, bucket)


def receive(sampler: Sampler, bucket: int, *packed: Any) -> None:
    """Put packed tensors where they belong."""
    weights_of(sampler, ReceivedWeights.receive, bucket, *packed)


def serve(sampler: Sampler, digests: Any) -> Any:
    """Let what was received be sampled with, once its digests match; the version."""
    return weights_of(sampler, ReceivedWeights.serve, digests)
