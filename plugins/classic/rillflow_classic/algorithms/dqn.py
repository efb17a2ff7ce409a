"""DQN: deep Q-learning (Mnih et al. 2015), with double Q-learning and n steps (Rainbow, arXiv 1710.02298).

    y = r_t + ... + g^{n-1} r_{t+n-1} + g^n Q'(s_{t+n}, argmax_a Q(s_{t+n}, a))
    L = E[w huber(Q(s_t, a_t) - y)]

Q' is the target network, a copy of Q every ``target_every`` updates. Dueling: Q(s, a) = V + A(a) - mean A.
Actions are random with probability epsilon, which falls linearly with the updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from rillflow.errors import ConfigError
from rillflow.records.metrics import Metric, Metrics, mean_of
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs, System
from rillflow_classic.fragment import Array
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.build import ActorCritic, build_network
from rillflow_classic.off_policy import (
    OffPolicyConfig,
    OffPolicyLearner,
    require_replay,
    tensors_of,
    train_from_replay,
)
from rillflow_classic.policy import Acted
from rillflow_classic.replay import Transitions


class DQNConfig(OffPolicyConfig):
    """``[algorithm]`` of DQN; Ape-X has these settings too."""

    double: bool = Field(True, description="Whether the trained network chooses the action of the target.")
    dueling: bool = Field(False, description="Whether Q is a value plus an advantage of each action.")
    huber: float = Field(
        1.0, gt=0, description="Error above which the loss is linear; a large one makes it squared."
    )
    target_every: int = Field(250, ge=1, description="Updates between copies to the target network.")
    epsilon_first: float = Field(1.0, ge=0, le=1, description="Share of random actions before any update.")
    epsilon_last: float = Field(0.05, ge=0, le=1, description="Share of random actions at last.")
    epsilon_updates: int = Field(5000, ge=1, description="Updates in which that share falls.")

    def epsilons(self, version: int, num_slots: int, actor: int = 0, actors: int = 1) -> Array:
        """Return the share of random actions of every slot of an actor, [N], after some updates."""
        del actor, actors
        passed = min(max(version, 0) / self.epsilon_updates, 1.0)
        return np.full(num_slots, self.epsilon_first + passed * (self.epsilon_last - self.epsilon_first))


class EpsilonGreedy(NetworkPolicy):
    """Acts with the best action, or with a random one with probability epsilon."""

    def __init__(self, network: ActorCritic, inputs: LearnerInputs) -> None:
        super().__init__(network, inputs.seed)
        self._inputs, self._settings = inputs, inputs.settings

    def act(
        self,
        observations: Array,
        state: Array | None = None,
        *,
        greedy: bool = False,
        mask: Array | None = None,
    ) -> Acted:
        """See ActorPolicy; ``outputs`` holds Q of the action, ``chosen``, and of the best one, ``best``.

        ``mask`` [B, A] are the actions that are allowed.
        """
        found, values, _ = self.evaluate(observations, None)
        q = dueling_sum(found, values) if self._settings.dueling else found
        q = q if mask is None else np.where(mask, q, np.float32(-np.inf))
        rows, actions = np.arange(len(q)), q.argmax(1)
        best = q[rows, actions]
        if not greedy:
            place = self._inputs.actor, self._inputs.actors
            epsilons = self._settings.epsilons(self.version, len(rows), *place)
            others = self._generator.integers(q.shape[1], size=len(rows))
            if mask is not None:
                others = np.where(mask, self._generator.random(q.shape), -1.0).argmax(1)
            actions = np.where(self._generator.random(len(rows)) < epsilons, others, actions)
        return Acted(actions=actions, outputs={"chosen": q[rows, actions], "best": best}, state=state)


class DQNLearner(OffPolicyLearner[ActorCritic]):
    """The learner of DQN and Ape-X."""

    def __init__(self, inputs: LearnerInputs) -> None:
        if not np.issubdtype(inputs.action_space.dtype, np.integer):
            raise ConfigError(
                f"the action space is {inputs.action_space}",
                why="DQN has a value of each of finitely many actions",
                fix='set algorithm.name = "sac", or another algorithm for continuous actions',
            )
        network = build_network(inputs.network, inputs.observation_space, inputs.action_space, inputs.seed)
        super().__init__(inputs, network, EpsilonGreedy)

    def loss(self, batch: Transitions[Array]) -> tuple[Tensor, dict[str, Metric]]:
        """Return the weighted Huber loss."""
        data, settings = tensors_of(batch), self._settings
        q = q_values(self.network, data.observations, settings.dueling)
        chosen = q.gather(1, data.actions[:, None])[:, 0]
        with torch.no_grad():
            judged = later = q_values(self.target, data.next_observations, settings.dueling)
            if settings.double:
                judged = q_values(self.network, data.next_observations, settings.dueling)
            best = later.gather(1, judged.argmax(1, keepdim=True))[:, 0]
            targets = data.returns + data.discounts * best
        self.errors = (chosen.detach() - targets).numpy()
        losses = functional.huber_loss(chosen, targets, reduction="none", delta=settings.huber)
        return (data.weights * losses).mean(), {"policy/q/mean": mean_of(chosen.detach())}

    def follow(self) -> None:
        """Copy the weights to the target network from time to time."""
        if self.version % self._settings.target_every == 0:
            self._target.data.copy_(self._flat.data)


def q_values(network: ActorCritic, observations: Tensor, dueling: bool) -> Tensor:
    """Return Q of every action, [B, A]."""
    output = network(observations)
    parameters: Tensor = output.parameters
    return dueling_sum(parameters, output.values) if dueling else parameters


def dueling_sum(advantages: Any, values: Any) -> Any:
    """Return V + A - mean A, [B, A], of arrays or tensors (Wang et al., arXiv 1511.06581, equation 9)."""
    return values[:, None] + advantages - advantages.mean(1)[:, None]


def plan(system: System, settings: DQNConfig) -> Iterator[Metrics]:
    """Return the dataflow: fragments into the buffer, updates from it, new weights for all actors."""
    del settings
    learner: Any = system.learner
    return system.rollouts("bulk_sync").for_each(train_from_replay(system, learner))  # type: ignore[no-any-return]


ALGORITHM = ClassicAlgorithm(
    name="dqn", config=DQNConfig, learner=DQNLearner, plan=plan, require=require_replay
)
