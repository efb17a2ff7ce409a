"""Policy worker: acts for the actors of a run, with the newest weights.

    requests that have arrived ─> one batch ─> ActorPolicy.act ─> actions to each actor
                                                   ^ newest weights, before each batch

There is no fixed batch size: a batch is what has arrived while the last one was computed. So the batch grows
with the load, and a single request does not wait. After RETRY_S the actors of a killed worker ask the next
one, and its replacement answers the requests that came meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from rillflow_classic.policy import ActorPolicy
from rillflow_classic.streams.streams import Streams
from rillflow_classic.workers.polling import PollingWorker


class PolicyWorker(PollingWorker):
    """Policies, and the inference streams that they answer.

    Args:
        policies: policies by name.
        streams: its end of the streams.
        refreshes: whether newer weights come from the streams; False: another owner changes the policies.
    """

    def __init__(
        self, policies: Mapping[str, ActorPolicy], streams: Streams, *, refreshes: bool = True
    ) -> None:
        super().__init__("policy_worker", streams)
        self.policies, self._ends, self._refreshes = policies, streams, refreshes

    def turn(self) -> bool:
        """Answer all requests that have arrived; return whether there were any."""
        before = self.report.batches
        for name, policy in self.policies.items():
            requests = self._ends.requests(name)
            if requests is None or (self._refreshes and not self._ends.refresh(self.policies)):
                continue
            acted = policy.act(requests.observations, requests.state)
            self._ends.answer(name, requests, acted, policy.version)
            self.report.batches += 1
            self.report.rows += len(requests.observations)
        return self.report.batches > before

    def reset(self, seed: int) -> None:
        """Restart the random numbers of all policies."""
        for place, policy in enumerate(self.policies.values()):
            policy.seed(seed + place)
