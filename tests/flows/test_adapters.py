"""Runs that train an adapter with a frozen base: equal on every placement, resumable, small on disk."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.runs import layout
from rillflow.runs.reader import read_metrics, rollout_columns

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE, REWARD

NEW = NewModel(hidden=32, layers=4, heads=4, kv_heads=2, context=16, alphabet="0123456789+=")
ADAPTER = "policy.model.adapter={ rank = 4 }"
WIDE = NEW.model_copy(update={"hidden": 128, "layers": 2})
"""A base whose halves still are whole blocks of 64."""
NEEDS_LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
Ran = tuple[list[object], dict[str, bytes]]


def written(folder: Path, name: str = "grpo", new: NewModel = NEW) -> None:
    """Write a recipe, and a base next to it."""
    folder.mkdir(exist_ok=True)
    line = next(line for line in RECIPE.splitlines() if line.startswith("model.new"))
    (folder / "run.toml").write_text(RECIPE.replace("NAME", name).replace(line, 'model.path = "../base"'))
    (folder / "reward.py").write_text(REWARD)
    if not (folder.parent / "base").exists():
        made = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
        save_model(made, folder.parent / "base")


def ran(folder: Path, *settings: str, name: str = "grpo") -> Ran:
    """Run; return every written rollout, and the weight files of the last checkpoint."""
    written(folder, name, WIDE if any("4bit" in each for each in settings) else NEW)
    run = folder / "run"
    words = [f"run.dir={json.dumps(str(run))}", "policy.lr=1e-2", "warm_start.lr=3e-2", ADAPTER, *settings]
    loaded = load_recipe(folder / "run.toml", words)
    launch(loaded, quiet=True)
    newest = max((run / layout.CHECKPOINTS).iterdir())
    rows = [rollout_columns(run, step) for step in layout.rollout_files(run)]
    return rows, {file.parent.name: file.read_bytes() for file in sorted(newest.glob("*/*.safetensors"))}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_an_adapter_alone_is_trained_saved_and_published(tmp_path: Path) -> None:
    """The run checks that it samples at ratio 1."""
    written(tmp_path / "a")
    before = digest(tmp_path / "base")
    rows, files = ran(tmp_path / "a")
    assert digest(tmp_path / "base") == before
    checkpoint = max((tmp_path / "a/run" / layout.CHECKPOINTS).iterdir())
    held = load_file(checkpoint / "policy" / "adapter_model.safetensors")
    assert len(held) == 2 * 7 * NEW.layers and all(float(each.abs().max()) > 0 for each in held.values())
    assert set(files) == {"policy", "policy.optimizer"}
    state = sum(path.stat().st_size for path in (checkpoint / "policy.optimizer").iterdir())
    assert state < 5 * sum(each.nbytes for each in held.values())
    pools = ("placement.pools={ main = 1, answers = 1 }", "placement.backend=inline")
    assert ran(tmp_path / "b", *pools, 'placement.roles={ sampler = "answers" }') == (rows, files)


@pytest.mark.parametrize(
    "base",
    [
        "full",
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("4bit", marks=[NEEDS_LIBRARY, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("name", [pytest.param("grpo", marks=pytest.mark.slow), "ppo"])
def test_a_run_that_was_cut_goes_on_with_the_same_bits(tmp_path: Path, name: str, base: str) -> None:
    """The reference is the policy's module with the adapter from the start of the phase."""
    how = ("run.checkpoint_every=1", f"policy.model.adapter.base={base}", "algorithm.steps=3")
    whole = ran(tmp_path / "a", *how, name=name)
    first = ran(tmp_path / "b", *how[:2], "algorithm.steps=1", name=name)
    again = ran(tmp_path / "b", *how, name=name)
    assert again == whole != first
    steps = [step.metrics for step in read_metrics(tmp_path / "a/run") if step.phase == name]
    assert name == "ppo" or steps[-1]["policy/kl/mean"].value > 1e-4


