"""MinAtar: its games as environments of this package; with the package ``minatar`` only."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.networks.build import build_network
from rillflow_classic.networks.config import NetworkConfig

BREAKOUT = EnvironmentSettings(id="MinAtar/Breakout-v1", run="inline")
needs_minatar = pytest.mark.skipif(
    importlib.util.find_spec("minatar") is None, reason="minatar is not installed"
)


def played(environment: VectorEnvironment, seed: int) -> list[np.ndarray]:
    """Return the observations of 40 steps after a reset."""
    actions = np.random.default_rng(0).integers(0, 3, (40, 2))
    return [environment.reset(seed).copy(), *(environment.step(row).observations.copy() for row in actions)]


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minatar", None)
    with pytest.raises(ConfigError, match=r"(?s)Breakout-v1.*not installed.*plugins/classic\[minatar\]"):
        make_environment(BREAKOUT, 2)


def test_a_misspelt_game_is_corrected() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'MinAtar/Breakout-v1'"):
        make_environment(BREAKOUT.model_copy(update={"id": "MinAtar/Breakot-v1"}), 2)


@needs_minatar
def test_a_seed_repeats_the_frames_also_after_other_episodes() -> None:
    environment = make_environment(BREAKOUT, 2)
    first = played(environment, 5)
    played(environment, 6)
    np.testing.assert_array_equal(first, played(environment, 5))
    assert not np.array_equal(first, played(environment, 6))


@needs_minatar
@pytest.mark.parametrize(("name", "channels"), [("Breakout", 4), ("SpaceInvaders", 6), ("Seaquest", 10)])
def test_frames_go_through_a_small_cnn(name: str, channels: int) -> None:
    config = EnvironmentSettings(id=f"MinAtar/{name}-v1", run="inline")
    environment = make_environment(config, 3, seed=0)
    assert environment.observation_space.shape == (channels, 10, 10)
    assert set(np.unique(environment.reset(0))) == {0, 255}
    network = build_network(NetworkConfig(), environment.observation_space, environment.action_space, seed=0)
    assert network.trunks[0][1].in_channels == channels
