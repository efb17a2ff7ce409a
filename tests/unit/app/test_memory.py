"""The memory estimate compared with real models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rillflow.app.memory import (
    estimate,
    require_memory,
    rows_at_once,
)
from rillflow.app.model_files import ModelSizes, sizes_of_directory, sizes_of_new
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.controller.schedules.tail_batching import TailBatches
from rillflow.errors import ConfigError, ModelError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model

NEW = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=48, alphabet="0123456789+=")


def made(new: NewModel) -> LanguageModel:
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())


def count(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.module.parameters())


def test_a_new_qwen2_is_counted_exactly() -> None:
    sizes = sizes_of_new(NEW)
    assert sizes.parameters == count(made(NEW))
    assert sizes.vocabulary == 13
    assert sizes.kv_width == 16


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_another_architecture_is_counted_nearly(architecture: str) -> None:
    new = NEW.model_copy(update={"architecture": architecture})
    assert sizes_of_new(new).parameters == pytest.approx(count(made(new)), rel=0.05)


def test_routed_experts_are_counted_apart_from_the_layers_matrices(tmp_path: Path) -> None:
    model = made(NEW.model_copy(update={"architecture": "qwen3_moe"}))
    save_model(model, tmp_path / "model")
    sizes, named = sizes_of_directory(tmp_path / "model"), dict(model.module.named_parameters())
    assert sizes is not None
    experts = {name: each for name, each in named.items() if ".experts." in name}
    matrices = [
        each.numel()
        for name, each in named.items()
        if name not in experts and each.dim() == 2 and ".layers." in name
    ]
    assert sizes.parameters == sum(each.numel() for each in named.values())
    assert sizes.experts == sum(each.numel() for each in experts.values()) > 0
    assert sizes.linear == sum(matrices) > 0


def test_a_directory_is_counted_from_its_headers(tmp_path: Path) -> None:
    model = made(NEW)
    save_model(model, tmp_path / "model")
    assert sizes_of_directory(tmp_path / "model") == sizes_of_new(NEW)


def test_another_way_to_name_sizes_is_read(tmp_path: Path) -> None:
    new = NEW.model_copy(update={"architecture": "gpt2", "kv_heads": 4})
    model = made(new)
    save_model(model, tmp_path / "model")
    sizes = sizes_of_directory(tmp_path / "model")
    assert sizes is not None
    assert (sizes.layers, sizes.kv_width, sizes.context) == (2, 32, 48)


def test_sizes_that_are_not_told_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    assert sizes_of_directory(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_a_damaged_config_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 32)
    with pytest.raises(ModelError, match=str(tmp_path)):
        sizes_of_directory(tmp_path)


def recipe(**loss: float) -> Resolved:
    data = {
        "policy": {"model": {"new": NEW.model_dump()}},
        "rollout": {"max_tokens": 8, "max_rows": 10},
        "algorithm": {"name": "grpo", "steps": 1, "loss": loss},
    }
    return load_recipe(data)


def test_the_parts_of_the_memory() -> None:
    sizes = sizes_of_new(NEW)
    found = estimate(recipe(), sizes, 20)
    assert found.kept == {"weights": 4 * sizes.parameters, "optimiser": 8 * sizes.parameters}
    assert found.phases["trains"]["gradients"] == 4 * sizes.parameters
    assert found.phases["answers"]["KV cache"] == 2 * 10 * 32 * 2 * 16 * 4, "rows of 20 tokens take 32 places"
    assert found.total == sum(found.kept.values()) + sum(found.phases["trains"].values())
    assert estimate(recipe(), sizes, 1000).phases["answers"]["KV cache"] == 2 * 10 * 48 * 2 * 16 * 4


def test_a_7b_with_defaults_is_refused_and_the_settings_that_help_are_named() -> None:
    sizes = ModelSizes(
        parameters=7_615_616_512,
        layers=28,
        heads=28,
        kv_heads=4,
        kv_width=512,
        vocabulary=152_064,
        context=32_768,
        hidden=3584,
        inner=18_944,
    )
    data = {
        "policy": {"model": {"path": "7b"}},
        "rollout": {"max_tokens": 1024},
        "algorithm": {"name": "grpo", "steps": 1},
    }
    chosen = load_recipe(data)
    cache = estimate(chosen, sizes, 1083).phases["answers"]["KV cache"]
    assert cache == 2 * 256 * 1088 * 28 * 512 * 4, "256 rows run at once, none longer than 1,083 tokens"
    with pytest.raises(ConfigError, match=r"this machine has 24.0 GiB") as caught:
        require_memory(chosen, sizes, 1083, 24 << 30, "this machine")
    amounts = [float(each) for each in re.findall(r"at most ([\d.]+) GiB", caught.value.fix)]
    assert len(amounts) >= 3 and amounts == sorted(amounts, reverse=True)
    named = ('policy.model.dtype = "bfloat16"', "policy.model.adapter.rank = 16")
    for setting in (*named, "policy.gradient_checkpointing = true", "rollout.cache_gib = 4"):
        assert setting in caught.value.fix
    with pytest.raises(ConfigError, match="a smaller model or more ranks") as caught:
        require_memory(chosen, replace(sizes, linear=6_525_000_000), 1083, 1 << 20, "this machine")
    assert caught.value.fix.count("at most") == 5, "a list that no setting ends is kept short"
    require_memory(chosen, sizes, 1083, 2000 << 30, "this machine")


@pytest.mark.parametrize(("dtype", "numbers"), [("bfloat16", 3), ("float32", 2)])
def test_a_rank_s_optimiser_holds_masters_where_weights_are_narrow(dtype: str, numbers: int) -> None:
    """Two moments of 4 bytes per parameter, and 4 bytes of the master; FSDP leaves half of them on a rank."""
    sizes = ModelSizes(
        parameters=6 * 2**30, layers=1, heads=1, kv_heads=1, kv_width=1, vocabulary=1, context=1
    )
    data = {
        "policy": {"model": {"new": NEW.model_dump(), "dtype": dtype}},
        "rollout": {"max_tokens": 8},
        "algorithm": {"name": "grpo", "steps": 1},
        "placement": {"pools": {"main": 2}, "train_parallel": {"main": {"fsdp": 2}}},
    }
    kept = estimate(load_recipe(data), sizes, 1).kept
    assert kept["optimiser"] == 6 * 2**30 * 4 * numbers // 2


def test_a_rank_holds_its_own_experts_of_a_mixture() -> None:
    sizes = ModelSizes(
        parameters=6 * 2**28,
        layers=1,
        heads=1,
        kv_heads=1,
        kv_width=1,
        vocabulary=1,
        context=1,
        experts=2**30,
    )
    data = {
        "policy": {"model": {"new": NEW.model_dump()}},
        "rollout": {"max_tokens": 8},
        "algorithm": {"name": "grpo", "steps": 1},
        "placement": {"pools": {"main": 4}, "train_parallel": {"main": {"ep": 4}}},
    }
    kept = estimate(load_recipe(data), sizes, 1).kept
    assert kept == {"weights": 3 << 30, "optimiser": 6 << 30}


def test_rows_that_never_run_take_no_memory() -> None:
    """A step has 64 x 8 rows and an evaluation 500; fixed shapes hold every slot."""
    some = recipe().changed({"rollout.max_rows": 10**9})
    assert rows_at_once(some.recipe) == 512
    assert rows_at_once(some.changed({"schedule": TailBatches(oversample_prompts=1.25)}).recipe) == 640
    assert rows_at_once(some.changed({"algorithm.prompts_per_step": 4}).recipe) == 500
    assert rows_at_once(some.changed({"rollout.deterministic": True}).recipe) == 10**9


def test_a_reference_is_a_second_model() -> None:
    sizes = sizes_of_new(NEW)
    assert estimate(recipe(kl=0.1), sizes, 20).kept["reference"] == 4 * sizes.parameters


@pytest.mark.parametrize("kept", ["int8", "4bit"])
def test_a_quantised_base_counts_the_bytes_of_its_numbers(tmp_path: Path, kept: str) -> None:
    if kept == "4bit":
        pytest.importorskip("bitsandbytes")
    save_model(made(NEW.model_copy(update={"hidden": 64})), tmp_path / "base")
    sizes = sizes_of_directory(tmp_path / "base")
    assert sizes is not None
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        named = {"path": str(tmp_path / "base"), "dtype": dtype, "adapter": {"rank": 2, "base": kept}}
        config = ModelConfig.model_validate(named)
        model = load_model(config, seed=0, device=torch.device("cpu"), base=Path()).module
        held = sum(each.nbytes for name, each in model.named_parameters() if "_adapter" not in name)
        scales = sum(each.nbytes for name, each in model.named_parameters() if name.endswith(".scale"))
        scales *= kept == "int8"  # one number per row is not counted
        of_base = recipe().changed({"policy.model": config})
        assert estimate(of_base, sizes, 20).kept["weights"] == held - scales < sizes.parameters * item
