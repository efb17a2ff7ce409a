"""Off-policy learning: what the learners of DQN, Ape-X and SAC share.

    Transitions ─ loss ─ backward ─> one flat gradient ─ clip by norm ─> Adam ─> weights ─ follow ─> target

The target's parameters are views of one tensor, as the network's are: the target follows in a single call.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rillflow.errors import ConfigError
from rillflow.records.metrics import Mean, Metric, Metrics, merge_metrics
from rillflow_classic.algorithm import LearnerInputs, RolloutSize, System
from rillflow_classic.checkpointed import State
from rillflow_classic.flat_learner import FlatLearner, LearnerConfig, N
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.networks.flat import flattened
from rillflow_classic.on_policy import fragment_metrics
from rillflow_classic.operators.context import Operator
from rillflow_classic.policy import ActorPolicy
from rillflow_classic.replay import ReplayBuffer, ReplayConfig, Transitions, require_memory


class OffPolicyConfig(LearnerConfig):
    """Settings that DQN, Ape-X and SAC share."""

    num_steps: int = Field(1, ge=1, le=255, description="Rewards in a target before the value, n.")
    batch_size: int = Field(64, ge=1, description="Transitions of an update.")
    updates: int = Field(32, ge=1, description="Updates after each fragment.")
    learning_starts: int = Field(
        1000,
        ge=1,
        description="Transitions before the first update, or a full buffer; actions are random until then.",
    )
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="after")
    def _buffer_holds_a_batch(self) -> OffPolicyConfig:
        needed = max(self.batch_size, self.learning_starts)
        if self.replay.capacity < needed:
            raise ConfigError(
                f"algorithm.replay.capacity is {self.replay.capacity}, batch_size is {self.batch_size} and "
                f"learning_starts is {self.learning_starts}",
                why="the buffer would never hold a batch, or the transitions before the first update",
                fix=f"set algorithm.replay.capacity to at least {needed}, or lower the other two",
            )
        return self


def make_replay(inputs: LearnerInputs, index: int = 0, divided_by: int = 1) -> ReplayBuffer:
    """Return an empty buffer, or part ``index`` of one that is divided into equal parts."""
    settings = inputs.settings
    return ReplayBuffer(
        settings.replay.model_copy(update={"capacity": settings.replay.capacity // divided_by}),
        inputs.observation_space,
        inputs.action_space,
        discount=settings.gamma,
        num_steps=settings.num_steps,
        seed=inputs.seed + index,
    )


def require_replay(inputs: LearnerInputs, size: RolloutSize, parts: int = 1) -> None:
    """Raise ConfigError for an LSTM, or if a fragment or the first updates do not fit a buffer.

    Args:
        inputs: spaces and settings.
        size: size of a fragment.
        parts: equal parts of the buffer; each holds whole fragments.
    """
    settings, replay = inputs.settings, inputs.settings.replay
    if inputs.network.kind == "lstm":
        raise ConfigError(
            "network.kind is 'lstm', and the algorithm learns from a replay buffer",
            why="a transition of the buffer has no state of the LSTM",
            fix="choose 'mlp' or 'cnn', or an algorithm that learns from fragments",
        )
    rows = size.slots * (size.steps + 1)
    named, capacity = f"algorithm.replay.capacity is {replay.capacity}", replay.capacity // parts
    named += f", divided among {parts} shards" if parts > 1 else ""
    if capacity < rows:
        raise ConfigError(
            f"{named}, and a fragment has {rows} rows",
            why=f"{size.slots} slots have {size.steps} steps each, and one more observation",
            fix=f"set algorithm.replay.capacity to at least {rows * parts}, or lower workers.slots or "
            "workers.steps",
        )
    first = max(settings.batch_size, settings.learning_starts // parts)
    if capacity - size.slots < first:
        raise ConfigError(
            f"{named}, and the first update needs {first} transitions{' of a shard' if parts > 1 else ''}",
            why=f"the last rows of {size.slots} slots begin no transition yet, so it would never come",
            fix=f"set algorithm.replay.capacity to at least {(first + size.slots) * parts}",
        )
    whole = replay if size.is_one_machine else replay.model_copy(update={"capacity": capacity})
    require_memory(whole, inputs.observation_space, inputs.action_space)


class OffPolicyLearner(FlatLearner[N], ABC):
    """A network that learns from transitions, and a target network that follows it.

    Args:
        inputs: spaces, settings and seed.
        network: everything that is trained.
        make_policy: makes the policy that acts with the network.
    """

    def __init__(
        self, inputs: LearnerInputs, network: N, make_policy: Callable[[N, LearnerInputs], ActorPolicy]
    ) -> None:
        self.inputs = inputs
        """Arguments of its constructor."""
        self.target = copy.deepcopy(network).requires_grad_(False)
        """Network that makes the targets."""
        self.errors: Array = np.zeros(0, np.float32)
        """[B] error of each transition of the last update, for its priority."""
        self._target = flattened(self.target)
        super().__init__(network, lambda network: make_policy(network, inputs), inputs.settings)
        self._random = torch.Generator().manual_seed(inputs.seed)

    @abstractmethod
    def loss(self, batch: Transitions[Array]) -> tuple[Tensor, dict[str, Metric]]:
        """Return the loss of a batch; set ``errors``."""

    @abstractmethod
    def follow(self) -> None:
        """Move the target network after an update."""

    def train(self, buffer: ReplayBuffer) -> Metrics:
        """Take the updates that follow a fragment; none while the buffer has too few transitions.

        Raises:
            RecordError: the buffer is full, and has fewer transitions than a batch.
        """
        if not buffer.is_ready(max(self._settings.learning_starts, self._settings.batch_size)):
            return {}
        found = []
        for _ in range(self._settings.updates):
            batch = buffer.sample(self._settings.batch_size)
            found.append(self.update(batch))
            buffer.set_priorities(batch.serials, self.errors)
        return merge_metrics(found)

    def update(self, data: Transitions[Array]) -> Metrics:
        """Take one optimiser step on a batch.

        Raises:
            NotFiniteError: the gradient is not finite; the weights stay.
        """
        loss, metrics = self.loss(data)
        self._gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = Mean(total=self._step(), count=1)
        self._count_update()
        self.follow()
        mean = Mean(total=float(loss.detach()), count=1)
        return {"policy/loss/mean": mean, **metrics, "policy/gradient_norm/mean": norm}

    def state(self) -> State:
        """Return also the target network and the state of the random numbers."""
        return {**super().state(), "target": self.target.state_dict(), "random": self._random.get_state()}

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""
        super().restore(state)
        self.target.load_state_dict(state["target"])
        self._random.set_state(state["random"])


def train_from_replay(system: System, learner: OffPolicyLearner[Any], name: str = "replay") -> Operator:
    """Add a fragment to the learner's buffer, take its updates, and send new weights to the actors.

    Args:
        system: where the learner's actors are.
        learner: the learner.
        name: name of the buffer in checkpoints.
    """
    buffer = system.kept.keep(name, partial(make_replay, learner.inputs))

    def train(fragment: Fragment) -> Metrics:
        acted = fragment_metrics(fragment, learner.version)
        buffer.add(fragment)
        trained = learner.train(buffer)
        system.publish(learner)
        return {**acted, **trained}

    return Operator(label=name, begin=lambda _: train)


def tensors_of(batch: Transitions[Array]) -> Transitions[Tensor]:
    """Return a batch whose arrays are tensors that share their memory."""
    return Transitions(**{name: torch.from_numpy(values) for name, values in vars(batch).items()})
