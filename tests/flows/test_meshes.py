"""Whole runs on 3D meshes match one rank: the same tokens, the same losses up to rounding."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs import layout
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import read_rollouts
from rillflow.sharding.sharded_file import listed_weights

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE, REWARD

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

EVERY_DAY = ("ppo", {"tp": 2}, 2)
OTHERS = [
    ("ppo", {"pp": 2, "tp": 2}, 2),
    ("ppo", {"dp": 2, "tp": 2}, 1),
    ("ppo", {"dp": 2, "pp": 2}, 1),
    ("ppo", {"dp": 2, "pp": 2, "tp": 2}, 2),
    ("ppo", {"fsdp": 2, "tp": 2}, 2),
    ("ppo", {"dp": 2, "fsdp": 2}, 2),
    ("grpo", {"dp": 2, "tp": 2}, 2),
    ("grpo", {"pp": 2, "tp": 2}, 1),
    ("grpo", {"dp": 2, "pp": 2}, 1),
    ("grpo", {"fsdp": 2, "pp": 2, "tp": 2}, 1),
]


def ran(
    folder: Path, name: str, axes: dict[str, int], generate: int, *more: str
) -> tuple[list[Any], list[Any]]:
    """Run; return sampled tokens, and every step's losses and norms."""
    folder.mkdir(exist_ok=True)
    text = RECIPE if name != "online_dpo" else RECIPE.replace("loss.kl = 0.01", "loss.beta = 0.5")
    (folder / "run.toml").write_text(text.replace("NAME", name))
    (folder / "reward.py").write_text(REWARD)
    ranks = 1
    for size in axes.values():
        ranks *= size
    settings = [f"run.dir={json.dumps(str(folder / 'run'))}", f"placement.pools.main={ranks}"]
    settings += [f"placement.train_parallel.main.{axis}={size}" for axis, size in axes.items()]
    loaded = load_recipe(folder / "run.toml", [*settings, f"placement.rollout_parallel.tp={generate}", *more])
    launch(loaded, quiet=True)
    rollouts = [
        (row.row.prompt, row.row.sample, row.tokens)
        for step in rollout_files(folder / "run")
        for row in read_rollouts(folder / "run", step)
    ]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    wanted = ("loss/mean", "squared_error/mean", "grad_norm/mean", "nll/mean")
    numbers = [
        {key: value["mean"] for key, value in json.loads(line)["metrics"].items() if key.endswith(wanted)}
        for line in lines
    ]
    return rollouts, numbers


def compare(tmp_path: Path, name: str, axes: dict[str, int], generate: int, *more: str) -> None:
    alone = ran(tmp_path / "alone", name, {}, 1)
    found = ran(tmp_path / "mesh", name, axes, generate, *more)
    assert len(found[0]) == 30 and found[0] == alone[0]
    assert any("policy/loss/mean" in line for line in alone[1])
    for one, other in zip(found[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    newest = max((tmp_path / "mesh/run/checkpoints").iterdir())
    model = AutoModelForCausalLM.from_pretrained(newest / "policy")
    weights = {name: parameter.shape for name, parameter in model.named_parameters()}
    state = listed_weights(newest / "policy.optimizer")
    assert {name: tuple(shape) for name, shape in weights.items()} == {
        name.partition("/")[2]: weight.shape for name, weight in state.items() if name.startswith("exp_avg/")
    }


def test_a_run_over_tensor_shards_says_what_one_rank_says(tmp_path: Path) -> None:
    compare(tmp_path, *EVERY_DAY, "placement.backend=process")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes", "generate"), OTHERS, ids=str)
def test_every_mesh_says_what_one_rank_says(
    name: str, axes: dict[str, int], generate: int, tmp_path: Path
) -> None:
    compare(tmp_path, name, axes, generate)


@pytest.mark.slow
def test_a_run_whose_tensor_shards_share_out_tokens_says_what_one_rank_says(tmp_path: Path) -> None:
    more = ("placement.sequence_parallel=true", "policy.gradient_checkpointing=true")
    compare(tmp_path, "ppo", {"pp": 2, "tp": 2}, 1, *more)


@pytest.mark.slow
def test_a_run_goes_on_under_another_mesh(tmp_path: Path) -> None:
    """Its last step is removed; the step before ran under (1, 2, 2), this one under (2, 1, 2)."""
    alone = ran(tmp_path / "alone", "ppo", {}, 1)
    folder = tmp_path / "moved"
    ran(folder, "ppo", {"pp": 2, "tp": 2}, 1, "run.checkpoint_every=1")
    (folder / "run" / layout.FINISHED).unlink()
    shutil.rmtree(max((folder / "run" / "checkpoints").iterdir()))
    found = ran(folder, "ppo", {"dp": 2, "tp": 2}, 2)
    assert found[0] == alone[0]
    for one, other in zip(found[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_models_of_one_pool_may_have_grids_of_their_own(tmp_path: Path) -> None:
    """On the same two ranks, the critic's parameters are sharded over dp and the policy's over tp."""
    alone = ran(tmp_path / "alone", "ppo", {}, 1)
    found = ran(tmp_path / "mesh", "ppo", {"tp": 2}, 2, "placement.train_parallel.critic.fsdp=2")
    assert found[0] == alone[0]
    for one, other in zip(found[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_run_whose_ranks_share_out_experts_says_what_one_rank_says(tmp_path: Path) -> None:
    """Its last step is removed, and repeated by two ranks that have all experts each."""
    more = ("policy.model.new.architecture=qwen3_moe", "rollout.replay_routing=true", "policy.balance=0.01")
    alone = ran(tmp_path / "alone", "grpo", {}, 1, *more)
    folder = tmp_path / "mesh"
    found = ran(folder, "grpo", {"ep": 2}, 1, "run.checkpoint_every=1", *more)
    (folder / "run" / layout.FINISHED).unlink()
    shutil.rmtree(max((folder / "run" / "checkpoints").iterdir()))
    again = ran(folder, "grpo", {"dp": 2}, 1, "run.checkpoint_every=1", *more)
    for each in (found, again):
        assert each[0] == alone[0]
        for one, other in zip(each[1], alone[1], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"), [("grpo", {"fsdp": 2}), ("online_dpo", {"tp": 2}), ("online_dpo", {"fsdp": 2})]
)
def test_a_reference_moves_shard_by_shard_as_on_one_rank(
    name: str, axes: dict[str, int], tmp_path: Path
) -> None:
    """Also with collected pairs, which lie on one rank and are distributed to all."""
    moves = ("algorithm.reference=moving", "algorithm.reference_rate=0.25", "algorithm.steps=3")
    moves += ("policy.lr=1e-2", "evaluate.problems=0")
    alone, found = (ran(tmp_path / str(len(cut)), name, cut, 1, *moves) for cut in ({}, axes))
    assert found[0] == alone[0]
    for one, other in zip(found[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    (weights, reference) = (
        AutoModelForCausalLM.from_pretrained(max((tmp_path / "1/run/checkpoints").iterdir()) / role)
        for role in ("policy", "reference")
    )
    apart = [
        float((one - other).detach().abs().max())
        for one, other in zip(weights.parameters(), reference.parameters(), strict=True)
    ]
    assert max(apart) > 1e-4
    known = AutoModelForCausalLM.from_pretrained(
        max((tmp_path / "0/run/checkpoints").iterdir()) / "reference"
    )
    for one, other in zip(reference.parameters(), known.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
