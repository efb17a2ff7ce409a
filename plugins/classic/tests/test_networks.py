"""Networks: shapes, first weights, acting, and spaces that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rillflow.errors import ConfigError
from rillflow_classic.networks.acting import NetworkPolicy, weights_of
from rillflow_classic.networks.build import build_network
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.networks.distributions import CategoricalActions, GaussianActions
from rillflow_classic.networks.passes import NumpyMLP

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
COLOURS = spaces.Box(0, 255, (96, 96, 3), np.uint8)
TWO = spaces.Discrete(2)
PUSH = spaces.Box(-2, 2, (3,), np.float32)


@pytest.mark.parametrize("actions", [TWO, PUSH])
@pytest.mark.parametrize(
    ("kind", "observations"),
    [
        ("auto", VECTOR),
        ("auto", spaces.Discrete(5)),
        ("auto", FRAMES),
        ("cnn", COLOURS),
        ("mlp", spaces.Box(-1, 1, (3, 2), np.float64)),
        ("lstm", VECTOR),
        ("lstm", FRAMES),
    ],
)
def test_every_network_acts_in_every_space(
    kind: str, observations: spaces.Space, actions: spaces.Space
) -> None:
    network = build_network(NetworkConfig(kind=kind), observations, actions, seed=3)
    policy = NetworkPolicy(network, seed=0)
    given = np.stack([observations.sample() for _ in range(6)])
    state = policy.initial_state(6)
    acted = policy.act(given, state)
    assert acted.actions.shape == (6, *actions.shape)
    assert acted.actions.dtype == (np.int64 if actions is TWO else np.float32)
    assert {name: value.shape for name, value in acted.outputs.items()} == {"logprobs": (6,), "values": (6,)}
    assert (state is None) == (acted.state is None) == (kind != "lstm")
    if acted.state is not None:
        assert acted.state.shape == state.shape and np.abs(acted.state).sum() > 0
    output = network(torch.from_numpy(given), None if state is None else torch.from_numpy(state))
    logprobs, _ = network.distribution.evaluate(output.parameters, torch.from_numpy(acted.actions))
    np.testing.assert_allclose(logprobs.detach(), acted.outputs["logprobs"], atol=1e-5)


def test_the_first_policy_is_near_uniform_and_seeded() -> None:
    one, same, other = (build_network(NetworkConfig(), VECTOR, TWO, seed) for seed in (1, 1, 2))
    for name, value in weights_of(one).items():
        np.testing.assert_array_equal(value, weights_of(same)[name])
    assert any((weights_of(other)[name] != value).any() for name, value in weights_of(one).items())
    layer = one.trunks[0][3].weight
    torch.testing.assert_close(layer @ layer.T, 2 * torch.eye(64), atol=1e-5, rtol=0)
    assert float(one.policy_head.weight.detach().norm(dim=1).max()) == pytest.approx(0.01, abs=1e-5)
    assert float(one.value_head.weight.detach().norm()) == pytest.approx(1, abs=1e-5)


def test_frames_are_divided_by_255() -> None:
    network = build_network(NetworkConfig(), FRAMES, TWO, seed=0)
    white = torch.full((1, 4, 84, 84), 255, dtype=torch.uint8)
    torch.testing.assert_close(network.trunks[0][0](white), torch.ones(1, 4, 84, 84))


def test_a_cnn_in_bfloat16_is_close_to_float32() -> None:
    frames = torch.randint(0, 255, (3, 4, 84, 84), dtype=torch.uint8)
    one, other = (
        build_network(NetworkConfig(precision=precision), FRAMES, TWO, seed=0)(frames)
        for precision in ("float32", "bfloat16")
    )
    assert other.values.dtype == torch.float32 and not torch.equal(one.values, other.values)
    torch.testing.assert_close(one.values, other.values, atol=0.05, rtol=0.05)


def test_channels_may_come_last() -> None:
    first, last = spaces.Box(0, 255, (3, 84, 84), np.uint8), spaces.Box(0, 255, (84, 84, 3), np.uint8)
    frames = torch.randint(0, 255, (2, 3, 84, 84), dtype=torch.uint8)
    one, other = (build_network(NetworkConfig(), space, TWO, seed=0) for space in (first, last))
    torch.testing.assert_close(one(frames).values, other(frames.permute(0, 2, 3, 1)).values)


def test_actions_follow_their_probabilities() -> None:
    parameters = torch.log(torch.tensor([0.1, 0.2, 0.7])).expand(20_000, 3)
    actions, logprobs = CategoricalActions(3).draw(parameters.numpy(), np.random.default_rng(0))
    shares = np.bincount(actions, minlength=3) / len(actions)
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.7], atol=0.02)  # 5 standard errors
    np.testing.assert_allclose(np.exp(logprobs), np.array([0.1, 0.2, 0.7])[actions], rtol=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
def test_gaussian_actions_match_torch(greedy: bool) -> None:
    gaussian, parameters = GaussianActions(2), torch.tensor([[1.0, -1.0, 0.5, -0.5]]).expand(20_000, 4)
    reference = torch.distributions.Normal(parameters[:, :2], parameters[:, 2:].exp())
    actions, logprobs = gaussian.draw(parameters.numpy(), None if greedy else np.random.default_rng(0))
    expected = reference.log_prob(torch.from_numpy(actions)).sum(1)
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    evaluated, entropy = gaussian.evaluate(parameters, torch.from_numpy(actions))
    torch.testing.assert_close(evaluated, expected)
    torch.testing.assert_close(entropy, reference.entropy().sum(1))
    np.testing.assert_allclose(actions.mean(0), [1, -1], atol=0.05)


def test_the_entropy_of_categorical_actions_matches_torch() -> None:
    logits = torch.randn(7, 5)
    reference = torch.distributions.Categorical(logits=logits)
    actions = reference.sample()
    logprobs, entropy = CategoricalActions(5).evaluate(logits, actions)
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(logprobs, reference.log_prob(actions))


@pytest.mark.parametrize(
    "actions", [TWO, spaces.Box(-1, 1, (3,), np.float32)], ids=["discrete", "continuous"]
)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_gradients_of_an_mlp_in_numpy_are_autograds(
    actions: spaces.Space, shared: bool, activation: str
) -> None:
    config = NetworkConfig(hidden=(16, 8), shared=shared, activation=activation)
    network, generator = build_network(config, VECTOR, actions, seed=2), np.random.default_rng(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    given = generator.standard_normal((9, *VECTOR.shape), dtype=np.float32)
    acted = NetworkPolicy(network, seed=1).act(given).actions
    by_logprobs, by_values = generator.standard_normal((2, 9), dtype=np.float32)
    output = network(torch.from_numpy(given))
    logprobs, entropies = network.distribution.evaluate(output.parameters, torch.from_numpy(acted))
    loss = logprobs.dot(torch.from_numpy(by_logprobs)) + output.values.dot(torch.from_numpy(by_values))
    (loss + 0.3 * entropies.sum()).backward()
    expected = [parameter.grad.clone() for parameter in network.parameters()]
    for parameter in network.parameters():
        parameter.grad.fill_(7.0)  # the pass overwrites what is there
    passed = NumpyMLP(network).forward(given)
    derived = network.distribution.derive(passed.parameters, acted)
    np.testing.assert_allclose(derived.logprobs, logprobs.detach(), atol=1e-5)
    np.testing.assert_allclose(derived.entropies, entropies.detach(), atol=1e-5)
    passed.backward(derived.gradient(by_logprobs, 0.3), by_values)
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-4)


def test_a_seed_repeats_actions_and_greedy_needs_none() -> None:
    policy = NetworkPolicy(build_network(NetworkConfig(), VECTOR, PUSH, seed=0), seed=5)
    given = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    first = [policy.act(given).actions for _ in range(3)]
    policy.seed(5)
    np.testing.assert_array_equal(first, [policy.act(given).actions for _ in range(3)])
    np.testing.assert_array_equal(*(policy.act(given, greedy=True).actions for _ in range(2)))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shared", [False, True])
def test_an_mlp_in_numpy_is_the_mlp_in_torch(activation: str, shared: bool) -> None:
    config = NetworkConfig(hidden=(32, 16), activation=activation, shared=shared)
    network = build_network(config, VECTOR, PUSH, seed=0)
    policy = NetworkPolicy(network)
    given = np.random.default_rng(0).normal(size=(5, 4))
    for _ in range(2):
        acted = policy.act(given, greedy=True)
        with torch.no_grad():
            output = network(torch.from_numpy(given))
            np.testing.assert_allclose(acted.outputs["values"], output.values, atol=1e-5)
            np.testing.assert_allclose(acted.actions, output.parameters[:, :3], atol=1e-6)
            for parameter in network.parameters():  # a step of an optimiser reaches the policy
                parameter.add_(0.1)


def test_loaded_weights_act() -> None:
    networks = [build_network(NetworkConfig(), VECTOR, TWO, seed) for seed in (0, 1)]
    policies = [NetworkPolicy(network) for network in networks]
    given = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    policies[1].load(7, weights_of(networks[0]))
    assert (policies[0].version, policies[1].version) == (-1, 7)
    values = [policy.act(given).outputs["values"] for policy in policies]
    np.testing.assert_array_equal(*values)


def test_an_lstm_unrolled_is_the_lstm_stepped() -> None:
    network = build_network(NetworkConfig(kind="lstm", lstm_size=8), VECTOR, TWO, seed=0)
    observations = torch.randn(9, 3, 4)
    starts = torch.rand(9, 3) < 0.3
    state = torch.randn(3, 2, 8)
    with torch.no_grad():
        unrolled = network.unroll(observations, state, starts)
        stepped, now = [], state
        for row, start in zip(observations, starts, strict=True):
            output = network(row, torch.where(start[:, None, None], 0.0, now))
            stepped.append(output.values)
            now = output.state
    torch.testing.assert_close(unrolled.values, torch.cat(stepped))
    torch.testing.assert_close(unrolled.state, now)


@pytest.mark.parametrize(
    ("kind", "observations", "actions", "message"),
    [
        ("cnn", VECTOR, TWO, r"does not fit a cnn.*\n.*shape \(4,\) of float32"),
        (
            "cnn",
            spaces.Box(0, 255, (4, 2, 2), np.uint8),
            TWO,
            r"frames of shape \[4, 2, 2\] are too small",
        ),
        ("mlp", spaces.Dict({"a": VECTOR}), TWO, "the observations of a network are Dict"),
        ("auto", VECTOR, spaces.MultiBinary(3), r"action space MultiBinary\(3\) has no distribution"),
        ("auto", VECTOR, spaces.Box(-1, 1, (2, 2), np.float32), r"action space Box.*\(2, 2\)"),
    ],
)
def test_a_space_that_does_not_fit_is_named(
    kind: str, observations: spaces.Space, actions: spaces.Space, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_network(NetworkConfig(kind=kind), observations, actions, seed=0)
