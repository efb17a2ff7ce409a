"""Trained policies: loaded from a run, they act as in the run's own evaluation, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rillflow
import rillflow_classic
from rillflow.errors import ConfigError, RillflowError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.durable import digest_of
from rillflow_classic.algorithms.registry import ALGORITHMS
from rillflow_classic.environments.multi_agent_cartpole import MultiAgentCartPole
from rillflow_classic.environments.point_navigation import PointNavigation
from rillflow_classic.seeds import seed_of
from rillflow_classic.trained_policy import TrainedPolicy

RECIPE: dict[str, Any] = {
    "kind": "classic",
    "environment": {"id": "CartPole-v1", "provider": "gymnasium", "run": "inline"},
    "network": {"hidden": [8]},
    "algorithm": {"name": "ppo", "steps": 2},
    "workers": {"slots": 4, "steps": 16},
    "evaluate": {"episodes": 1, "video": False},
    "run": {"checkpoint_every": 1, "threads": 1},
}
REPLAY = {"learning_starts": 32, "updates": 2, "batch_size": 16, "replay": {"capacity": 1000}}
POINT = {"environment.id": "PointNavigation-v0", "workers.steps": 21, "workers.slots": 2}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "a2c": {"environment.normalise_observations": True},
    "a3c": {},
    "impala": {"algorithm.updates": 2},
    "dqn": {"algorithm": {"name": "dqn", "steps": 2, **REPLAY, "dueling": True}},
    "apex": {"algorithm": {"name": "apex", "steps": 2, **REPLAY}},
    "sac": {
        "environment.id": "Pendulum-v1",
        "environment.normalise_observations": True,
        "algorithm": {"name": "sac", "steps": 2, **REPLAY},
    },
    "maml": POINT,
    "mb_mpo": {
        **POINT,
        "environment.arguments": {"goal": 1.0},
        "algorithm": {"name": "mb_mpo", "steps": 2, "updates": 1, "model_steps": 2, "imagined": 2},
    },
    "two_trainers": {
        "environment": {"id": "MultiAgentCartPole-v0", "run": "inline"},
        "policies": {"ppo": "agent_[02]", "dqn": "agent_[13]"},
        "algorithm": {"name": "two_trainers", "steps": 2, "dqn": REPLAY},
    },
    "lstm": {"network.kind": "lstm", "algorithm.minibatches": 2},
    "lstm with stacked, normalised observations": {
        "network.kind": "lstm",
        "algorithm.minibatches": 2,
        "environment.frame_stack": 3,
        "environment.normalise_observations": True,
    },
    "population": {
        "population": {"members": 2, "every": 1, "perturb": {"lr": [1e-4, 1e-2]}},
        "environment.normalise_observations": True,
    },
}


def trained(folder: Path, case: str) -> rillflow.Run:
    """Train a small run of a case."""
    settings = {"algorithm.name": case} if case in ALGORITHMS else {}
    settings |= CASES[case]
    if isinstance(settings.get("algorithm"), dict):
        settings.pop("algorithm.name", None)
    return rillflow.train(RECIPE, dir=folder / "run", settings=settings, quiet=True)


def user_environment(name: str) -> Any:
    """Return the environment that a user makes for an id."""
    own: dict[str, Any] = {
        "MultiAgentCartPole-v0": MultiAgentCartPole,
        "PointNavigation-v0": lambda: PointNavigation(goal=1.0),
    }
    return own[name]() if name in own else gymnasium.make(name)


def played_by_hand(policy: TrainedPolicy, environment: Any, seed: int) -> list[float]:
    """Return the return of every agent in an episode of the user's own loop."""
    policy.reset()
    observation, _ = environment.reset(seed=seed)
    totals = dict.fromkeys(observation, 0.0) if isinstance(observation, dict) else {"": 0.0}
    while True:
        action = policy.act(observation)
        observation, reward, terminated, truncated, _ = environment.step(action)
        if not isinstance(observation, dict):
            assert environment.action_space.contains(action)
            totals[""] += float(np.float32(reward))
            if terminated or truncated:
                return list(totals.values())
            continue
        for agent, each in reward.items():
            totals[agent] += each
        observation = {
            agent: each for agent, each in observation.items() if not (terminated[agent] or truncated[agent])
        }
        if not observation:
            return list(totals.values())


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_policy_acts_as_in_the_evaluation_of_its_run(tmp_path: Path, case: str) -> None:
    run = trained(tmp_path, case)
    policy = rillflow_classic.load(run.path)
    assert policy.step == 2
    again, recorded = policy.evaluate(), run.evaluations[-1]
    assert (again.mean_reward, again.more["length_mean"]) == (
        recorded.mean_reward,
        recorded.more["length_mean"],
    )
    name: Any = run.settings["environment"]
    if case == "maml":  # every seed draws a task, which the user's environment here does not
        return
    seed = seed_of(seed_of(5, 0, 0), 0)
    by_hand = played_by_hand(policy, user_environment(name["id"]), seed)
    ordered = sorted(policy.play(1, seed=5), key=lambda each: (each.total_reward, each.slot))
    assert sorted(by_hand) == [each.total_reward for each in ordered]


