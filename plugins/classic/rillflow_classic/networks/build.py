"""Networks: trunks for vectors and frames, an LSTM after them, and heads for actions and values.

observations [B, ...] ─ MLP or CNN ─ (LSTM <─ state) ─┬─ policy head ─> parameters [B, P]
                                                      └─ value head ──> values [B]

Weights start orthogonal, with the gains of Stable-Baselines3 and CleanRL: sqrt(2) for hidden layers, 0.01 for
the policy head, 1 for the value head and the LSTM; biases and log deviations start at 0.

Legend: T steps, N slots, B rows, F features, H width of the LSTM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rillflow.errors import ConfigError
from rillflow_classic.environments.vector import Space, array_space
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.networks.distributions import CategoricalActions, Distribution, GaussianActions

Layers = tuple[tuple[int, int, int], ...]
"""Channels, kernel and stride of each convolution."""
CNNS: dict[int, tuple[Layers, int]] = {
    36: (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),  # Mnih et al. 2015
    3: (((16, 3, 1),), 128),  # MinAtar (Young and Tian, arXiv 1903.03176)
}
"""Convolutions and features by the smallest height and width that they take."""


@dataclass(frozen=True, kw_only=True)
class NetworkOutput:
    """What a network returns for a batch of observations."""

    parameters: Tensor
    """[B, P] parameters of the distribution of actions."""
    values: Tensor
    """[B] estimated returns."""
    state: Tensor | None = None
    """[B, 2, H] recurrent state after the observations; None without one."""


class ActorCritic(nn.Module):
    """A policy and a value function.

    Args:
        trunks: one trunk that both share, or the policy's and the value's.
        features: width of a trunk's result.
        distribution: the distribution of actions.
        lstm_size: width of an LSTM after the one trunk; 0 for none.
    """

    def __init__(
        self, trunks: Sequence[nn.Module], features: int, distribution: Distribution, lstm_size: int
    ) -> None:
        super().__init__()
        self.distribution, self.lstm_size = distribution, lstm_size
        self.trunks = nn.ModuleList(trunks)
        self.lstm = nn.LSTM(features, lstm_size) if lstm_size else None
        width, free = lstm_size or features, distribution.num_free
        self.policy_head = nn.Linear(width, distribution.num_parameters - free)
        self.value_head = nn.Linear(width, 1)
        self.log_deviations = nn.Parameter(torch.zeros(free)) if free else None

    def forward(self, observations: Tensor, state: Tensor | None = None) -> NetworkOutput:
        """Return parameters and values of observations [B, ...]; an LSTM takes one step."""
        features = self.trunks[0](observations)
        if self.lstm is not None and state is not None:
            steps, state = self._stepped(features[None], state)
            return self._headed(steps[0], steps[0], state)
        return self._headed(features, self.trunks[1](observations) if len(self.trunks) > 1 else features)

    def unroll(self, observations: Tensor, state: Tensor | None, starts: Tensor) -> NetworkOutput:
        """Return parameters [T * N, P] and values [T * N] of fragments, with the LSTM run through time.

        Args:
            observations: [T, N, ...].
            state: [N, 2, H] before step 0; None without an LSTM.
            starts: [T, N] bool: rows before which a slot's state is zero again.
        """
        flat = observations.flatten(0, 1)
        if self.lstm is None or state is None:
            return self(flat)  # type: ignore[no-any-return]
        features = self.trunks[0](flat).unflatten(0, observations.shape[:2])
        cuts = [0, *(starts[1:].any(dim=1).nonzero().flatten() + 1).tolist(), len(starts)]
        parts = []
        for first, last in pairwise(cuts):
            state = torch.where(starts[first, :, None, None], 0.0, state)
            part, state = self._stepped(features[first:last], state)
            parts.append(part)
        joined = torch.cat(parts).flatten(0, 1)
        return self._headed(joined, joined, state)

    def _stepped(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run the LSTM over features [T, N, F] from state [N, 2, H]."""
        assert self.lstm is not None
        hidden, cell = state.transpose(0, 1).contiguous().unbind()
        result, (hidden, cell) = self.lstm(features, (hidden[None], cell[None]))
        return result, torch.cat([hidden, cell]).transpose(0, 1)

    def _headed(self, policy: Tensor, value: Tensor, state: Tensor | None = None) -> NetworkOutput:
        parameters = self.policy_head(policy)
        if self.log_deviations is not None:
            parameters = torch.cat([parameters, self.log_deviations.expand_as(parameters)], dim=-1)
        return NetworkOutput(parameters=parameters, values=self.value_head(value).squeeze(-1), state=state)