def test_a_reference_takes_the_policy_s_adapter_as_it_is_and_goes_on_with_the_same_bits(
    tmp_path: Path,
) -> None:
    how = ("algorithm.reference=moving", "algorithm.reference_rate=1.0", "algorithm.reference_every=2")
    how += ("run.checkpoint_every=1", "run.keep_checkpoints=9", "evaluate.problems=0")
    whole = ran(tmp_path / "a", *how, "algorithm.steps=3")
    held = [
        [(tmp_path / f"a/run/checkpoints/step-{step:06d}/{role}/adapter_model.safetensors").read_bytes()
         for step in (4, 5, 6)]
        for role in ("reference", "policy")
    ]  # fmt: skip
    first = load_file(tmp_path / "a/run/reference/adapter_model.safetensors")
    begun = load_file(tmp_path / "a/run/checkpoints/step-000004/reference/adapter_model.safetensors")
    assert all(torch.equal(begun[name], each) for name, each in first.items())
    assert held[0][1:] == [held[1][1]] * 2, "after the second step, and until the fourth"
    ran(tmp_path / "b", *how, "algorithm.steps=2")
    assert ran(tmp_path / "b", *how, "algorithm.steps=3") == whole


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp = 2", "fsdp = 2", "tp = 2", "pp = 2"])
@pytest.mark.parametrize("base", ["full", "int8", pytest.param("4bit", marks=NEEDS_LIBRARY)])
def test_every_mesh_trains_what_one_rank_trains(tmp_path: Path, mesh: str, base: str) -> None:
    """Up to rounding, which AdamW's first steps amplify."""
    how = f"policy.model.adapter.base={base}"
    ran(tmp_path / "a", how)
    ran(
        tmp_path / "b",
        how,
        "placement.pools={ main = 2 }",
        f"placement.train_parallel={{ main = {{ {mesh} }} }}",
    )
    one, two = (
        [step.metrics for step in read_metrics(tmp_path / f"{name}/run") if step.phase == "warm_start"]
        for name in "ab"
    )
    assert len(one) == len(two) == 3
    for here, there in zip(one, two, strict=True):
        for name in ("supervised/loss/mean", "train/grad_norm/mean"):
            assert there[name].value == pytest.approx(here[name].value, rel=1e-3)


@pytest.mark.parametrize("kept", ["int8", pytest.param("4bit", marks=[NEEDS_LIBRARY, pytest.mark.slow])])
def test_a_quantised_base_is_sampled_with_at_ratio_1_and_merged_as_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    ran(tmp_path / "a", f"policy.model.adapter.base={kept}")
    found = read_metrics(tmp_path / "a/run")
    gaps = [step.metrics["mismatch/logprob_gap/max"].value for step in found if step.phase == "grpo"]
    assert len(gaps) == 2 and max(gaps) < 1e-5
    newest = max((tmp_path / "a/run" / layout.CHECKPOINTS).iterdir()) / "policy"
    how: dict[str, Any] = {"seed": 0, "device": torch.device("cpu"), "base": Path()}
    beside = load_model(ModelConfig(path=str(newest)), **how)
    tokens, said = torch.tensor([[1, 2, 3, 4]]), {}
    with torch.no_grad():
        expected = beside.module(input_ids=tokens).logits
        for base in ("trained", "full"):
            out = str(tmp_path / base)
            assert main(["merge-adapter", str(tmp_path / "a/run"), "--out", out, "--base", base]) == 0
            said[base] = load_model(ModelConfig(path=out), **how).module(input_ids=tokens).logits
    assert capsys.readouterr().err == ""
    torch.testing.assert_close(said["trained"], expected, rtol=0, atol=1e-5)
    assert 1e-4 < float((said["full"] - expected).abs().max()) < (0.05 if kept == "int8" else 0.5)


def test_an_adapter_is_merged_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(tmp_path / "a", "algorithm.steps=1")
    out = tmp_path / "merged"
    assert main(["merge-adapter", str(tmp_path / "a/run"), "--out", str(out)]) == 0
    whole = load_model(ModelConfig(path=str(out)), seed=0, device=torch.device("cpu"), base=Path())
    newest = max((tmp_path / "a/run" / layout.CHECKPOINTS).iterdir()) / "policy"
    beside = load_model(ModelConfig(path=str(newest)), seed=0, device=torch.device("cpu"), base=Path())
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        found, expected = (each.module(input_ids=tokens).logits for each in (whole, beside))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert main(["merge-adapter", str(tmp_path / "a/run"), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["merge-adapter", str(out), "--out", str(tmp_path / "again")]) == 2
    assert "holds a whole model" in capsys.readouterr().err