def test_every_shipped_algorithm_is_tried() -> None:
    assert ALGORITHMS.keys() <= CASES.keys()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rillflow.Run:
    """Return a run of PPO with an LSTM, which must not be changed."""
    return trained(tmp_path_factory.mktemp("lstm"), "lstm")


def test_a_batch_acts_row_by_row_and_begins_episodes_in_some(run: rillflow.Run) -> None:
    policy = rillflow_classic.load(run.path)
    given = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    together = [policy.act(given, sample=False) for _ in range(2)]
    assert together[0].shape == (3,) and together[0].dtype == np.int64
    states = policy._memories[""]._state
    policy.reset([False, True, False])
    after = policy._memories[""]._state
    assert (after[1] == 0).all() and (after[[0, 2]] == states[[0, 2]]).all()  # type: ignore[index]
    with pytest.raises(RillflowError, match="2 observations follow 3"):
        policy.act(given[:2])
    with pytest.raises(RillflowError, match=r"ended has the shape \[2\]"):
        policy.reset([True, False])
    policy.reset()
    assert policy.act(given[0]) in (0, 1)


def test_sampled_actions_depend_on_the_seed_and_masks_are_kept(run: rillflow.Run) -> None:
    policy = rillflow_classic.load(run.path, seed=3)
    given = np.zeros((64, 4), np.float32)
    drawn = policy.act(given, sample=True)
    policy.reset(seed=3)
    assert (policy.act(given, sample=True) == drawn).all() and 0 < drawn.sum() < 64
    policy.reset()
    assert (policy.act(given) == policy.act(given)[0]).all()
    policy.reset()
    for sample in (False, True):
        assert (policy.act(given, sample=sample, mask=[False, True]) == 1).all()
        assert (policy.act(given, sample=sample, mask=[True, False]) == 0).all()
    for wrong in ([True], [False, False], np.ones((3, 2), bool)):
        with pytest.raises(RillflowError, match="the mask has the shape"):
            policy.act(given, mask=wrong)


def test_masks_of_q_values_hold_for_random_actions_too(tmp_path: Path) -> None:
    policy = rillflow_classic.load(trained(tmp_path, "dqn").path)
    given = np.zeros((64, 4), np.float32)
    assert {*policy.act(given, sample=True).tolist()} == {0, 1}
    assert (policy.act(given, sample=True, mask=[False, True]) == 1).all()
    assert (policy.act(given, mask=[True, False]) == 0).all()