class Inputs(nn.Module):
    """Observations as floats: flat vectors [B, F], one-hot vectors of numbers, or frames between 0 and 1.

    Args:
        num_values: how many numbers a Discrete space has; 0 for arrays.
        axes: for frames, the axes of channels, height and width.
    """

    def __init__(self, num_values: int = 0, axes: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        self.num_values, self.axes = num_values, axes

    def forward(self, observations: Tensor) -> Tensor:
        """Convert a batch. Frames are channels-last in memory: convolutions are 1.5 times as fast."""
        if self.num_values:
            return nn.functional.one_hot(observations.long().flatten(), self.num_values).float()
        if self.axes is None:
            return observations.flatten(1).float()
        frames = observations.permute(0, *(axis + 1 for axis in self.axes))
        return frames.to(torch.float32, memory_format=torch.channels_last).mul_(1 / 255)


class CNN(nn.Sequential):
    """Convolutions over frames, in float32 or bfloat16; the result is float32."""

    def __init__(self, *layers: nn.Module, is_bfloat16: bool) -> None:
        super().__init__(*layers)
        self.is_bfloat16 = is_bfloat16

    def forward(self, observations: Tensor) -> Tensor:
        """Return features [B, F]."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bfloat16):
            return super().forward(observations).float()  # type: ignore[no-any-return, no-untyped-call]


def build_network(
    config: NetworkConfig, observation_space: Space, action_space: Space, seed: int
) -> ActorCritic:
    """Return a network for these spaces; the same seed gives the same weights.

    Raises:
        ConfigError: a space does not fit the network; the message names the space and its shape.
    """
    distribution = distribution_of(action_space)
    lstm_size = config.lstm_size if config.kind == "lstm" else 0
    trunks: list[nn.Module]
    with torch.random.fork_rng(devices=[]):  # default weights are drawn from torch's global generator
        if config.kind == "cnn" or (is_frames(observation_space) and config.kind != "mlp"):
            trunk, features = _cnn(observation_space, config.precision)
            trunks = [trunk]
        else:
            count = 1 if config.shared or lstm_size else 2
            trunks = [_mlp(config, observation_space) for _ in range(count)]
            features = (_num_inputs(observation_space), *config.hidden)[-1]
        network = ActorCritic(trunks, features, distribution, lstm_size)
    _initialise(network, torch.Generator().manual_seed(seed))
    return network


def distribution_of(action_space: Space) -> Distribution:
    """Return the distribution for an action space.

    Raises:
        ConfigError: the space is neither discrete nor a vector of floats.
    """
    if isinstance(action_space, spaces.Discrete):
        return CategoricalActions(int(action_space.n))
    is_vector = isinstance(action_space, spaces.Box) and len(action_space.shape) == 1
    if is_vector and np.issubdtype(action_space.dtype, np.floating):
        return GaussianActions(math.prod(action_space.shape or ()))
    raise ConfigError(
        f"the action space {action_space} has no distribution",
        why="networks act in Discrete spaces and in Box spaces of floats of shape [A]",
        fix="flatten the space with a wrapper of the environment",
    )


def inputs_of(space: Space) -> Inputs:
    """Return the module that makes vectors [B, F] of observations."""
    return Inputs(int(space.n) if isinstance(space, spaces.Discrete) else 0)


def is_frames(space: Space) -> bool:
    """Return whether observations are frames: bytes with channels, height and width."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8


def _num_inputs(space: Space) -> int:
    space = array_space(space, "the observations of a network")
    return int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or ())


def _mlp(config: NetworkConfig, space: Space) -> nn.Sequential:
    widths = _num_inputs(space), *config.hidden
    layers: list[nn.Module] = [inputs_of(space)]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh() if config.activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*layers)


def _cnn(space: Space, precision: str) -> tuple[CNN, int]:
    """Return the convolutions for frames of this size, and the number of their features."""
    if not is_frames(space):
        raise ConfigError(
            f"the observation space {space} does not fit a cnn",
            why=f"a cnn takes uint8 frames of three axes; this one has shape {space.shape} of {space.dtype}",
            fix='set network.kind to "mlp", or let the environment return frames',
        )
    assert space.shape is not None
    axes = (2, 0, 1) if space.shape[2] <= 4 < space.shape[0] else (0, 1, 2)
    channels, height, width = (space.shape[axis] for axis in axes)
    fitting = [cnn for size, cnn in CNNS.items() if size <= min(height, width)]
    if not fitting:
        raise ConfigError(
            f"frames of shape {list(space.shape)} are too small for a cnn",
            why=f"convolutions need at least {min(CNNS)} x {min(CNNS)} pixels",
            fix='set network.kind to "mlp", or enlarge the frames',
        )
    convolutions, features = fitting[0]
    layers: list[nn.Module] = [Inputs(axes=axes)]
    for size, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, size, kernel, stride), nn.ReLU()]
        channels, height, width = size, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    layers += [nn.Flatten(), nn.Linear(channels * height * width, features), nn.ReLU()]
    return CNN(*layers, is_bfloat16=precision == "bfloat16"), features


@torch.no_grad()
def _initialise(network: ActorCritic, generator: torch.Generator) -> None:
    gains: dict[nn.Module, float] = {network.policy_head: 0.01, network.value_head: 1.0}
    for module in network.modules():
        gain = gains.get(module, 1.0 if isinstance(module, nn.LSTM) else math.sqrt(2))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter, gain, generator)
            else:
                parameter.zero_()
