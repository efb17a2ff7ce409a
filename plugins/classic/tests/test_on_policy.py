"""The learner of PPO and A2C: identities, masks, exact continuation, bad numbers, several ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.workers.backend import Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms import a2c, ppo
from rillflow_classic.data_parallel import DataParallelLearner, split_by_slots
from rillflow_classic.formulas import gae
from rillflow_classic.fragment import FinishedEpisode, Fragment, joined
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.build import build_network
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.on_policy import OnPolicyConfig, OnPolicyLearner

OBSERVATIONS = spaces.Box(-1, 1, (3,), np.float32)
ACTIONS = {"discrete": spaces.Discrete(2), "continuous": spaces.Box(-1, 1, (2,), np.float32)}
NETWORKS = {"mlp": NetworkConfig(hidden=(8,)), "lstm": NetworkConfig(kind="lstm", hidden=(8,), lstm_size=5)}


def inputs(
    settings: OnPolicyConfig | None = None, network: str = "mlp", actions: str = "discrete"
) -> LearnerInputs:
    return LearnerInputs(
        observation_space=OBSERVATIONS,
        action_space=ACTIONS[actions],
        network=NETWORKS[network],
        settings=settings or ppo.ClassicPPOConfig(lr=1e-2, epochs=2, minibatches=3),
        seed=4,
    )


def make_learner(rank: int, given: LearnerInputs) -> OnPolicyLearner:
    del rank
    return OnPolicyLearner(given)


def play(learner: OnPolicyLearner, seed: int = 0, length: int = 9, slots: int = 4) -> Fragment:
    """Act with a learner's policy on random observations, with ends and resets."""
    random = np.random.default_rng(seed)
    observations = random.normal(size=(length + 1, slots, 3)).astype(np.float32)
    ended = random.random((length, slots)) < 0.2
    valid = np.ones((length, slots), bool)
    for t in range(1, length):
        valid[t] = ~ended[t - 1]
        ended[t] &= valid[t]
    terminated = ended & (random.random((length, slots)) < 0.5)
    learner.policy.seed(seed)
    first = state = learner.policy.initial_state(slots)
    acted = []
    for t in range(length):
        acted.append(learner.policy.act(observations[t], state))
        state = acted[-1].state
        if state is not None:
            state = np.where(valid[t][:, None, None], state, 0)
    return Fragment(
        observations=observations,
        actions=np.stack([each.actions for each in acted]),
        rewards=(random.normal(size=(length, slots)) * valid).astype(np.float32),
        terminated=terminated,
        truncated=ended & ~terminated,
        valid=valid,
        outputs={name: np.stack([each.outputs[name] for each in acted]) for name in ("logprobs", "values")},
        state=first,
        versions=np.full(length, learner.version),
        episodes=(FinishedEpisode(total_reward=3.0, length=5), FinishedEpisode(total_reward=5.0, length=7)),
    )


def assert_equal_weights(one: OnPolicyLearner, other: OnPolicyLearner) -> None:
    for name, value in one.weights().items():
        np.testing.assert_array_equal(value, other.weights()[name], err_msg=name)


