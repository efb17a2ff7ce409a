"""Delivery: a publish to samplers on ranks of their own, bucket by bucket, as references.

    policy.publish ─> digests ────────────────────────────────────────────────────────────────────┐
    each bucket: SentWeights.send ─> a packed tensor a receiver ─> ReceivedWeights.receive ─> serve ─> version

consumes      the result of ``policy.publish``
waits for     the receivers of a bucket once BUCKETS are on their way
unblocked by  those ranks; every wait ends at the deadline
produces      the version, once all samplers hold it and have compared its digests. No byte of a weight
              comes to the controller
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rillflow.dataflow.executor import GroupExecutor
from rillflow.roles.policy import Policy
from rillflow.roles.publishing import Links, ReceivedWeights, SentWeights
from rillflow.roles.sampler import Sampler
from rillflow.workers.pending import Pending, wait_for

BUCKETS = 2
"""How many buckets may be on their way at once."""


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

    def begin(self) -> None:
        """Publish what the policy was made with, under the version it has."""
        self(self._executor.on_all_ranks("policy", announce)).wait(self._deadline_s)
        self._executor.moved.clear()  # no step has begun

    def __call__(self, published: Pending) -> Pending:
        """Bring what was just published to the sampler's ranks; the version, once they serve it."""
        executor, on_their_way = self._executor, deque[list[Pending]]()
        digests = executor.on_first_rank("policy", weights_of, SentWeights.what_was_published)
        for bucket, links in enumerate(self._links):
            packed: dict[int, list[Pending]] = {}
            for sender, receivers in links.items():
                parts = executor.deal("policy", sender, len(receivers), send, bucket)
                for receiver, part in zip(receivers, parts, strict=True):
                    packed.setdefault(receiver, []).append(part)
            arriving = [
                executor.on_rank("sampler", rank - self._first, receive, bucket, *parts)
                for rank, parts in packed.items()
            ]
            on_their_way.append([*(part for parts in packed.values() for part in parts), *arriving])
            if len(on_their_way) == BUCKETS:
                self._arrived(published, on_their_way.popleft())
        while on_their_way:
            self._arrived(published, on_their_way.popleft())
        executor.moved["policy.digest"] = published.facts(self._deadline_s)
        return executor.on_all_ranks("sampler", weights_of, ReceivedWeights.serve, digests)

    def _arrived(self, published: Pending, bucket: list[Pending]) -> None:
        """Wait for a bucket, and keep what is known of it alone: its bytes may go."""
        wait_for([published, *bucket], self._deadline_s)
        for each in bucket:
            self._executor.moved.setdefault(each.stage, []).extend(each.facts(self._deadline_s))


def weights_of(role: Policy | Sampler, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a role's end of the way; as the role was made, it is of that method's class."""
    return method(role.weights, *arguments)


def announce(policy: Policy) -> None:
    """Take the digests of what the policy has now."""
    policy.weights.publish(policy.version)


def send(policy: Policy, bucket: int) -> Any:
    """One packed tensor for each rank this one has something for."""
    return weights_of(policy, SentWeights.send, bucket)


def receive(sampler: Sampler, bucket: int, *packed: Any) -> None:
    """Put packed tensors where they belong."""
    weights_of(sampler, ReceivedWeights.receive, bucket, *packed)
