"""Trained policies in spaces as users bring them: they act with the bits of the run's own evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rillflow
import rillflow_classic
from plugins.classic.tests.odd import SEEN, Drawn
from rillflow.errors import RillflowError
from rillflow_classic.environments.actions import ActionSpaces
from rillflow_classic.environments.observations import ObservationSpaces, WrongValue
from rillflow_classic.export import export
from rillflow_classic.seeds import seed_of
from rillflow_classic.trained_policy import TrainedPolicy

ODD = Path(__file__).with_name("odd.py")
DQN = {"name": "dqn", "steps": 2, "learning_starts": 32, "batch_size": 16, "lr": 0.05, "updates": 4}
PPO = {"name": "ppo", "steps": 2, "lr": 0.05}
SAC = {"name": "sac", "steps": 2, "learning_starts": 32, "batch_size": 16, "lr": 0.05, "updates": 4}
CASES: dict[str, Any] = {
    "float64 in a matrix": ("large", "matrix", PPO, {}),
    "bounds that float32 lacks": ("flags", "tiny", PPO, {}),
    "normalised float64": ("scalar", "float64", SAC, {"environment.normalise_observations": True}),
    "float16": ("flags", "float16", PPO, {}),
    "one number": ("scalar", "scalar", PPO, {}),
    "stacked numbers": ("scalar", "one-sided", PPO, {"environment.frame_stack": 3}),
    "observations from 5": ("from 5", "one-sided", PPO, {}),
    "actions from -1": ("large", "start", DQN, {}),
    "several numbers": ("two numbers", "several", DQN, {}),
    "dict": ("part", "table", PPO, {}),
    "tuple with an LSTM": ("parts", "bits", {**PPO, "minibatches": 1}, {"network.kind": "lstm"}),
    "bits for SAC": ("bits", "float64", SAC, {}),
    "numbers for SAC": ("from 5", "float64", SAC, {}),
    "whole numbers": ("pixels", "whole", PPO, {}),
}


def trained(folder: Path, case: str) -> rillflow.Run:
    observations, actions, algorithm, settings = CASES[case]
    recipe = {
        "kind": "classic",
        "environment": {
            "id": f"{ODD}:Drawn",
            "run": "inline",
            "arguments": {"observations": observations, "actions": actions},
        },
        "network": {"hidden": [8]},
        "algorithm": algorithm,
        "workers": {"slots": 2, "steps": 32},
        "evaluate": {"episodes": 1, "video": False},
        "run": {"checkpoint_every": 1, "threads": 1},
    }
    return rillflow.train(recipe, dir=folder / "run", settings=settings, quiet=True)


def played(policy: TrainedPolicy, case: str, seed: int) -> tuple[list[Any], list[Any], float]:
    """Return observations, actions and the return of an episode of the user's own loop."""
    environment = Drawn(*CASES[case][:2])
    policy.reset()
    observation, _ = environment.reset(seed=seed)
    observations, actions, total, ended = [observation], list[Any](), 0.0, False
    while not ended:
        actions.append(policy.act(observation))
        observation, reward, ended, *_ = environment.step(actions[-1])
        observations.append(observation)
        total += reward
    return observations[:-1], actions, total


