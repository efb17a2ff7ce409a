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
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rillflow.errors import ConfigError
from rillflow_classic.networks.config import ActivationName, NetworkConfig
from rillflow_classic.networks.distributions import CategoricalActions, Distribution, GaussianActions

Space = gymnasium.Space[Any]

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
        log_deviations: number of learnt log deviations that do not depend on the observation.
        lstm_size: width of an LSTM after the one trunk; 0 for none.
    """

    def __init__(
        self,
        trunks: Sequence[nn.Module],
        features: int,
        distribution: Distribution,
        *,
        log_deviations: int = 0,
        lstm_size: int = 0,
    ) -> None:
        super().__init__()
        self.distribution = distribution
        self.lstm_size = lstm_size
        self.trunks = nn.ModuleList(trunks)
        self.lstm = nn.LSTM(features, lstm_size) if lstm_size else None
        width = lstm_size or features
        self.policy_head = nn.Linear(width, distribution.num_parameters - log_deviations)
        self.value_head = nn.Linear(width, 1)
        self.log_deviations = nn.Parameter(torch.zeros(log_deviations)) if log_deviations else None

    def forward(self, observations: Tensor, state: Tensor | None = None) -> NetworkOutput:
        """Return parameters and values of observations [B, ...]; an LSTM takes one step."""
        if self.lstm is not None and state is not None:
            features = self.trunks[0](observations)
            features, state = self._stepped(features[None], state)
            return self._headed(features[0], features[0], state)
        features = self.trunks[0](observations)
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


class NumpyTanh(torch.autograd.Function):
    """tanh in numpy, which takes a tenth of torch's time on a CPU; it can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:  # without setup_context, which takes 40 us
        """Return tanh(x)."""
        result = torch.from_numpy(np.tanh(inputs.numpy()))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient times 1 - tanh(x)^2."""
        result: Tensor = torch.ops.aten.tanh_backward(gradient, *ctx.saved_tensors)
        return result


class Tanh(nn.Module):
    """tanh, on the CPU by numpy."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return tanh(x)."""
        if inputs.device.type != "cpu":
            return torch.tanh(inputs)
        return NumpyTanh.apply(inputs)  # type: ignore[no-any-return, no-untyped-call]


class Vectors(nn.Module):
    """Observations as float vectors [B, F]."""

    def forward(self, observations: Tensor) -> Tensor:
        """Flatten and convert."""
        return observations.flatten(1).float()


class OneHot(nn.Module):
    """Numbers [B] as one-hot vectors [B, size]."""

    def __init__(self, size: int, start: int) -> None:
        super().__init__()
        self.size, self.start = size, start

    def forward(self, observations: Tensor) -> Tensor:
        """Return a 1 at each observation."""
        return nn.functional.one_hot(observations.long().flatten() - self.start, self.size).float()


class Frames(nn.Module):
    """Bytes [B, ...] as floats between 0 and 1, channels first."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last

    def forward(self, observations: Tensor) -> Tensor:
        """Divide by 255. In memory the channels come last, which makes convolutions 1.5 times as fast."""
        frames = observations.permute(0, 3, 1, 2) if self.channels_last else observations
        return frames.to(torch.float32, memory_format=torch.channels_last).mul_(1 / 255)


class CNN(nn.Sequential):
    """Convolutions over frames, in float32 or bfloat16; the result is float32."""

    def __init__(self, *layers: nn.Module, is_bfloat16: bool) -> None:
        super().__init__(*layers)
        self.is_bfloat16 = is_bfloat16

    def forward(self, observations: Tensor) -> Tensor:
        """Return features [B, F]."""
        if not self.is_bfloat16:
            return super().forward(observations)  # type: ignore[no-any-return, no-untyped-call]
        with torch.autocast("cpu", torch.bfloat16):
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
    frames = is_frames(observation_space)
    continuous = isinstance(distribution, GaussianActions)
    with torch.device("meta"):  # no default weights: they would draw from torch's global generator
        if config.kind == "cnn" or (frames and config.kind in ("auto", "lstm")):
            trunk, features = _cnn(observation_space, config.precision)
            trunks: list[nn.Module] = [trunk]
        else:
            count = 1 if config.shared or lstm_size else 2
            trunks = [_mlp(config.hidden, config.activation, observation_space) for _ in range(count)]
            features = (_num_inputs(observation_space), *config.hidden)[-1]
        network = ActorCritic(
            trunks,
            features,
            distribution,
            log_deviations=distribution.num_parameters // 2 if continuous else 0,
            lstm_size=lstm_size,
        )
    network.to_empty(device="cpu")
    _initialise(network, torch.Generator().manual_seed(seed))
    return network


def distribution_of(action_space: Space) -> Distribution:
    """Return the distribution for an action space.

    Raises:
        ConfigError: the space is neither discrete nor a vector of floats.
    """
    if isinstance(action_space, spaces.Discrete) and action_space.start == 0:
        return CategoricalActions(int(action_space.n))
    if (
        isinstance(action_space, spaces.Box)
        and len(action_space.shape) == 1
        and action_space.dtype.kind == "f"
    ):
        return GaussianActions(math.prod(action_space.shape or ()))
    raise ConfigError(
        f"the action space {action_space} has no distribution",
        why="networks act in Discrete spaces that start at 0 and in Box spaces of floats of shape [A]",
        fix="flatten the space with a wrapper of the environment",
    )


def is_frames(space: Space) -> bool:
    """Return whether observations are frames: bytes with channels, height and width."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8


def _num_inputs(space: Space) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    raise ConfigError(
        f"the observation space {space} does not fit an mlp",
        why="an mlp takes Box spaces, flattened, and Discrete spaces, as one-hot vectors",
        fix="flatten the space with a wrapper of the environment",
    )


def _mlp(hidden: Sequence[int], activation: ActivationName, space: Space) -> nn.Sequential:
    width = _num_inputs(space)
    one_hot = isinstance(space, spaces.Discrete)
    layers: list[nn.Module] = [OneHot(width, int(space.start)) if one_hot else Vectors()]  # type: ignore[attr-defined]
    for size in hidden:
        layers += [nn.Linear(width, size), Tanh() if activation == "tanh" else nn.ReLU()]
        width = size
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
    channels_last = space.shape[2] <= 4 < space.shape[0]
    channels, height, width = space.shape if not channels_last else (space.shape[2], *space.shape[:2])
    fitting = [cnn for size, cnn in CNNS.items() if size <= min(height, width)]
    if not fitting:
        raise ConfigError(
            f"frames of shape {list(space.shape)} are too small for a cnn",
            why=f"convolutions need at least {min(CNNS)} x {min(CNNS)} pixels",
            fix='set network.kind to "mlp", or enlarge the frames',
        )
    convolutions, features = fitting[0]
    layers: list[nn.Module] = [Frames(channels_last)]
    for size, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, size, kernel, stride), nn.ReLU()]
        channels, height, width = size, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    linear = nn.Linear(channels * height * width, features)
    cnn = CNN(*layers, nn.Flatten(), linear, nn.ReLU(), is_bfloat16=precision == "bfloat16")
    return cnn, features


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
