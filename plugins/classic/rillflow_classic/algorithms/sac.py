"""SAC: soft actor-critic with an automatic temperature (Haarnoja et al., arXiv 1812.05905).

    y       = r + g (min_i Q'_i(s', a') - alpha log pi(a' | s')),  a' ~ pi(s')
    L_Q     = sum_i E[(Q_i(s, a) - y)^2]
    L_pi    = E[alpha log pi(a | s) - min_i Q_i(s, a)],  a ~ pi(s)
    L_alpha = -E[alpha (log pi(a | s) + H)],  H = -1 for each dimension of an action

Actions are tanh(u), u normal, scaled to the bounds of the action space. The three losses are of the same
weights, and each has a gradient for its own part only: so their sum is one
loss with one optimiser. Q' follows Q by ``tau`` of the distance. Actions are random before the first update.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import flatdim
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rillflow.errors import ConfigError
from rillflow.records.metrics import Mean, Metric, mean_of
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs, RolloutSize
from rillflow_classic.algorithms.dqn import plan
from rillflow_classic.fragment import Array
from rillflow_classic.networks.acting import weights_of
from rillflow_classic.networks.build import inputs_of, is_frames
from rillflow_classic.networks.ensemble import EnsembleMLP
from rillflow_classic.off_policy import OffPolicyConfig, OffPolicyLearner, require_replay, tensors_of
from rillflow_classic.policy import Acted, Weights
from rillflow_classic.replay import Transitions

LEAST_LOG, MOST_LOG = -20.0, 2.0
"""Bounds of the log deviation of u."""


class SACConfig(OffPolicyConfig):
    """``[algorithm]`` of SAC."""

    batch_size: int = Field(256, ge=1, description="Transitions of an update.")
    tau: float = Field(0.005, gt=0, le=1, description="Part of the way to the critics that their targets go.")
    temperature: float = Field(1.0, gt=0, description="First temperature alpha.")
    max_gradient_norm: float = Field(1e6, gt=0, description="Norm to which larger gradients are scaled.")


class SquashedActor(nn.Module):
    """An MLP with the mean and the log deviation of u, and the bounds of the actions."""

    def __init__(self, inputs: LearnerInputs, generator: torch.Generator) -> None:
        super().__init__()
        observations, actions = flatdim(inputs.observation_space), flatdim(inputs.action_space)
        self.inputs = inputs_of(inputs.observation_space)
        self.mlp = EnsembleMLP(1, (observations, *inputs.network.hidden, 2 * actions), generator)
        space: Any = inputs.action_space
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        self.centre, self.radius = (high + low) / 2, (high - low) / 2

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log deviation of u, [B, A] each."""
        mean, log = self.mlp(self.inputs(observations))[0].chunk(2, dim=-1)
        return mean, log.clamp(LEAST_LOG, MOST_LOG)

    def sample(self, observations: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tanh(u) [B, A] of a sample, with its gradient, and its log probability [B] (appendix C)."""
        mean, log = self(observations)
        noise = torch.randn(mean.shape, generator=random)
        drawn = mean + noise * log.exp()
        normal = -0.5 * noise * noise - log - 0.5 * math.log(2 * math.pi)
        squash = 2 * (math.log(2) - drawn - functional.softplus(-2 * drawn))  # log(1 - tanh(u)^2)
        return drawn.tanh(), (normal - squash).sum(-1)


class SquashedPolicy:
    """Acts with the squashed normal distribution, and randomly before the first update; see ActorPolicy."""

    def __init__(self, network: SACNetwork, inputs: LearnerInputs) -> None:
        self.actor, self.version = network.actor, -1
        self.seed(inputs.seed)

    @torch.inference_mode()
    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        """See ActorPolicy."""
        actor = self.actor
        mean, log = (each.numpy() for each in actor(torch.from_numpy(observations)))
        noise = self._generator.standard_normal(mean.shape, np.float32)
        squashed = np.tanh(mean if greedy else mean + noise * np.exp(log))
        if self.version < 1 and not greedy:
            squashed = self._generator.uniform(-1, 1, mean.shape).astype(np.float32)
        return Acted(actions=actor.centre.numpy() + actor.radius.numpy() * squashed, state=state)

    def initial_state(self, num_slots: int) -> Array | None:
        """See ActorPolicy; there is none."""

    def seed(self, seed: int) -> None:
        """See ActorPolicy."""
        self._generator = np.random.default_rng(seed)

    def load(self, version: int, weights: Weights) -> None:
        """See ActorPolicy."""
        self.actor.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self.version = version


class SACNetwork(nn.Module):
    """The actor, both critics, and the log of the temperature."""

    def __init__(self, inputs: LearnerInputs) -> None:
        super().__init__()
        require_bounds(inputs)
        generator = torch.Generator().manual_seed(inputs.seed)
        self.actor = SquashedActor(inputs, generator)
        size = flatdim(inputs.observation_space) + flatdim(inputs.action_space)
        self.critics = EnsembleMLP(2, (size, *inputs.network.hidden, 1), generator)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(inputs.settings.temperature)))

    def q(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return Q of both critics, [2, B]."""
        values: Tensor = self.critics(torch.cat((self.actor.inputs(observations), actions), -1))
        return values[..., 0]


class SACLearner(OffPolicyLearner[SACNetwork]):
    """The learner of SAC."""

    def __init__(self, inputs: LearnerInputs) -> None:
        super().__init__(inputs, SACNetwork(inputs), SquashedPolicy)

    def weights(self) -> Weights:
        """Return a copy of the actor's weights."""
        return weights_of(self.network.actor)

    def loss(self, batch: Transitions[Array]) -> tuple[Tensor, dict[str, Metric]]:
        """Return the sum of the three losses."""
        data, network = tensors_of(batch), self.network
        actions = (data.actions - network.actor.centre) / network.actor.radius
        temperature = network.log_temperature.exp()
        with torch.no_grad():
            later, later_logprobs = network.actor.sample(data.next_observations, self._random)
            least = self.target.q(data.next_observations, later).amin(0)
            targets = data.returns + data.discounts * (least - temperature * later_logprobs)
        errors = network.q(data.observations, actions) - targets
        self.errors = errors.detach().abs().mean(0).numpy()
        critic_loss = (data.weights * errors.square()).mean(1).sum()
        drawn, logprobs = network.actor.sample(data.observations, self._random)
        network.critics.requires_grad_(False)
        values = network.q(data.observations, drawn).amin(0)
        network.critics.requires_grad_(True)
        actor_loss = (temperature.detach() * logprobs - values).mean()
        temperature_loss = -temperature * (logprobs.detach().mean() - actions.shape[-1])
        return critic_loss + actor_loss + temperature_loss, {
            "critic/loss/mean": mean_of(critic_loss.detach()),
            "policy/q/mean": mean_of(values.detach()),
            "policy/entropy/mean": mean_of(-logprobs.detach()),
            "policy/temperature/mean": Mean(total=float(temperature.detach()), count=1),
        }

    def follow(self) -> None:
        """Move the target critics."""
        self._target.data.lerp_(self._flat.data, self._settings.tau)


def require_bounds(inputs: LearnerInputs) -> None:
    """Raise ConfigError unless actions are vectors between finite bounds."""
    space: Any = inputs.action_space
    is_box = np.issubdtype(space.dtype, np.floating) and len(space.shape) == 1
    if not is_box or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ConfigError(
            f"algorithm.name is 'sac' and the action space is {space}",
            why="SAC acts with vectors of floats between finite bounds",
            fix="choose algorithm.name = 'dqn' for discrete actions, or bound the actions with a wrapper",
        )


def require(inputs: LearnerInputs, size: RolloutSize) -> None:
    """Raise ConfigError for settings of the network that SAC does not read; see also ``require_replay``."""
    require_replay(inputs, size)
    network = inputs.network
    if network.kind == "cnn" or (network.kind == "auto" and is_frames(inputs.observation_space)):
        raise ConfigError(
            f"network.kind is {network.kind!r}, and observations are {inputs.observation_space}",
            why="SAC's actor and critics are MLPs without convolutions",
            fix="choose ppo or impala for frames, or let the environment return vectors; "
            'network.kind = "mlp" takes frames as vectors',
        )
    is_tanh = network.activation == "tanh" and "activation" in network.model_fields_set
    unread = {
        "activation = 'tanh'": is_tanh,
        "shared = true": network.shared,
        "precision = 'bfloat16'": network.precision == "bfloat16",
    }
    for setting in (setting for setting, is_set in unread.items() if is_set):
        raise ConfigError(
            f"network.{setting}, which SAC does not read",
            why="SAC's actor and critics are separate float32 MLPs with relu",
            fix="remove it",
        )


ALGORITHM = ClassicAlgorithm(name="sac", config=SACConfig, learner=SACLearner, plan=plan, require=require)
