"""Parts of the stream benchmarks: environments and policies of a chosen duration, and workers on a core.

A duration is on the wall clock: an environment is busy until it is over, a policy sleeps, as a process does
that waits for an accelerator. So other work on the machine changes the figures little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch

from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import Stepped, VectorEnvironment
from rillflow_classic.fragment import Array
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.build import build_network
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.policy import Acted, ActorPolicy, Weights
from rillflow_classic.streams.layout import layout_of, record_of
from rillflow_classic.streams.streams import Streams, StreamSpec
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.policy_worker import PolicyWorker

TRANSPORTS = ("inline", "shared_memory", "tcp")


class BusyEnvironment:
    """Slots whose common step takes a chosen time."""

    def __init__(self, num_slots: int, size: int, step_s: float) -> None:
        self.num_slots, self._step_s = num_slots, step_s
        self.agents = ("",) * num_slots
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.absent = flags = np.zeros(num_slots, np.bool_)
        self._stepped = Stepped(
            observations=np.zeros((num_slots, size), np.float32),
            rewards=np.zeros(num_slots, np.float32),
            terminated=flags,
            truncated=flags,
        )

    def reset(self, seed: int) -> Array:
        del seed
        return self._stepped.observations

    def step(self, actions: Array) -> Stepped:
        del actions
        end = time.perf_counter() + self._step_s
        while time.perf_counter() < end:
            pass
        return self._stepped

    def close(self) -> None:
        """End nothing."""


class SleepyPolicy:
    """A policy that takes a chosen time for a batch of any size."""

    version = -1

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s

    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        del state, greedy
        if self._batch_s:
            time.sleep(self._batch_s)
        return Acted(actions=np.zeros(len(observations), np.int64))

    def initial_state(self, num_slots: int) -> None:
        del num_slots

    def seed(self, seed: int) -> None:
        del seed

    def load(self, version: int, weights: Weights) -> None:
        del weights
        self.version = version


@dataclass(frozen=True, kw_only=True)
class StreamWorkload:
    """An environment, a policy and the sizes of the streams."""

    name: str
    """Name in tables."""
    environment: str = ""
    """Id of the environment; empty for a busy one."""
    step_s: float = 0.0
    """Duration of a busy environment's step."""
    size: int = 4
    """Numbers in a busy environment's observation."""
    network: NetworkConfig | None = None
    """Network; None for a policy that sleeps."""
    batch_s: float = 0.0
    """Duration of a sleeping policy's batch."""
    slots: int = 1
    """Slots of each lane."""
    steps: int = 16
    """Steps of a fragment."""

    def make_environment(self) -> VectorEnvironment:
        """Return one lane's environment."""
        if not self.environment:
            return BusyEnvironment(self.slots, self.size, self.step_s)
        return make_environment(EnvironmentSettings(id=self.environment), self.slots)

    def make_policy(self, environment: VectorEnvironment) -> ActorPolicy:
        """Return a policy for an environment."""
        if self.network is None:
            return SleepyPolicy(self.batch_s)
        spaces = environment.observation_space, environment.action_space
        return NetworkPolicy(build_network(self.network, *spaces, seed=0))

    def spec(self, *, ring: int, workers: int, weights: Mapping[str, Any], actors: int = 1) -> StreamSpec:
        """Return the sizes of the streams."""
        environment = self.make_environment()
        layout = layout_of(self.make_policy(environment), environment, self.slots)
        environment.close()
        return StreamSpec(
            actors=actors,
            ring=ring,
            steps=self.steps,
            layouts={"policy": layout},
            weights={"policy": record_of(weights)},
            workers=workers,
        )


def make_actor(
    workload: StreamWorkload, transport: Streams, has_policy: bool, core: int, index: int
) -> Actor:
    """Return an actor on its streams."""
    on_core(core)
    ring = [workload.make_environment() for _ in range(transport.spec.ring)]
    return Actor(
        ring,
        {"policy": workload.make_policy(ring[0])} if has_policy else {},
        workload.steps,
        index=index,
        streams=transport.end("actor", index),
    )


def make_policy_worker(workload: StreamWorkload, transport: Streams, core: int, index: int) -> PolicyWorker:
    """Return a policy worker on its streams."""
    on_core(core)
    environment = workload.make_environment()
    policy = workload.make_policy(environment)
    environment.close()
    return PolicyWorker({"policy": policy}, transport.end("worker", index))


class PolicyThreads:
    """Policy workers that are threads of one process."""

    def __init__(self, workers: Sequence[PolicyWorker]) -> None:
        self._workers = workers

    def poll(self, budget_s: float) -> None:
        """Let each poll in a thread of its own."""
        with ThreadPoolExecutor(len(self._workers)) as threads:
            list(threads.map(lambda worker: worker.poll(budget_s), self._workers))


def make_policy_threads(workload: StreamWorkload, transport: Streams, core: int, index: int) -> PolicyThreads:
    """Return all policy workers of the streams, in one process."""
    del index
    count = transport.spec.workers
    return PolicyThreads([make_policy_worker(workload, transport, core, each) for each in range(count)])


def on_core(core: int) -> None:
    """Run this process on one core, with one thread of torch; core -1: anywhere."""
    torch.set_num_threads(1)
    if core >= 0:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})
