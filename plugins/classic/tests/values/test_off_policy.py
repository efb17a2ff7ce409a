"""Learners of DQN and SAC agree with their equations, row by row, and go on exactly from their state."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from plugins.classic.tests.values.written_fragments import random_stream
from rillflow.errors import ConfigError, NotFiniteError
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms.apex import ApexConfig
from rillflow_classic.algorithms.dqn import DQNConfig, DQNLearner, q_values
from rillflow_classic.algorithms.sac import SACConfig, SACLearner
from rillflow_classic.fragment import Array
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.off_policy import OffPolicyLearner, make_replay
from rillflow_classic.replay import ReplayConfig, Transitions

OBSERVATIONS = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
DISCRETE = gymnasium.spaces.Discrete(5)
BOX = gymnasium.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


def inputs(settings: Any, actions: Any) -> LearnerInputs:
    return LearnerInputs(
        observation_space=OBSERVATIONS,
        action_space=actions,
        network=NetworkConfig(hidden=(8,)),
        settings=settings,
        seed=3,
    )


def dqn(**settings: Any) -> DQNLearner:
    return DQNLearner(inputs(DQNConfig(batch_size=16, learning_starts=16, **settings), DISCRETE))


def sac(**settings: Any) -> SACLearner:
    return SACLearner(inputs(SACConfig(batch_size=16, learning_starts=16, lr=1e-2, **settings), BOX))


def batch(size: int = 16, seed: int = 0, *, continuous: bool = False) -> Transitions[Array]:
    random = np.random.default_rng(seed)
    actions = random.uniform(BOX.low, BOX.high, (size, 2)).astype(np.float32)
    return Transitions(
        observations=random.normal(size=(size, 2)).astype(np.float32),
        actions=actions if continuous else random.integers(0, 5, size),
        returns=random.normal(size=size).astype(np.float32),
        discounts=random.choice([0.0, 0.9, 0.81], size).astype(np.float32),
        next_observations=random.normal(size=(size, 2)).astype(np.float32),
        weights=random.uniform(0.5, 1, size).astype(np.float32),
        serials=np.arange(size),
    )


def row_of(network: Any, observation: Array, dueling: bool) -> list[float]:
    found: list[float] = q_values(network, torch.from_numpy(observation[None]), dueling)[0].tolist()
    return found


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_the_loss_of_dqn_is_that_of_a_loop(double: bool, dueling: bool) -> None:
    learner, data = dqn(double=double, dueling=dueling, target_every=100, huber=0.5), batch()
    for seed in range(3):
        learner.update(batch(seed=seed))  # the target network falls behind
    total = 0.0
    for row in range(16):
        now = row_of(learner.network, data.observations[row], dueling)
        judging = row_of(learner.network if double else learner.target, data.next_observations[row], dueling)
        later = row_of(learner.target, data.next_observations[row], dueling)
        target = data.returns[row] + data.discounts[row] * later[int(np.argmax(judging))]
        error = abs(now[data.actions[row]] - target)
        total += data.weights[row] * (0.5 * error**2 if error < 0.5 else 0.5 * (error - 0.25))
    loss, _ = learner.loss(data)
    assert float(loss.detach()) == pytest.approx(total / 16, rel=1e-5)


def test_the_target_network_is_copied_every_so_many_updates() -> None:
    learner = dqn(target_every=3)
    first = [each.clone() for each in learner.network.parameters()]
    for update in range(1, 7):
        learner.update(batch(seed=update))
        same = all(
            torch.equal(a, b)
            for a, b in zip(learner.target.parameters(), learner.network.parameters(), strict=True)
        )
        assert same == (update % 3 == 0)
    assert not all(torch.equal(a, b) for a, b in zip(learner.target.parameters(), first, strict=True))


def test_dueling_values_differ_by_advantages_of_mean_zero() -> None:
    network = dqn().network
    observations = torch.randn(7, 2)
    q, output = q_values(network, observations, True), network(observations)
    assert torch.allclose(q.mean(1), output.values, atol=1e-6)
    difference = q - output.parameters
    assert torch.allclose(difference, difference[:, :1].expand_as(difference), atol=1e-6)


def test_actions_are_random_with_the_probability_of_the_schedule() -> None:
    learner = dqn(epsilon_first=1.0, epsilon_last=0.1, epsilon_updates=10)
    observations = np.zeros((20_000, 2), np.float32)
    best = learner.policy.act(observations, greedy=True).actions
    for version, epsilon in ((-1, 1.0), (0, 1.0), (5, 0.55), (10, 0.1), (99, 0.1)):
        learner.policy.version = version
        share = (learner.policy.act(observations).actions != best).mean()
        assert share == pytest.approx(epsilon * 0.8, abs=0.02)


def test_the_slots_of_apex_have_a_ladder_of_epsilons() -> None:
    assert ApexConfig().epsilons(5, 8) == pytest.approx([0.4 ** (1 + i) for i in range(8)])
    assert ApexConfig().epsilons(0, 1) == pytest.approx([0.4])


def test_every_actor_of_apex_has_its_own_epsilon() -> None:
    """With one slot, those of the paper: epsilon^(1 + 7 i / (N - 1)) for actor i of N."""
    found = [ApexConfig().epsilons(0, 1, actor, 4)[0] for actor in range(4)]
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 3) for i in range(4)])
    whole = np.concatenate([ApexConfig().epsilons(0, 4, actor, 2) for actor in range(2)])
    assert whole == pytest.approx(ApexConfig().epsilons(0, 8))


def test_the_log_probability_of_sac_is_that_of_the_transformed_variable() -> None:
    actor, random = sac().network.actor, torch.Generator().manual_seed(0)
    actions, logprobs = actor.sample(torch.randn(50, 2, generator=random), random)
    random.manual_seed(0)
    mean, log = actor(torch.randn(50, 2, generator=random))
    wanted = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log.exp()), torch.distributions.TanhTransform(cache_size=1)
    )
    assert torch.allclose(logprobs, wanted.log_prob(actions.clamp(-1 + 1e-6, 1 - 1e-6)).sum(-1), atol=1e-3)


def test_every_part_of_sac_has_the_gradient_of_its_own_loss() -> None:
    """The critics' gradient is that of the Bellman error alone, although the actor's loss reads their Q."""
    learner, data = sac(), batch(continuous=True)
    network, target = learner.network, learner.target
    learner.loss(data)[0].backward()  # type: ignore[no-untyped-call]
    named: dict[str, Any] = {name: each.grad for name, each in network.named_parameters()}
    again = sac()
    random = again._random
    observations, following = (torch.from_numpy(a) for a in (data.observations, data.next_observations))
    actions = (torch.from_numpy(data.actions) - network.actor.centre) / network.actor.radius
    alpha = float(network.log_temperature.detach().exp())
    with torch.no_grad():
        later, later_logprobs = again.network.actor.sample(following, random)
        values = torch.stack([target.q(following, later)[i] for i in range(2)]).amin(0)
        y = torch.from_numpy(data.returns) + torch.from_numpy(data.discounts) * (
            values - alpha * later_logprobs
        )
    weights = torch.from_numpy(data.weights)
    critic_loss = sum(
        (weights * (again.network.q(observations, actions)[i] - y) ** 2).mean() for i in range(2)
    )
    wanted = torch.autograd.grad(critic_loss, list(again.network.critics.parameters()))  # type: ignore[arg-type]
    for (name, _), gradient in zip(again.network.critics.named_parameters(), wanted, strict=True):
        assert torch.allclose(named[f"critics.{name}"], gradient, atol=1e-5), name
    drawn, logprobs = again.network.actor.sample(observations, random)
    actor_loss = (alpha * logprobs - again.network.q(observations, drawn).amin(0)).mean()
    wanted = torch.autograd.grad(actor_loss, list(again.network.actor.parameters()))
    for (name, _), gradient in zip(again.network.actor.named_parameters(), wanted, strict=True):
        assert torch.allclose(named[f"actor.{name}"], gradient, atol=1e-5), name
    assert float(named["log_temperature"]) == pytest.approx(
        -alpha * float(logprobs.detach().mean() - 2), abs=1e-5
    )


def test_the_target_critics_follow_by_tau() -> None:
    learner = sac(tau=0.25)
    before = learner._target.detach().clone()
    learner.update(batch(continuous=True))
    wanted = before + 0.25 * (learner._flat.detach() - before)
    assert torch.allclose(learner._target.detach(), wanted, atol=1e-7)


def test_actions_of_sac_lie_in_the_space_and_are_uniform_before_the_first_update() -> None:
    policy = sac().policy
    observations = np.random.default_rng(0).normal(size=(20_000, 2)).astype(np.float32)
    actions = policy.act(observations).actions
    assert actions.mean(0) == pytest.approx([0.0, 0.5], abs=0.03)
    assert actions.std(0) == pytest.approx([4 / 12**0.5, 1 / 12**0.5], abs=0.02)
    policy.version = 1
    for greedy in (False, True):
        actions = policy.act(observations, greedy=greedy).actions
        assert (actions >= BOX.low).all() and (actions <= BOX.high).all()
        assert actions.dtype == np.float32


@pytest.mark.parametrize(("make", "continuous"), [(dqn, False), (sac, True)])
def test_a_restored_learner_takes_the_same_steps(make: Any, continuous: bool) -> None:
    learner: OffPolicyLearner[nn.Module] = make(replay=ReplayConfig(capacity=500, priority_exponent=0.6))
    buffer = make_replay(learner.inputs)
    stream = random_stream(60, 2, seed=1)
    if continuous:
        object.__setattr__(stream, "actions", np.zeros((60, 2, 2), np.float32))
    buffer.add(stream)
    learner.train(buffer)
    state = copy.deepcopy(learner.state())
    again = make(replay=ReplayConfig(capacity=500, priority_exponent=0.6))
    again.restore(state)
    other = make_replay(again.inputs)
    other.restore(copy.deepcopy(buffer.state()))
    assert again.version == again.policy.version == learner.version == 32
    for each, rows in ((learner, buffer), (again, other)):
        each.train(rows)
    for name, weights in learner.weights().items():
        assert np.array_equal(weights, again.weights()[name]), name


def test_the_learning_rate_falls_linearly_to_0() -> None:
    learner, steps = dqn(anneal_updates=4), []
    for _ in range(5):
        before = learner._flat.detach().clone()
        learner.update(batch())
        steps.append(float((learner._flat.detach() - before).abs().max()))
    assert steps[0] > steps[3] > steps[4] == 0


def test_a_reward_that_is_not_finite_leaves_the_weights() -> None:
    learner, data = dqn(), batch()
    before = learner.weights()
    data.returns[3] = np.nan
    with pytest.raises(NotFiniteError, match="update 0: the norm of the gradient is nan"):
        learner.update(data)
    assert all(np.array_equal(value, before[name]) for name, value in learner.weights().items())


def test_no_update_before_the_buffer_has_enough() -> None:
    learner = dqn()
    buffer = make_replay(learner.inputs)
    buffer.add(random_stream(7, 2, seed=0, ending=0.0))
    assert learner.train(buffer) == {} and learner.version == 0


def test_a_buffer_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replay\.capacity to at least 1000"):
        DQNConfig(replay=ReplayConfig(capacity=20))


def test_sac_refuses_actions_without_bounds() -> None:
    with pytest.raises(ConfigError, match="'sac' and the action space is Discrete"):
        SACLearner(inputs(SACConfig(), DISCRETE))
    free = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    with pytest.raises(ConfigError, match="finite bounds"):
        SACLearner(inputs(SACConfig(), free))
