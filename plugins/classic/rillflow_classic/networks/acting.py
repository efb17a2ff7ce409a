"""Acting: a network as the policy of an actor.

observations [B, ...] ─ network, without gradients ─ sample with an own generator ─> actions, logprobs, values
"""

from __future__ import annotations

import numpy as np
import torch

from rillflow_classic.fragment import Array
from rillflow_classic.networks.build import ActorCritic
from rillflow_classic.policy import Acted, Weights


class NetworkPolicy:
    """An ``ActorPolicy`` that acts with a network, which it does not copy.

    Args:
        network: the network.
        seed: seed of the random numbers of its actions.

    Example:
        policy = NetworkPolicy(build_network(config, observation_space, action_space, seed=0), seed=1)
        acted = policy.act(observations)
    """

    def __init__(self, network: ActorCritic, seed: int = 0) -> None:
        self.network = network
        """The network."""
        self.version = -1
        self._distribution = network.distribution
        self.seed(seed)

    @torch.inference_mode()
    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        """See ActorPolicy; ``outputs`` holds ``logprobs`` and ``values``."""
        given = None if state is None else torch.from_numpy(state)
        output = self.network(torch.from_numpy(observations), given)
        if greedy:
            actions, logprobs = self._distribution.mode(output.parameters)
        else:
            actions, logprobs = self._distribution.sample(output.parameters, self._generator)
        return Acted(
            actions=actions,
            outputs={"logprobs": logprobs, "values": output.values.numpy()},
            state=None if output.state is None else output.state.numpy(),
        )

    def initial_state(self, num_slots: int) -> Array | None:
        """See ActorPolicy."""
        size = self.network.lstm_size
        return np.zeros((num_slots, 2, size), np.float32) if size else None

    def seed(self, seed: int) -> None:
        """See ActorPolicy."""
        self._generator = np.random.default_rng(seed)

    def load(self, version: int, weights: Weights) -> None:
        """See ActorPolicy.

        Raises:
            RuntimeError: names or shapes differ from the network's.
        """
        self.network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self.version = version


def weights_of(network: torch.nn.Module) -> Weights:
    """Return a copy of all weights."""
    return {name: value.detach().cpu().numpy().copy() for name, value in network.state_dict().items()}