def test_the_gradient_of_a2c_is_that_of_the_log_probabilities() -> None:
    settings = a2c.A2CConfig()
    learner = OnPolicyLearner(inputs(settings))
    data = play(learner)
    gradients, _ = learner.gradients(data)
    network = build_network(NETWORKS["mlp"], OBSERVATIONS, ACTIONS["discrete"], seed=4)
    output = network(torch.from_numpy(data.observations).flatten(0, 1))
    values = output.values.view(10, 4)
    steps = [torch.from_numpy(each) for each in (data.rewards, data.terminated, data.truncated, data.valid)]
    rewards, terminated, truncated, valid = steps
    advantages = gae(rewards, values.detach(), terminated, truncated, valid, gamma=0.99, lam=1.0)
    chosen = torch.distributions.Categorical(logits=output.parameters.view(10, 4, 2)[:-1])
    errors = values[:-1] - (advantages + values[:-1].detach())
    losses = -advantages * chosen.log_prob(torch.from_numpy(data.actions)) + 0.5 * errors**2
    losses = losses - settings.entropy_weight * chosen.entropy()
    (losses[valid].sum() / valid.sum()).backward()
    for gradient, parameter in zip(gradients, network.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_an_a2c_update_is_one_ppo_step_with_any_clip() -> None:
    settings = a2c.A2CConfig(lr=1e-2)
    one = OnPolicyLearner(inputs(settings))
    other = OnPolicyLearner(inputs(ppo.ClassicPPOConfig(**settings.model_dump() | {"clip": 1e-3})))
    data = play(one)
    one.update(data)
    other.update(data)
    assert_equal_weights(one, other)


def test_an_update_is_gradients_then_apply() -> None:
    one, other = (OnPolicyLearner(inputs(a2c.A2CConfig(lr=1e-2))) for _ in range(2))
    data = play(one)
    metrics = one.update(data)
    gradients, same = other.gradients(data)
    other.apply(gradients)
    for name, value in one.weights().items():
        np.testing.assert_allclose(value, other.weights()[name], atol=1e-6)
    assert metrics["policy/value_loss/mean"].value == pytest.approx(same["policy/value_loss/mean"].value)
    assert one.version == other.version == other.policy.version == 1


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("actions", ACTIONS)
def test_the_first_minibatch_has_ratio_1(network: str, actions: str) -> None:
    learner = OnPolicyLearner(inputs(a2c.A2CConfig(), network, actions))
    _, metrics = learner.gradients(play(learner))
    assert metrics["policy/approximate_kl/mean"].value == pytest.approx(0, abs=1e-6)
    assert metrics["policy/clipped/share"].value == 0


@pytest.mark.parametrize("network", NETWORKS)
def test_rows_that_reset_teach_nothing(network: str) -> None:
    one, other = (OnPolicyLearner(inputs(network=network)) for _ in range(2))
    data = play(one)
    assert not data.valid.all()
    rows = ~data.valid
    changed = replace(
        data,
        actions=np.where(rows, 1 - data.actions, data.actions),
        rewards=np.where(rows, np.float32(1e3), data.rewards),
        outputs={**data.outputs, "logprobs": np.where(rows, np.float32(-50), data.outputs["logprobs"])},
    )
    one.update(data)
    other.update(changed)
    assert_equal_weights(one, other)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("actions", ACTIONS)
def test_a_restored_learner_continues_bit_by_bit(network: str, actions: str) -> None:
    given = inputs(ppo.ClassicPPOConfig(anneal_updates=10), network, actions)
    one, other = OnPolicyLearner(given), OnPolicyLearner(given)
    fragments = [play(one, seed) for seed in range(4)]
    for data in fragments[:2]:
        one.update(data)
    other.restore(one.state())
    assert other.version == 2
    for data in fragments[2:]:
        one.update(data)
        other.update(data)
    assert_equal_weights(one, other)


def test_a_fresh_learner_restores_too() -> None:
    one, other = OnPolicyLearner(inputs()), OnPolicyLearner(inputs())
    other.update(play(other))
    other.restore(one.state())
    data = play(one)
    one.update(data)
    other.update(data)
    assert_equal_weights(one, other)


def test_the_learning_rate_falls_to_zero() -> None:
    learner = OnPolicyLearner(inputs(ppo.ClassicPPOConfig(anneal_updates=2)))
    for _ in range(2):
        learner.update(play(learner))
    before = learner.weights()
    learner.update(play(learner))
    for name, value in learner.weights().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("field", "culprit"), [("rewards", "policy loss is nan"), ("logprobs", "policy loss")]
)
def test_a_bad_number_stops_before_the_step_and_names_the_loss(field: str, culprit: str) -> None:
    learner = OnPolicyLearner(inputs())
    data = play(learner)
    row = tuple(np.argwhere(data.valid)[3])
    arrays = {"rewards": data.rewards.copy(), "logprobs": data.outputs["logprobs"].copy()}
    arrays[field][row] = np.nan
    before = learner.weights()
    with pytest.raises(NotFiniteError, match=culprit):
        learner.update(
            replace(data, rewards=arrays["rewards"], outputs={**data.outputs, "logprobs": arrays["logprobs"]})
        )
    if field == "rewards":
        for name, value in learner.weights().items():
            np.testing.assert_array_equal(value, before[name])


def test_a_read_only_fragment_is_fine() -> None:
    learner = OnPolicyLearner(inputs())
    data = play(learner)
    for array in (data.observations, data.rewards, *data.outputs.values()):
        array.flags.writeable = False
    learner.update(data)


def test_more_minibatches_than_slots_of_an_lstm_are_refused() -> None:
    learner = OnPolicyLearner(inputs(ppo.ClassicPPOConfig(minibatches=5), "lstm"))
    with pytest.raises(TrainingError, match="5 minibatches are made of 4 slots"):
        learner.update(play(learner))


def test_metrics_of_a_fragment() -> None:
    learner = OnPolicyLearner(inputs())
    data = play(learner)
    metrics = learner.update(replace(data, versions=data.versions - 2))
    assert metrics["episode/return/mean"].value == 4
    assert metrics["episode/length/mean"].value == 6
    assert metrics["actor/steps/sum"].value == data.valid.sum()
    assert metrics["actor/lag/mean"].value == 2


def test_split_and_joined_are_inverse() -> None:
    data = play(OnPolicyLearner(inputs(network="lstm")))
    parts = split_by_slots(data, 3)
    assert [part.valid.shape[1] for part in parts] == [1, 1, 2]
    again = joined(parts)
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "valid", "state"):
        np.testing.assert_array_equal(getattr(again, name), getattr(data, name))
    assert again.episodes == data.episodes
    with pytest.raises(TrainingError, match="4 slots is divided among 5 trainers"):
        split_by_slots(data, 5)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_trainers_gives_the_same_weights(ranks: int, network: str) -> None:
    given = inputs(network=network)
    alone = OnPolicyLearner(given)
    backend = InlineBackend()
    backend.open([Pool(name="trainers", size=ranks)])
    try:
        policy = NetworkPolicy(OnPolicyLearner(given).network)
        together = DataParallelLearner(backend, "trainers", partial(make_learner, given=given), policy)
        for seed in range(3):
            data = play(alone, seed)
            expected, metrics = alone.update(data), together.update(data)
            assert metrics.keys() == expected.keys()
            for name, metric in metrics.items():
                assert metric.value == pytest.approx(expected[name].value, rel=1e-3, abs=1e-5), name
        for name, value in alone.weights().items():
            np.testing.assert_allclose(together.weights()[name], value, atol=1e-5)
        together.restore(alone.state())
        assert together.version == together.policy.version == alone.version
    finally:
        backend.close()
