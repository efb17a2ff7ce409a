"""DQN: deep Q-learning (Mnih et al. 2015), with double Q-learning and n steps (Rainbow, arXiv 1710.02298).

    y = r_t + ... + g^{n-1} r_{t+n-1} + g^n Q'(s_{t+n}, argmax_a Q(s_{t+n}, a))       L = E[w huber(Q(s_t, a_t) - y)]

Q' is the target network, a copy of Q every ``target_every`` updates. Dueling: Q(s, a) = V(s) + A(s, a) - mean A.
Actions are random with probability epsilon, which falls linearly with the updates.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from rillflow.records.metrics import Mean, Metric, Metrics, mean_of
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs, System
from rillflow_classic.config import AlgorithmSettings
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.networks.build import ActorCritic, build_network
from rillflow_classic.off_policy import OffPolicyConfig, OffPolicyLearner, tensors_of
from rillflow_classic.on_policy import fragment_metrics
from rillflow_classic.policy import Acted, Weights
from rillflow_classic.replay import Transitions


class QConfig(OffPolicyConfig):
    """Settings of DQN and Ape-X."""

    double: bool = Field(True, description="Whether the trained network chooses the action of the target.")
    dueling: bool = Field(False, description="Whether Q is a value plus an advantage of each action.")
    huber: float = Field(
        1.0, gt=0, description="Error above which the loss is linear; a large one makes it squared."
    )
    target_every: int = Field(250, ge=1, description="Updates between copies to the target network.")
    epsilon_first: float = Field(1.0, ge=0, le=1, description="Share of random actions before any update.")
    epsilon_last: float = Field(0.05, ge=0, le=1, description="Share of random actions at last.")
    epsilon_updates: int = Field(5000, ge=1, description="Updates in which that share falls.")

    def epsilons(self, version: int, num_slots: int) -> Array:
        """Return the share of random actions of every slot, [N], after some updates."""
        passed = min(max(version, 0) / self.epsilon_updates, 1.0)
        return np.full(num_slots, self.epsilon_first + passed * (self.epsilon_last - self.epsilon_first))


class DQNConfig(AlgorithmSettings, QConfig):
    """``[algorithm]`` of DQN."""


class EpsilonGreedy:
    """Acts with the best action, or with a random one with probability epsilon; see ActorPolicy."""

    def __init__(self, network: ActorCritic, settings: QConfig, seed: int) -> None:
        self.network, self.version = network, -1
        self._settings = settings
        self.seed(seed)

    @torch.inference_mode()
    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        """See ActorPolicy; ``outputs`` holds Q of the action, ``chosen``, and of the best one, ``best``."""
        values = q_values(self.network, torch.from_numpy(observations), self._settings.dueling).numpy()
        rows, actions = np.arange(len(values)), values.argmax(1)
        best = values[rows, actions]
        if not greedy:
            epsilons = self._settings.epsilons(self.version, len(rows))
            others = self._generator.integers(values.shape[1], size=len(rows))
            actions = np.where(self._generator.random(len(rows)) < epsilons, others, actions)
        return Acted(actions=actions, outputs={"chosen": values[rows, actions], "best": best})

    def initial_state(self, num_slots: int) -> Array | None:
        """See ActorPolicy; there is none."""

    def seed(self, seed: int) -> None:
        """See ActorPolicy."""
        self._generator = np.random.default_rng(seed)

    def load(self, version: int, weights: Weights) -> None:
        """See ActorPolicy."""
        self.network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self.version = version


class DQNLearner(OffPolicyLearner[ActorCritic]):
    """The learner of DQN and Ape-X."""

    def __init__(self, inputs: LearnerInputs) -> None:
        network = build_network(inputs.network, inputs.observation_space, inputs.action_space, inputs.seed)
        super().__init__(inputs, network, EpsilonGreedy(network, inputs.settings, inputs.seed))

    def loss(self, batch: Transitions) -> tuple[Tensor, dict[str, Metric]]:
        """Return the weighted Huber loss."""
        data, dueling = tensors_of(batch), self._settings.dueling
        chosen = q_values(self.network, data.observations, dueling).gather(1, data.actions[:, None])[:, 0]
        with torch.no_grad():
            following = q_values(self.target, data.next_observations, dueling)
            judge = (
                q_values(self.network, data.next_observations, dueling)
                if self._settings.double
                else following
            )
            best = following.gather(1, judge.argmax(1, keepdim=True))[:, 0]
            targets = data.returns + data.discounts * best
        self.errors = (chosen.detach() - targets).numpy()
        delta = self._settings.huber
        losses = data.weights * functional.huber_loss(chosen, targets, reduction="none", delta=delta)
        return losses.mean(), {"policy/q/mean": mean_of(chosen.detach())}

    def follow(self) -> None:
        """Copy the weights to the target network from time to time."""
        if self.version % self._settings.target_every == 0:
            self._target.data.copy_(self._flat.data)


def q_values(network: ActorCritic, observations: Tensor, dueling: bool) -> Tensor:
    """Return Q of every action, [B, A]."""
    output = network(observations)
    advantages: Tensor = output.parameters
    if not dueling:
        return advantages
    return output.values[:, None] + advantages - advantages.mean(1, keepdim=True)


def plan(system: System, settings: QConfig) -> Iterator[Metrics]:
    """Return the dataflow: fragments into the buffer, updates from it, new weights for all actors."""
    learner = system.learner
    assert isinstance(learner, OffPolicyLearner)
    buffer = system.kept.keep("replay", learner.make_replay)

    def store(fragment: Fragment) -> Metrics:
        buffer.add(fragment)
        return fragment_metrics(fragment, learner.version)

    def train(metrics: Metrics) -> Metrics:
        trained = learner.train(buffer)
        system.publish(learner)
        return {**metrics, **trained}

    return system.rollouts("bulk_sync").for_each(store).for_each(train)  # type: ignore[no-any-return]


ALGORITHM = ClassicAlgorithm(name="dqn", config=DQNConfig, learner=DQNLearner, plan=plan)
