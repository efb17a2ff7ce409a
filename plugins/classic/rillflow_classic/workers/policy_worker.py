"""Policy worker: acts for the actors of a run, with the newest weights.

    requests that have arrived ─> one batch ─> ActorPolicy.act ─> actions to each actor
                                                   ^ newest weights, before each batch

There is no fixed batch size: a batch is what has arrived while the last one was computed. So the batch grows
with the load, and a single request does not wait.

Loop of ``poll``
    consumes      requests of the lanes that ask this worker
    waits for     a request, at most PAUSE_S
    unblocked by  an actor, or the trainer's stop
    produces      actions
    shuts down    healthy: ``poll`` returns. Killed: after RETRY_S the actors ask the next worker, and the
                  replacement answers what was asked meanwhile
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rillflow_classic.policy import ActorPolicy
from rillflow_classic.streams.stream import ActingServer, ParameterReader, refresh
from rillflow_classic.workers.work_report import WorkMeter, WorkReport

PAUSE_S = 0.05
"""Longest wait for a request before the worker looks at the parameter stream."""


class PolicyWorker:
    """Policies, and the inference streams that they answer.

    Args:
        policies: policies by name.
        servers: inference stream of every policy.
        parameters: where newer weights come from; None: another owner changes the policies' weights.
    """

    def __init__(
        self,
        policies: Mapping[str, ActorPolicy],
        servers: Mapping[str, ActingServer],
        parameters: ParameterReader | None = None,
    ) -> None:
        self.policies, self._servers, self._parameters = policies, servers, parameters
        self._meter = WorkMeter("policy_worker")

    def poll(self, budget_s: float) -> WorkReport:
        """Answer requests for a while, or until the trainer stops all workers."""
        deadline = time.monotonic() + budget_s
        while not self._is_stopped:
            answered = self.answer()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not answered:
                self.wait(min(left, PAUSE_S))
        return self._meter.report()

    def wait(self, seconds: float) -> None:
        """Wait until a request has come, at most this long."""
        with self._meter.idle():
            for server in self._servers.values():
                server.wait(seconds / len(self._servers))

    def answer(self) -> int:
        """Answer all requests that have arrived; return the number of observations."""
        rows = 0
        for name, server in self._servers.items():
            requests = server.requests()
            if requests is None or not self._is_loaded():
                continue
            policy = self.policies[name]
            acted = policy.act(requests.observations, requests.state)
            server.answer(requests, acted, policy.version)
            self._meter.batches += 1
            rows += len(requests.observations)
        self._meter.rows += rows
        return rows

    def seed(self, seed: int) -> None:
        """Restart the random numbers of all policies."""
        for place, policy in enumerate(self.policies.values()):
            policy.seed(seed + place)

    @property
    def _is_stopped(self) -> bool:
        return self._parameters is not None and self._parameters.is_stopped

    def _is_loaded(self) -> bool:
        return self._parameters is None or refresh(self.policies, self._parameters)
