"""Exports: a policy's file acts in a process without Rillflow as the policy does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rillflow
import rillflow_classic
from plugins.classic.tests.test_trained_policy import RECIPE, trained
from rillflow.cli.main import main
from rillflow.errors import ConfigError
from rillflow_classic.export import export
from rillflow_classic.trained_policy import TrainedPolicy

FRESH = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("rillflow"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
import numpy as np

file, given, out = sys.argv[1:]
arrays = dict(np.load(given))
if file.endswith(".pt2"):
    import torch
    acted = torch.export.load(file).module()(*map(torch.from_numpy, arrays.values()))
    acted = acted[0] if isinstance(acted, tuple) else acted
    np.save(out, acted.numpy())
else:
    import onnxruntime
    session = onnxruntime.InferenceSession(file)
    assert [each.name for each in session.get_inputs()] == list(arrays)
    np.save(out, session.run(None, arrays)[0])
"""
STACKED = "lstm with stacked, normalised observations"


def observations(policy: TrainedPolicy, count: int) -> np.ndarray[Any, Any]:
    """Return observations whose frames differ, as stacks if the policy has them."""
    shape = policy.observation_space.shape or ()
    stack = (policy.frames,) if policy.frames > 1 else ()
    drawn = np.random.default_rng(2).normal(size=(count, *stack, *shape))
    return drawn.astype(policy.observation_space.dtype)


def acted(policy: TrainedPolicy, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the policy's own actions from the start of an episode, with a stack of equal frames."""
    policy.reset()
    found: np.ndarray[Any, Any] = policy.act(given)
    return found


def run_fresh(folder: Path, file: Path, arrays: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the actions of an exported file, computed in a new process that cannot import Rillflow."""
    np.savez(folder / "given.npz", **arrays)
    command = [sys.executable, "-c", FRESH, str(file), str(folder / "given.npz"), str(folder / "out.npy")]
    subprocess.run(command, check=True, cwd=folder)
    found: np.ndarray[Any, Any] = np.load(folder / "out.npy")
    return found


@pytest.mark.parametrize("case", ["ppo", "dqn", "mb_mpo"])
def test_a_module_acts_as_the_policy_does(tmp_path: Path, case: str) -> None:
    policy = rillflow_classic.load(trained(tmp_path, case).path)
    given = observations(policy, 50)
    found, own = policy.module()(torch.from_numpy(given)).numpy(), acted(policy, given)
    assert found.dtype == own.dtype
    np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
@pytest.mark.parametrize("case", [pytest.param("sac", marks=pytest.mark.slow), STACKED])
def test_an_exported_policy_acts_alike_without_rillflow(tmp_path: Path, case: str, ending: str) -> None:
    if ending == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    policy = rillflow_classic.load(trained(tmp_path, case).path)
    file = tmp_path / f"policy.{ending}"
    export(policy, file)
    given = observations(policy, 5)
    if policy.frames > 1:
        given[:] = given[:, :1]  # an episode begins with a stack of its first observation
    arrays = {"observations": given}
    if size := policy.module().lstm_size:
        arrays["state"] = np.zeros((5, 2, size), np.float32)
    found, own = run_fresh(tmp_path, file, arrays), acted(policy, given[:, 0] if policy.frames > 1 else given)
    assert found.dtype == own.dtype and found.shape == own.shape
    np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-6)


def test_convolutions_over_frames_become_a_module(tmp_path: Path) -> None:
    (tmp_path / "picture.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Picture(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)\n"
        "    action_space = gymnasium.spaces.Discrete(4)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros((12, 12, 3), np.uint8), {}\n"
        "    def step(self, action):\n"
        "        return np.full((12, 12, 3), 7, np.uint8), 0.0, True, False, {}\n"
    )
    recipe = {**RECIPE, "environment": {"id": f"{tmp_path}/picture.py:Picture"}}
    run = rillflow.train(recipe, dir=tmp_path / "run", quiet=True)
    policy = rillflow_classic.load(run.path)
    given = np.random.default_rng(0).integers(0, 255, (3, 12, 12, 3), np.uint8)
    module = policy.module()
    assert isinstance(module, torch.nn.Module)
    assert module(torch.from_numpy(given)).tolist() == policy.act(given).tolist()


def test_wrong_files_and_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, "two_trainers")
    policy = rillflow_classic.load(run.path)
    with pytest.raises(ConfigError, match=r"ends in \.pt2 or \.onnx"):
        export(policy, tmp_path / "policy.zip", "ppo")
    with pytest.raises(ConfigError, match="are ppo, dqn"):
        export(policy, tmp_path / "policy.pt2")
    words = ["export", str(run.path), "--out", str(tmp_path / "policy.pt2"), "--policy", "dqn"]
    assert main(words) == 0 and "policy.pt2" in capsys.readouterr().out
    assert main(words) == 2 and "already exists" in capsys.readouterr().err
