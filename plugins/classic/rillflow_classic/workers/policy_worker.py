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
from dataclasses import dataclass

from rillflow_classic.policy import ActorPolicy
from rillflow_classic.streams.stream import ActingServer, ParameterReader, refresh

PAUSE_S = 0.05
"""Longest wait for a request before the worker looks at the parameter stream."""


@dataclass(frozen=True, kw_only=True)
class PolicyReport:
    """What a policy worker did since its last report."""

    batches: int
    """Batches that it computed."""
    rows: int
    """Observations in them."""
    idle_s: float
    """Seconds without a request."""
    elapsed_s: float
    """Seconds since the last report."""


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
        self._batches = self._rows = 0
        self._idle_s, self._reported = 0.0, time.perf_counter()

    def poll(self, budget_s: float) -> PolicyReport:
        """Answer requests for a while, or until the trainer stops all workers."""
        deadline = time.monotonic() + budget_s
        while not self._is_stopped:
            answered = self.answer()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not answered:
                self.wait(min(left, PAUSE_S))
        return self.report()

    def wait(self, seconds: float) -> None:
        """Wait until a request has come, at most this long."""
        began = time.perf_counter()
        for server in self._servers.values():
            server.wait(seconds / len(self._servers))
        self._idle_s += time.perf_counter() - began

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
            self._batches += 1
            rows += len(requests.observations)
        self._rows += rows
        return rows

    def seed(self, seed: int) -> None:
        """Restart the random numbers of all policies."""
        for place, policy in enumerate(self.policies.values()):
            policy.seed(seed + place)

    def report(self) -> PolicyReport:
        """Return what was done since the last report."""
        now = time.perf_counter()
        made = PolicyReport(
            batches=self._batches, rows=self._rows, idle_s=self._idle_s, elapsed_s=now - self._reported
        )
        self._batches = self._rows = 0
        self._idle_s, self._reported = 0.0, now
        return made

    @property
    def _is_stopped(self) -> bool:
        return self._parameters is not None and self._parameters.is_stopped

    def _is_loaded(self) -> bool:
        return self._parameters is None or refresh(self.policies, self._parameters)
