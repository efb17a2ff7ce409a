"""Off-policy learning: what the learners of DQN, Ape-X and SAC share.

    Transitions ─ loss ─ backward ─> one flat gradient ─ clip by norm ─> Adam ─> weights ─ follow ─> target

All parameters are views of one tensor, their gradients of another, and the target's of a third. So the
optimiser, the clipping and the target network are single calls, without a loop over parameters.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rillflow.config.schema import Section
from rillflow.errors import ConfigError, NotFiniteError
from rillflow.records.metrics import Mean, Metric, Metrics, merge_metrics
from rillflow.runs.json_lines import JSON
from rillflow_classic.algorithm import LearnerInputs, System
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.networks.flat import flattened, views
from rillflow_classic.on_policy import fragment_metrics
from rillflow_classic.operators.context import Operator
from rillflow_classic.policy import ActorPolicy, Weights
from rillflow_classic.replay import ReplayBuffer, ReplayConfig, Space, Transitions

N = TypeVar("N", bound=nn.Module)


class OffPolicyConfig(Section):
    """Settings that DQN, Ape-X and SAC share."""

    lr: float = Field(1e-3, gt=0, description="Learning rate of Adam.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount.")
    num_steps: int = Field(1, ge=1, le=255, description="Rewards in a target before the value, n.")
    batch_size: int = Field(64, ge=1, description="Transitions of an update.")
    updates: int = Field(32, ge=1, description="Updates after each fragment.")
    learning_starts: int = Field(
        1000, ge=1, description="Transitions before the first update; actions are random until then."
    )
    max_gradient_norm: float = Field(10.0, gt=0, description="Norm to which larger gradients are scaled.")
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="after")
    def _buffer_holds_a_batch(self) -> OffPolicyConfig:
        needed = max(self.batch_size, self.learning_starts)
        if self.replay.capacity < needed:
            raise ConfigError(
                f"replay.capacity is {self.replay.capacity}, batch_size is {self.batch_size} and "
                f"learning_starts is {self.learning_starts}",
                why="the buffer would never hold a batch, or the transitions before the first update",
                fix=f"set replay.capacity to at least {needed}, or lower the other two",
            )
        return self


@dataclass(frozen=True)
class ReplayMaker:
    """Makes an empty buffer, or a part of one."""

    observation_space: Space
    """Space of one observation."""
    action_space: Space
    """Space of one action."""
    settings: Any
    """Settings of the algorithm."""
    seed: int
    """Seed of the draws."""

    def __call__(self, index: int, divided_by: int = 1) -> ReplayBuffer:
        """Return part ``index`` of a buffer that is divided into equal parts."""
        replay = self.settings.replay
        return ReplayBuffer(
            replay.model_copy(update={"capacity": replay.capacity // divided_by}),
            self.observation_space,
            self.action_space,
            discount=self.settings.gamma,
            num_steps=self.settings.num_steps,
            seed=self.seed + index,
        )


class OffPolicyLearner(ABC, Generic[N]):
    """A network that learns from transitions, and a target network that follows it.

    Args:
        inputs: spaces, settings and seed.
        network: everything that is trained.
        make_policy: makes the policy that acts with the network.
    """

    def __init__(
        self, inputs: LearnerInputs, network: N, make_policy: Callable[[N, LearnerInputs], ActorPolicy]
    ) -> None:
        self._inputs, self._settings = inputs, inputs.settings
        self.network = network
        """Everything that is trained."""
        self.target = copy.deepcopy(network).requires_grad_(False)
        """Network that makes the targets."""
        self.version = 0
        """See Learner."""
        self.errors: Array = np.zeros(0, np.float32)
        """[B] error of each transition of the last update, for its priority."""
        self._flat, self._target = flattened(network), flattened(self.target)
        self.policy = make_policy(network, inputs)
        """See Learner."""
        self.policy.version = 0
        self._optimizer = torch.optim.Adam([self._flat], self._settings.lr, fused=True)
        self._random = torch.Generator().manual_seed(inputs.seed)

    @abstractmethod
    def loss(self, batch: Transitions[Array]) -> tuple[Tensor, dict[str, Metric]]:
        """Return the loss of a batch; set ``errors``."""

    @abstractmethod
    def follow(self) -> None:
        """Move the target network after an update."""

    def make_replay(self) -> ReplayBuffer:
        """Return an empty buffer for its transitions."""
        return self.replay_maker()(0)

    def replay_maker(self) -> ReplayMaker:
        """Return what makes an empty buffer in any process."""
        inputs = self._inputs
        return ReplayMaker(inputs.observation_space, inputs.action_space, inputs.settings, inputs.seed)

    def train(self, buffer: ReplayBuffer) -> Metrics:
        """Take the updates that follow a fragment; none while the buffer has too few transitions."""
        if buffer.num_transitions < max(self._settings.learning_starts, self._settings.batch_size):
            return {}
        return merge_metrics(self._drawn_update(buffer) for _ in range(self._settings.updates))

    def update(self, data: Transitions[Array]) -> Metrics:
        """Take one optimiser step on a batch.

        Raises:
            NotFiniteError: the gradient is not finite; the weights stay.
        """
        metrics = self._backward(data)
        return {**metrics, "policy/gradient_norm/mean": Mean(total=self._step(), count=1)}

    def gradients(self, data: Transitions[Array]) -> tuple[list[Tensor], Metrics]:
        """Return the gradient of every parameter, without a step."""
        metrics = self._backward(data)
        assert self._flat.grad is not None
        return views(self._flat.grad.clone(), self.network.parameters()), metrics

    def apply(self, gradients: list[Tensor]) -> None:
        """Take one optimiser step with given gradients.

        Raises:
            NotFiniteError: a gradient is not finite; the weights stay.
        """
        assert self._flat.grad is not None
        torch.cat([each.flatten() for each in gradients], out=self._flat.grad)
        self._step()

    def weights(self) -> Weights:
        """Return a copy of all weights of the acting network."""
        return {name: value.detach().numpy().copy() for name, value in self.acting.state_dict().items()}

    @property
    def acting(self) -> nn.Module:
        """The part of the network that acts."""
        return self.network

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, JSON]]:
        """Return both networks, the moments of Adam, and the state of the random numbers."""
        tensors = {f"network.{name}": value.clone() for name, value in self.network.state_dict().items()}
        tensors |= {f"target.{name}": value.clone() for name, value in self.target.state_dict().items()}
        optimizer = self._optimizer.state[self._flat]
        tensors |= {f"optimizer.{name}": value.clone() for name, value in optimizer.items()}
        return {**tensors, "random.state": self._random.get_state()}, {"version": self.version}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self.network.load_state_dict(_under("network.", tensors))
        self.target.load_state_dict(_under("target.", tensors))
        moments = _under("optimizer.", tensors)
        self._optimizer.state[self._flat] = {name: value.clone() for name, value in moments.items()}
        self._random.set_state(tensors["random.state"])
        self.version = self.policy.version = state["version"]

    def _drawn_update(self, buffer: ReplayBuffer) -> Metrics:
        batch = buffer.sample(self._settings.batch_size)
        metrics = self.update(batch)
        buffer.set_priorities(batch.serials, self.errors)
        return metrics

    def _backward(self, data: Transitions[Array]) -> Metrics:
        loss, metrics = self.loss(data)
        assert self._flat.grad is not None
        self._flat.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        return {"policy/loss/mean": Mean(total=float(loss.detach()), count=1), **metrics}

    def _step(self) -> float:
        assert self._flat.grad is not None
        norm = float(torch.linalg.vector_norm(self._flat.grad))
        if not math.isfinite(norm):
            raise NotFiniteError(
                f"the norm of the gradient is {norm} in update {self.version}",
                why="a step with it would destroy the weights; they are those of the last update",
                fix="look for rewards or observations that are NaN or huge, or lower algorithm.lr",
            )
        if norm > self._settings.max_gradient_norm:
            self._flat.grad.mul_(self._settings.max_gradient_norm / norm)
        self._optimizer.step()
        self.version += 1
        self.policy.version = self.version
        self.follow()
        return norm


def train_from_replay(system: System, learner: OffPolicyLearner[Any], name: str = "replay") -> Operator:
    """Add a fragment to the learner's buffer, take its updates, and send new weights to the actors.

    Args:
        system: where the learner's actors are.
        learner: the learner.
        name: name of the buffer in checkpoints.
    """
    buffer = system.kept.keep(name, learner.make_replay)

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


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
