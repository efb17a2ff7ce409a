"""IMPALA: V-trace in the learner, and its plan."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from plugins.classic.tests.test_on_policy import ACTIONS, NETWORKS, OBSERVATIONS, inputs, play
from plugins.classic.tests.values.opened import OpenedRecipe
from rillflow.records.metrics import merge_metrics
from rillflow_classic.algorithms.a2c import A2CConfig
from rillflow_classic.algorithms.impala import ImpalaConfig, ImpalaLearner
from rillflow_classic.networks.build import build_network
from rillflow_classic.on_policy import OnPolicyLearner

CONTROL = {"slots": 8, "steps": 20}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("actions", ACTIONS)
def test_the_gradient_for_its_own_fragments_is_that_of_a2c(network: str, actions: str) -> None:
    one = OnPolicyLearner(inputs(A2CConfig(), network, actions))
    other = ImpalaLearner(inputs(ImpalaConfig(), network, actions))
    data = play(one)
    wanted, found = one.gradients(data), other.gradients(data)
    for expected, gradient in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    assert found[1]["policy/approximate_kl/mean"].value == pytest.approx(0, abs=1e-6)


def test_the_gradient_for_another_policy_is_that_of_the_paper_s_loss() -> None:
    """V-trace as a loop over floats, and the loss by autograd."""
    settings = ImpalaConfig(clip_rho=1.1, clip_c=0.9, lam=0.95)
    acting = OnPolicyLearner(inputs(A2CConfig(lr=0.05)))
    for seed in range(5):
        acting.update(play(acting, seed))
    learner, data = ImpalaLearner(inputs(settings)), play(acting, length=12)
    gradients, metrics = learner.gradients(data)
    network = build_network(NETWORKS["mlp"], OBSERVATIONS, ACTIONS["discrete"], seed=4)
    output = network(torch.from_numpy(data.observations).flatten(0, 1))
    values = output.values.view(13, 4)
    chosen = torch.distributions.Categorical(logits=output.parameters.view(13, 4, 2)[:-1])
    logprobs = chosen.log_prob(torch.from_numpy(data.actions))
    loss, rows, gamma, num_clipped = torch.zeros(()), int(data.valid.sum()), settings.gamma, 0
    for n in range(4):
        target, correction = 0.0, 0.0  # of the next step
        for t in reversed(range(12)):
            now, after = values.detach()[t : t + 2, n].tolist()
            if not data.valid[t, n]:
                correction = 0.0
                continue
            ratio = math.exp(logprobs[t, n].item() - float(data.outputs["logprobs"][t, n]))
            rho, c = min(settings.clip_rho, ratio), settings.lam * min(settings.clip_c, ratio)
            num_clipped += ratio > settings.clip_rho
            reward, goes_on = float(data.rewards[t, n]), not data.ended[t, n]
            later = 0.0 if data.terminated[t, n] else after
            error = rho * (reward + gamma * later - now)
            advantage = reward + gamma * (later + correction * goes_on) - now
            correction = error + gamma * c * correction * goes_on
            target = now + correction
            loss = loss - rho * advantage * logprobs[t, n] + 0.5 * (values[t, n] - target) ** 2
            loss = loss - settings.entropy_weight * chosen.entropy()[t, n]
    (loss / rows).backward()  # type: ignore[no-untyped-call]
    for gradient, parameter in zip(gradients, network.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)
    assert metrics["policy/approximate_kl/mean"].value > 1e-3
    assert metrics["policy/clipped/share"].value == pytest.approx(num_clipped / rows) != 0


def opened(stack: ExitStack, **algorithm: Any) -> OpenedRecipe:
    network, workers = algorithm.pop("network", {"hidden": [32]}), algorithm.pop("workers", CONTROL)
    return OpenedRecipe(
        stack,
        {"name": "impala", **algorithm},
        workers=workers,
        network=network,
        environment={"id": "CartPole-v1"},
        run={"threads": 1},
    )


def test_actors_get_weights_at_every_kth_update_and_the_lag_is_bounded() -> None:
    with ExitStack() as stack:
        recipe = opened(stack, publish_every=3, num_async=1, batch=2, queued=2, updates=1)
        metrics = list(recipe.steps(12))
        lags = [each["actor/lag/mean"].value for each in metrics]
        assert lags[0] == 0 and 1 <= max(lags) <= 2 + 3
        assert recipe.system.learner.version == 12
        assert all(each["actor/steps/sum"].value > 8 * 20 for each in metrics), "a batch has two fragments"


@pytest.mark.parametrize("transport", ["calls", "shared_memory"])
def test_an_lstm_learns_from_its_initial_state(transport: str) -> None:
    with ExitStack() as stack:
        lstm = {"kind": "lstm", "hidden": [16], "lstm_size": 16}
        workers = {"slots": 2, "steps": 10, "transport": transport}
        recipe = opened(stack, network=lstm, workers=workers, updates=1)
        before = recipe.system.learner.weights()
        metrics = merge_metrics(recipe.steps(2))
        assert np.isfinite(metrics["policy/loss/mean"].value)
        after = recipe.system.learner.weights()
        assert any(not np.array_equal(before[name], after[name]) for name in before if "lstm" in name)


def test_impala_learns() -> None:
    """Random actions hold the pole for 22 steps."""
    with ExitStack() as stack:
        recipe = opened(stack, updates=25, lr=3e-3, normalise_advantages=True, entropy_weight=0.0)
        metrics = list(recipe.steps(16))
        assert metrics[-1]["episode/return/mean"].value > 60


@pytest.mark.slow
def test_impala_learns_from_actors_in_processes() -> None:
    with ExitStack() as stack:
        workers = {**CONTROL, "actors": 2, "place": "process"}
        recipe = opened(stack, workers=workers, updates=25, lr=3e-3, normalise_advantages=True)
        metrics = list(recipe.steps(24))
        assert metrics[-1]["episode/return/mean"].value > 60
        assert metrics[-1]["actor/lag/mean"].value > 0
