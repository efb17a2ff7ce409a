"""WeightSync: transfer a publish to samplers on their own ranks, bucket by bucket, as references.

    policy.publish ─> digests ─────────────────────────────────────────────────────────────────┐
    bucket: SentWeights.send ─> a packed tensor per receiver ─> ReceivedWeights.receive ─> serve ─> version

In lockstep mode, a bucket is received as soon as it is sent, and few buckets are in flight at once. In ahead
mode, the sampler first has earlier steps to sample. All buckets of a version are then packed into copies
while training continues, and wait as a ``PackedWeights`` until the step that samples with them begins.

consumes      the result of ``policy.publish``
waits for     in lockstep, the receivers of a bucket once BUCKETS are in flight; ahead, nothing
unblocked by  those ranks; every wait ends at the deadline
produces      the version, once all samplers hold it and have verified its digests. No weight byte passes
              through the controller
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.controller.executor import GroupExecutor
from rillflow.errors import ClusterError
from rillflow.roles.policy import Policy
from rillflow.roles.publishing import Links, ReceivedWeights, SentWeights
from rillflow.roles.sampler import Sampler
from rillflow.workers.arguments import Facts
from rillflow.workers.pending import Pending, wait_for

BUCKETS = 2
"""Largest number of buckets in flight at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights:
    """A version that is packed and not received yet."""

    digests: Pending
    """Digests of the version."""
    buckets: Sequence[Mapping[int, Sequence[Pending]]]
    """Packed tensors of every bucket, by receiver."""

    @property
    def late(self) -> list[Pending]:
        """Results that are not packed yet."""
        packed = (each for bucket in self.buckets for parts in bucket.values() for each in parts)
        return [each for each in (self.digests, *packed) if not each.is_ready]


class WeightSync:
    """Transfer of one policy's weights to one sampler.

    Args:
        executor: has the groups of both.
        deadline_s: longest wait for any rank.
    """

    def __init__(self, executor: GroupExecutor, deadline_s: float) -> None:
        self._executor, self._deadline_s = executor, deadline_s
        source = executor.on_first_rank("policy", weights_of, SentWeights.lie)
        plan = executor.on_first_rank("sampler", weights_of, ReceivedWeights.plan, source)
        ends = {"policy": SentWeights.connect, "sampler": ReceivedWeights.connect}
        self._plan = plan
        self.initial: PackedWeights | None = None
        """The version with which the phase began, packed; None if nobody needs it."""
        made = [executor.on_all_ranks(role, weights_of, connect, plan) for role, connect in ends.items()]
        wait_for(made, deadline_s)
        self._links: Links = made[0].read(deadline_s)
        self._first = len(executor.groups["policy"].places)
        self._is_ahead = False
        self._parcels: list[PackedWeights] = []
        self._moved: dict[str, list[Facts]] = {}

    def begin(self, *, is_ahead: bool, keeps_initial: bool = False) -> None:
        """Publish the policy's current weights and version; later publishes are in lockstep or ahead.

        Args:
            is_ahead: whether later publishes are packed for later steps.
            keeps_initial: whether the version stays packed, as ``initial``, for replicas that are replaced.
        """
        published = self._executor.on_all_ranks("policy", announce)
        self._is_ahead, self.initial = keeps_initial, None
        if keeps_initial:
            self(published)
            (self.initial,) = self.take()
            self.arrived(self.install(self.initial), [published])
        else:
            self(published).wait(self._deadline_s)
        self._is_ahead = is_ahead
        self._moved.clear()  # no step has begun

    def __call__(self, published: Pending) -> Pending:
        """Bring the last publish to the sampler's ranks, or pack it for them; return its version.

        If a receiver has died, return its failed result instead of the version. The step then runs to its
        end, so that the trained roles can be saved, and fails when its results are read.
        """
        executor, on_their_way = self._executor, deque[list[Pending]]()
        digests = executor.on_first_rank("policy", weights_of, SentWeights.what_was_published)
        if self._is_ahead:
            buckets = [self._sent(bucket) for bucket in range(len(self._links))]
            self._parcels.append(PackedWeights(digests=digests, buckets=buckets))
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
        self._moved["policy.digest"] = [*published.facts(self._deadline_s), *published.beside]
        return executor.on_all_ranks("sampler", serve, digests)

    def connect(self, ranks: Sequence[int]) -> Pending:
        """Have ranks of the sampler whose processes are new prepare for transfers."""
        how = (weights_of, ReceivedWeights.connect, self._plan)
        return self._executor.on_ranks("sampler", ranks, *how)

    def take(self) -> list[PackedWeights]:
        """Return the parcels published ahead that were not taken yet."""
        parcels, self._parcels = self._parcels, []
        return parcels

    def moved(self) -> dict[str, list[Facts]]:
        """Return the facts of the transfers since the last call, by stage."""
        moved, self._moved = self._moved, {}
        return moved

    def install(self, parcel: PackedWeights, ranks: Sequence[int] | None = None) -> list[Pending]:
        """Have the sampler, or one of its replicas, receive a parcel after its earlier calls.

        Returns:
            The results to wait for.
        """
        ranks = range(len(self._executor.groups["sampler"].places)) if ranks is None else ranks
        moved = list[Pending]()
        for bucket, packed in enumerate(parcel.buckets):
            own = {rank: parts for rank, parts in packed.items() if rank - self._first in ranks}
            moved += self._received(bucket, own)
        return [self._executor.on_ranks("sampler", ranks, serve, parcel.digests), *moved]

    def arrived(self, moved: Sequence[Pending], beside: Sequence[Pending] = ()) -> None:
        """Wait for transfers and other results; keep only the facts of the transfers to free their bytes."""
        wait_for([*beside, *moved], self._deadline_s)
        for each in moved:
            self._moved.setdefault(each.stage, []).extend(each.facts(self._deadline_s))

    def _sent(self, bucket: int) -> dict[int, list[Pending]]:
        """Have a bucket packed; return the packed tensors of each receiver, in the order of the links."""
        packed: dict[int, list[Pending]] = {}
        for sender, receivers in self._links[bucket].items():
            parts = self._executor.deal("policy", sender, len(receivers), send, bucket)
            for receiver, part in zip(receivers, parts, strict=True):
                packed.setdefault(receiver, []).append(part)
        return packed

    def _received(self, bucket: int, packed: Mapping[int, Sequence[Pending]]) -> list[Pending]:
        """Have a bucket received; return the packed tensors and the results of the receivers."""
        arriving = [
            self._executor.on_rank("sampler", rank - self._first, receive, bucket, *parts)
            for rank, parts in packed.items()
        ]
        return [*(part for parts in packed.values() for part in parts), *arriving]


def weights_of(role: Policy | Sampler, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a role's weights, which must be an instance of that method's class."""
    return method(role.weights, *arguments)


def announce(policy: Policy) -> None:
    """Compute the digests of the policy's current weights."""
    policy.announce()


def send(policy: Policy, bucket: int) -> Any:
    """Return one packed tensor for each rank that this rank sends to."""
    return weights_of(policy, SentWeights.send, bucket)


def receive(sampler: Sampler, bucket: int, *packed: Any) -> None:
    """Copy packed tensors into the sampler's weights."""
    weights_of(sampler, ReceivedWeights.receive, bucket, *packed)


def serve(sampler: Sampler, digests: Any) -> Any:
    """Let the sampler use the received weights once their digests match; return the version."""
    return weights_of(sampler, ReceivedWeights.serve, digests)