def test_several_policies_act_by_agent(tmp_path: Path) -> None:
    policy = rillflow_classic.load(trained(tmp_path, "two_trainers").path)
    assert [policy.policy_of(f"agent_{n}") for n in range(4)] == ["ppo", "dqn", "ppo", "dqn"]
    found = policy.act({"agent_1": np.zeros(4, np.float32)}, mask={"agent_1": [False, True]})
    assert found == {"agent_1": 1}
    with pytest.raises(RillflowError, match="dict by agent"):
        policy.act(np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1.0, 2.0], r"float64 \[2\]"),
        ([1.0, 2.0, 3.0, float("nan")], "NaN"),
        ("left", "<U4"),
        ([[1.0], [2.0, 3.0]], "no array"),
        (np.zeros((2, 2, 4)), r"\[2, 2, 4\]"),
    ],
)
def test_a_wrong_observation_is_refused(run: rillflow.Run, given: Any, told: str) -> None:
    with pytest.raises(RillflowError, match=told):
        rillflow_classic.load(run.path).act(given)


def test_a_checkpoint_is_chosen_and_others_are_refused(run: rillflow.Run, tmp_path: Path) -> None:
    kept = run.path / layout.CHECKPOINTS
    assert rillflow_classic.load(run.path, step=1).step == 1
    assert rillflow_classic.load(kept / "step-000001").step == 1
    assert rillflow_classic.load(run.path, best=True).step in (1, 2)
    with pytest.raises(RunDirectoryError, match="no checkpoint of step 7"):
        rillflow_classic.load(run.path, step=7)
    with pytest.raises(ConfigError, match="already a checkpoint"):
        rillflow_classic.load(kept / "step-000001", step=2)
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        rillflow_classic.load(tmp_path / "nothing")
    copied = shutil.copytree(run.path, tmp_path / "damaged")
    file = copied / layout.CHECKPOINTS / "step-000002" / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    with pytest.raises(RunDirectoryError, match=r"the checkpoint of step 2 .* is damaged"):
        rillflow_classic.load(copied, step=2)
    assert rillflow_classic.load(copied).step == 1
    (copied / layout.CONFIG).write_text("{")
    with pytest.raises(RunDirectoryError):
        rillflow_classic.load(copied)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, "a2c").path
    checkpoint = run / layout.CHECKPOINTS / "step-000002"
    lonely = shutil.copytree(checkpoint, tmp_path / "step-000002")
    with pytest.raises(RunDirectoryError, match="outside of a run directory"):
        rillflow_classic.load(lonely)
    state, manifest = (
        json.loads((checkpoint / f"{name}.json").read_text()) for name in ("state", "manifest")
    )
    del state["objects"]["environments"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest["files"]["state.json"] = digest_of(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunDirectoryError, match="has no state of 'environments'"):
        rillflow_classic.load(run)
    config = json.loads((run / layout.CONFIG).read_text())
    config["network"]["hidden"] = [9]
    (run / layout.CONFIG).write_text(json.dumps(config))
    with pytest.raises(RunDirectoryError, match="does not fit the learner 'policy'"):
        rillflow_classic.load(run)
    (run / layout.CONFIG).write_text(json.dumps({"task": {}}))
    with pytest.raises(ConfigError, match="it trains a language model"):
        rillflow_classic.load(run)


def test_actions_are_those_of_the_environments_own_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Wide(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2, 2), np.float64)\n"
        "    action_space = gymnasium.spaces.Box(-0.1, 0.1, (3,), np.float64)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros((2, 2)), {}\n"
        "    def step(self, action):\n"
        "        assert action.shape == (3,)\n"
        "        return np.ones((2, 2)), 0.0, True, False, {}\n"
    )
    settings = {"environment.id": f"{tmp_path}/wide.py:Wide"}
    run = rillflow.train(RECIPE, dir=tmp_path / "run", settings=settings, quiet=True)
    policy = rillflow_classic.load(run.path)
    assert isinstance(policy.action_space, spaces.Box) and policy.action_space.dtype == np.float64
    actions = policy.act(np.ones((5, 2, 2)) * 0.5, sample=True)
    assert actions.shape == (5, 3) and all(policy.action_space.contains(each) for each in actions)
    assert abs(actions).max() == 0.1  # drawn far outside, and clipped to the bounds in float64