@pytest.mark.parametrize("case", CASES)
def test_a_policy_acts_with_the_bits_of_the_runs_evaluation(tmp_path: Path, case: str) -> None:
    """The return is a sum of checksums of the actions, each of which the environment finds in its space."""
    run = trained(tmp_path, case)
    policy = rillflow_classic.load(run.path)
    recorded = run.evaluations[-1].mean_reward
    seed = seed_of(seed_of(seed_of(0, 2, 1), 0, 0), 0)
    observations, actions, total = played(policy, case, seed)
    assert total == recorded == policy.evaluate().mean_reward
    assert len({np.asarray(each).tobytes() for each in actions}) > 1, "the policy looks at its observations"
    if policy.frames == 1 and case != "tuple with an LSTM":
        policy.reset()
        batch: Any = observations
        if isinstance(policy.observation_space, spaces.Tuple):
            batch = tuple(map(np.stack, zip(*observations, strict=True)))
        np.testing.assert_allclose(policy.act(batch), np.stack(actions), rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_its_module_acts_alike(tmp_path: Path, case: str) -> None:
    policy = rillflow_classic.load(trained(tmp_path, case).path)
    observations, _, _ = played(policy, case, 3)
    own, module = policy.observation_space, policy.module()
    given = [
        each if isinstance(own, spaces.Box | spaces.Discrete) else spaces.flatten(own, each)
        for each in observations
    ]
    rows = np.stack(given)
    found, wanted = [], []
    for row, each in zip(rows, observations, strict=True):
        policy.reset()
        wanted.append(policy.act(each))
        stack = np.repeat(row[None], policy.frames, 0) if policy.frames > 1 else row
        inputs = torch.from_numpy(np.asarray(stack)[None])
        state = (torch.zeros(1, 2, module.lstm_size),) if module.lstm_size else ()
        acted = module(inputs, *state)
        found.append((acted[0] if state else acted).numpy()[0])
    assert found[0].dtype == np.asarray(wanted[0]).dtype and found[0].shape == np.shape(wanted[0])
    np.testing.assert_allclose(np.stack(found), np.stack(wanted), rtol=1e-5, atol=1e-6)
    if case == "bounds that float32 lacks":
        with torch.no_grad():
            module.network.policy_head.bias.fill_(9.0)
        assert module(inputs).item() == float(np.float32(0.03)) < 0.03


@pytest.mark.parametrize("case", ["dict", "stacked numbers", "bounds that float32 lacks"])
def test_its_export_acts_alike(tmp_path: Path, case: str) -> None:
    policy = rillflow_classic.load(trained(tmp_path, case).path)
    export(policy, tmp_path / "policy.pt2")
    shape = (5, *((policy.frames,) if policy.frames > 1 else ()))
    shape = (*shape, 5) if case == "dict" else (*shape, *(policy.observation_space.shape or ()))
    dtype = np.float32 if case == "dict" else policy.observation_space.dtype
    given = torch.from_numpy(np.random.default_rng(1).normal(size=shape).astype(dtype))
    loaded = torch.export.load(tmp_path / "policy.pt2").module()
    assert torch.equal(loaded(given), policy.module()(given))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("case", "given", "told"),
    [
        ("dict", {"a": 1}, "no value of this part in {'a': 1}, at 'b'"),
        ("dict", {"a": 3, "b": [0.0, 0.0]}, "the observation 3, but observation_space is Discrete"),
        ("dict", {"a": [1, 2, 0], "b": np.zeros((2, 2))}, r"parts for \[2, 3\] observations"),
        ("dict", [{"a": 1, "b": [0.0, 0.0]}, 5], "no value of this part in 5"),
        ("observations from 5", [5, 8], "the observation 8"),
        ("float64 in a matrix", [1e300], "float32 cannot hold it"),
    ],
)
def test_an_observation_outside_the_space_is_refused(
    tmp_path: Path, case: str, given: Any, told: str
) -> None:
    policy = rillflow_classic.load(trained(tmp_path, case).path)
    with pytest.raises(RillflowError, match=told):
        policy.act(given)


@pytest.mark.parametrize("case", ["several numbers", "one number"])
def test_a_mask_of_actions_that_are_no_discrete_is_refused(tmp_path: Path, case: str) -> None:
    policy = rillflow_classic.load(trained(tmp_path, case).path)
    with pytest.raises(RillflowError, match="a mask is given, and actions are"):
        policy.act(policy.observation_space.sample(), mask=[True] * 6)


def test_a_mask_counts_from_the_start_of_a_discrete(tmp_path: Path) -> None:
    policy = rillflow_classic.load(trained(tmp_path, "actions from -1").path)
    assert [policy.act([6.0], mask=np.arange(3) == index) for index in range(3)] == [-1, 0, 1]


@pytest.mark.parametrize("kind", ["part", "parts", "scalar", "from 5", "two numbers"])
def test_rows_of_a_batch_are_those_of_single_values(kind: str) -> None:
    own = SEEN[kind][0]
    own.seed(4)
    values, both = [own.sample() for _ in range(3)], ObservationSpaces.of(own, "the observations")
    single = [both.rows(value) for value in values]
    assert all(not is_batch and len(rows) == 1 for rows, is_batch in single)
    batch: Any = values
    if kind == "part":
        batch = {key: np.stack([each[key] for each in values]) for key in own}
        assert np.array_equal(both.rows(values)[0], both.rows(batch)[0])
    if kind == "parts":
        b = {"b": np.stack([each[1]["b"] for each in values])}
        batch = (np.stack([each[0] for each in values]), b, np.stack([each[2] for each in values]))
    rows, is_batch = both.rows(batch)
    assert is_batch and np.array_equal(rows, np.concatenate([each for each, _ in single]))
    with pytest.raises(WrongValue):
        both.rows(object())


def test_a_policy_of_envpool_acts_in_the_spaces_of_gymnasium(tmp_path: Path) -> None:
    """MuJoCo has float64 there, and a policy acts in float32."""
    recipe = {
        "kind": "classic",
        "environment": {"id": "HalfCheetah-v4", "provider": "envpool", "time_limit": 20},
        "network": {"hidden": [8]},
        "algorithm": PPO,
        "workers": {"slots": 2, "steps": 32},
        "evaluate": {"episodes": 1, "video": False},
        "run": {"threads": 1},
    }
    run = rillflow.train(recipe, dir=tmp_path / "run", quiet=True)
    policy = rillflow_classic.load(run.path)
    assert policy.evaluate().mean_reward == run.evaluations[-1].mean_reward
    assert policy.observation_space.dtype == policy.action_space.dtype == np.float64
    action = policy.act(np.full(17, 0.5))
    assert policy.action_space.contains(action) and action.dtype == np.float64


def test_wild_actions_are_cut_to_both_bounds() -> None:
    """Float32's nearest value below 0.03 stays, because training acts with it too."""
    both = ActionSpaces.of(spaces.Box(0.01, 0.03, (1,), np.float64), "the actions")
    found = both.acted(np.array([[9.0], [-9.0]], np.float32))
    assert found.tolist() == [[float(np.float32(0.03))], [0.01]] and found[0, 0] < 0.03
