"""Ape-X: distributed prioritised replay (Horgan et al., arXiv 1803.00933).

    store     fragments as they come ─> a random shard of the replay, with the actors' own priorities
    replay    batches of the shards as they come ─> queue
    learn     queue ─> update of DQN ─> priorities to the batch's shard ─> new weights for all actors

The three flows run concurrently. With ``frames_per_update`` = r, whichever of frames and r updates is ahead
by ``RateLimiter.slack`` waits for the other, so a run learns alike on fast and on slow machines (the rate
limiter of Reverb, arXiv 2102.04736). Both counts begin with the plan: at the start and after a checkpoint.

Slot i of the N slots of all actors takes random actions with probability epsilon^(1 + 7 i / (N - 1)), for
ever: so some slots explore and some act almost greedily. In the paper every actor has one slot. The loss is
that of DQN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from rillflow.records.metrics import Metrics
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs, RolloutSize, System
from rillflow_classic.algorithms.dqn import DQNConfig, DQNLearner
from rillflow_classic.checkpointed import State
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.off_policy import make_replay, require_replay
from rillflow_classic.on_policy import fragment_metrics
from rillflow_classic.operators.context import NotReady, Operator, PlanContext
from rillflow_classic.operators.iterators import concurrently, queue
from rillflow_classic.operators.steps import replay, report_metrics, store_to_replay
from rillflow_classic.replay import ReplayBuffer, ReplayConfig, Transitions
from rillflow_classic.worker_set import DEADLINE_S, WorkerSet

POOL = "replay"
"""Pool of the shards, and their name in checkpoints."""


class ApexConfig(DQNConfig):
    """``[algorithm]`` of Ape-X."""

    num_steps: int = Field(3, ge=1, le=255, description="Rewards in a target before the value, n.")
    epsilon_first: float = Field(0.4, ge=0, le=1, description="Share of random actions of the first slot.")
    ladder: float = Field(7.0, ge=0, description="The last slot's share is epsilon_first ** (1 + ladder).")
    shards: int = Field(1, ge=1, description="Workers that each hold a part of the replay.")
    num_async: int = Field(2, ge=1, description="Calls in flight at each actor and at each shard.")
    queued: int = Field(16, ge=1, description="Batches that wait for the learner.")
    updates: int = Field(32, ge=1, description="Updates of one step of the run.")
    publish_every: int = Field(16, ge=1, description="Updates between new weights for the actors.")
    frames_per_update: float = Field(
        0.0, ge=0, description="Frames that the actors play for each update; 0: as many as the machine plays."
    )
    replay: ReplayConfig = ReplayConfig(capacity=100_000, priority_exponent=0.6)

    def epsilons(self, version: int, num_slots: int, actor: int = 0, actors: int = 1) -> Array:
        """Return the share of random actions of every slot of an actor, [N]."""
        del version
        slots = actor * num_slots + np.arange(num_slots)
        ladder = 1 + self.ladder * slots / max(actors * num_slots - 1, 1)
        found: Array = np.power(self.epsilon_first, ladder)
        return found


class ReplayShards:
    """Replay buffers on workers of their own, as one object with a state.

    Args:
        workers: the buffers.
    """

    def __init__(self, workers: WorkerSet[ReplayBuffer]) -> None:
        self.workers = workers
        """The buffers."""

    def state(self) -> State:
        """Return the states of all shards, by index."""
        calls = self.workers.call_all("state")
        return {str(call.worker): call.read(DEADLINE_S) for call in calls}

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""
        for index in range(self.workers.size):
            self.workers.call(index, "restore", state[str(index)]).read(DEADLINE_S)


class RateLimiter:
    """Keeps frames and updates in proportion: whichever is ahead by the slack waits for the other.

    Args:
        frames_per_update: frames of an update; 0: neither waits.
        slack: largest difference, in frames.
    """

    def __init__(self, frames_per_update: float, slack: float) -> None:
        self.slack = slack if frames_per_update else math.inf
        """Largest difference, in frames; a fragment may go beyond it."""
        self._frames_per_update, self._ahead = frames_per_update, 0.0

    def play(self) -> Operator:
        """Return the operator that counts fragments, and waits while there are too few updates."""
        return Operator(label="limit_frames", begin=lambda _: self._played)

    def _played(self, fragment: Fragment) -> Fragment | NotReady:
        if self._ahead >= self.slack:
            return NotReady(why=(f"the frames are {self._ahead:g} ahead of the updates",))
        self._ahead += fragment.num_steps
        return fragment

    def learns(self) -> NotReady | None:
        """Count an update; NotReady while there are too few frames."""
        if self._ahead <= -self.slack:
            return NotReady(why=(f"the updates are {-self._ahead:g} frames ahead",))
        self._ahead -= self._frames_per_update
        return None


def plan(system: System, settings: ApexConfig) -> Iterator[Metrics]:
    """Return the dataflow: store, replay and learn, concurrently."""
    learner: Any = system.learner
    make = partial(make_replay, learner.inputs, divided_by=settings.shards)
    workers = system.kept.keep(POOL, lambda: ReplayShards(system.start_workers(POOL, make))).workers
    enqueue, batches = queue(settings.queued)
    rollouts = system.rollouts("async", num_async=settings.num_async)
    least = max(settings.learning_starts // settings.shards, settings.batch_size)
    limiter = RateLimiter(settings.frames_per_update, slack=2 * least * settings.shards)
    drawn = replay(workers, settings.batch_size, starts=least, num_async=settings.num_async)
    flows = [
        rollouts.for_each(limiter.play()).for_each(count_steps(learner)).for_each(store_to_replay(workers)),
        drawn.for_each(enqueue),
        batches.for_each(learn(system, learner, settings, limiter)).combine(report_metrics(settings.updates)),
    ]
    return concurrently(flows, "async", output_indexes=[2])  # type: ignore[return-value]


def count_steps(learner: DQNLearner) -> Operator:
    """Record what a fragment says about acting."""

    def begin(context: PlanContext) -> Callable[[Fragment], Fragment]:
        def count(fragment: Fragment) -> Fragment:
            context.record(fragment_metrics(fragment, learner.version))
            return fragment

        return count

    return Operator(label="count_steps", begin=begin)


def learn(system: System, learner: DQNLearner, settings: ApexConfig, limiter: RateLimiter) -> Operator:
    """Update the learner with a batch, and send the priorities to the batch's shard."""

    def begin(context: PlanContext) -> Callable[[Transitions[Array]], Metrics | NotReady]:
        def update(batch: Transitions[Array]) -> Metrics | NotReady:
            if (wait := limiter.learns()) is not None:
                return wait
            metrics = learner.update(batch)
            assert context.source is not None
            context.sent([context.source.call("set_priorities", batch.serials, learner.errors)])
            if learner.version % settings.publish_every == 0:
                system.publish(learner)
            return metrics

        return update

    return Operator(label="learn", begin=begin)


def pools(settings: ApexConfig) -> Mapping[str, int]:
    """Return the pool of the shards."""
    return {POOL: settings.shards}


def require(inputs: LearnerInputs, size: RolloutSize) -> None:
    """Raise ConfigError if a fragment does not fit a shard, or the shards do not fit the memory."""
    require_replay(inputs, size, inputs.settings.shards)


ALGORITHM = ClassicAlgorithm(
    name="apex",
    config=ApexConfig,
    learner=DQNLearner,
    plan=plan,
    is_in_step=False,
    pools=pools,
    require=require,
)
