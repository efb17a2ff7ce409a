"""The memory of a rank, estimated before a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from rillflow.app.facts import RecipeFacts
from rillflow.app.memory import Peak, estimate, rank_bytes, require_room
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.errors import ConfigError
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.optimizer import Optimizer
from rillflow_parts.memory.peaks import peaks_of

NEW = NewModel(hidden=128, layers=2, heads=4, kv_heads=2, context=32, alphabet="0123456789+-=")
RECIPE = """
[task]
source = "arithmetic"
digits = 1
held_out = 20
size = 60
[policy]
model.new = { hidden = 128, layers = 2, heads = 4, kv_heads = 2, context = 32, alphabet = "0123456789+-=" }
tokens_per_micro_batch = 2048
[rollout]
max_tokens = 16
[algorithm]
name = "grpo"
prompts_per_step = 16
steps = 1
loss.kl = 0.01
gap_tolerance = 10.0
"""


@cache
def peaks(*settings: str) -> list[Peak]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(RECIPE)
        loaded = load_recipe(file, list(settings))
        return peaks_of(RecipeFacts(resolved=loaded))


def test_what_is_kept_is_what_the_trainer_keeps() -> None:
    narrow = ("policy.model.dtype=bfloat16", "policy.optimizer_dtype=bfloat16")
    for dtype, masters, settings in (("float32", 0, ()), ("bfloat16", 4, narrow)):
        policy, reference = peaks(*settings)
        model = load_model(ModelConfig(new=NEW, dtype=dtype), seed=0, device=torch.device("cpu"), base=Path())
        numbers = sum(weight.numel() for weight in model.module.parameters())
        item = next(model.module.parameters()).dtype.itemsize
        assert reference.kept == {"weights": numbers * item}
        assert policy.kept == {"weights": numbers * item, "optimiser": numbers * (2 * item + masters)}
        optimizer = Optimizer(
            model.module, TrainConfig(), total_steps=1, gradients=Parallel.whole(model.module).gradients
        )
        assert sum(each.nbytes for each in optimizer.state().values()) - 8 == numbers * masters


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("policy.gradient_checkpointing=true",),
        pytest.param(("policy.model.dtype=bfloat16",), marks=pytest.mark.slow),
        pytest.param(("rollout.cache_gib=0.001",), marks=pytest.mark.slow),
    ],
)
def test_the_short_estimate_has_the_same_cache_and_nearly_the_same_activations(
    settings: tuple[str, ...],
) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(RECIPE)
        loaded = load_recipe(file, list(settings))
        facts = RecipeFacts(resolved=loaded)
        assert facts.longest is not None and facts.sizes is not None
        short = estimate(loaded, facts.sizes, facts.longest)
    policy = peaks(*settings)[0]
    assert short.phases["answers"]["KV cache"] == policy.phases["answers"]["KV cache"]
    assert short.kept["optimiser"] == policy.kept["optimiser"]
    passes = short.phases["trains"]["activations"] + short.phases["trains"]["logits"]
    measured = policy.phases["trains"]["activations"]  # of rows that share prompts, which are computed once
    assert 0.8 * measured < passes < 1.4 * measured


def test_beside_an_adapter_the_base_has_neither_gradients_nor_moments(tmp_path: Path) -> None:
    base = load_model(ModelConfig(new=NEW), seed=0, device=torch.device("cpu"), base=Path())
    save_model(base, tmp_path / "base")
    of_base = ("policy.model.new=none", f"policy.model.path={tmp_path / 'base'}")
    whole, _ = peaks(*of_base)
    policy, reference = peaks(*of_base, "policy.model.adapter={ rank = 2 }")
    learned = policy.kept["weights"] - whole.kept["weights"]
    assert reference.kept == {"adapter": learned}, "its base is the policy's"
    assert set(policy.kept) == set(whole.kept)
    weights = whole.kept["weights"]
    assert weights < policy.kept["weights"] < 1.1 * weights
    assert (
        0
        < sum(policy.kept.values()) - policy.kept["weights"]
        < 0.2 * weights
        < sum(whole.kept.values()) - weights
    )
    assert policy.phases["trains"]["gradients"] < 0.1 * whole.phases["trains"]["gradients"]
    narrow, _ = peaks(*of_base, 'policy.model.adapter={ rank = 2, base = "int8" }')
    config = ModelConfig(path=str(tmp_path / "base"), adapter=AdapterConfig(rank=2, base="int8"))
    model = load_model(config, seed=0, device=torch.device("cpu"), base=Path()).module
    assert narrow.kept["weights"] == sum(each.nbytes for each in model.parameters())
    largest = max(each.numel() for each in model.parameters() if each.dtype == torch.int8) * 4
    for phase in ("trains", "scores"):  # a pass materialises a layer's weight while it multiplies by it
        more = narrow.phases[phase]["activations"] - policy.phases[phase]["activations"]
        assert -0.2 * largest < more <= largest + 4096


def test_vllm_has_weights_and_room_for_keys_and_values_of_its_own(tmp_path: Path) -> None:
    """Always on a CPU; a tied head exists twice."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"release": "0.32.0", "missing": []}\'\n')
    python.chmod(0o755)
    vllm = ("rollout.engine=vllm", f"rollout.server={python}", "rollout.max_rows=10")
    plain, copied = peaks()[0], peaks(*vllm)[0]
    weights, tied = plain.kept["weights"], 14 * 128 * 4
    cache = 2 * (10 + 1) * 128 * 2 * 64 * 4
    assert copied.kept == plain.kept | {"vLLM's weights": weights + tied, "vLLM's KV cache": cache}
    assert copied.phases["answers"]["KV cache"] == 0 < plain.phases["answers"]["KV cache"]
    apart = peaks(
        *vllm,
        "placement.pools={ main = 1, answers = 1 }",
        'placement.roles={ sampler = "answers" }',
    )
    assert "vLLM's weights" not in apart[0].kept
    assert {peak.role: peak.kept for peak in apart}["sampler"] == {
        "vLLM's weights": weights + tied,
        "vLLM's KV cache": cache,
    }


def test_what_lies_in_host_memory_is_not_on_the_device() -> None:
    policy, reference = peaks("run.device=cuda", "policy.offload=all")
    usual = peaks()[1]
    assert policy.kept["optimiser"] == 0 and not reference.kept
    assert reference.phases["scores"]["weights"] == usual.kept["weights"]


def test_recomputed_activations_take_less() -> None:
    kept = peaks()[0].phases["trains"]
    again = peaks("policy.gradient_checkpointing=true")[0].phases["trains"]
    assert again["gradients"] == kept["gradients"]
    assert again["activations"] < 0.6 * kept["activations"]


def test_the_pass_over_the_prompts_is_counted_without_the_weights() -> None:
    policy, _ = peaks()
    assert 0 < policy.phases["answers"]["prompts"] < 0.5 * policy.kept["weights"], "64 tokens of prompts"


def test_activations_follow_the_micro_batch() -> None:
    whole = peaks()[0].phases["trains"]["activations"]
    half = peaks("policy.tokens_per_micro_batch=1024")[0].phases["trains"]["activations"]
    assert 0.4 * whole < half < 0.65 * whole


@pytest.mark.parametrize(
    "axes",
    ["{ fsdp = 2 }", *(pytest.param(f"{{ {axis} = 2 }}", marks=pytest.mark.slow) for axis in ("tp", "pp"))],
)
def test_a_rank_of_a_mesh_keeps_its_share(axes: str) -> None:
    alone, _ = peaks()
    shared, _ = peaks("placement.pools.main=2", f"placement.train_parallel.main={axes}")
    for part, amount in alone.kept.items():
        assert 0.45 * amount < shared.kept[part] < 0.75 * amount
    answers, whole = shared.phases["answers"], alone.phases["answers"]
    assert answers["KV cache"] == whole["KV cache"] / 2  # half of the rows, all layers, all heads


def test_the_fullest_moment_is_one_roles() -> None:
    found = peaks()
    kept = sum(sum(peak.kept.values()) for peak in found)
    assert rank_bytes(found, "main") == kept + sum(found[0].phases["trains"].values())


def test_what_cannot_fit_is_refused_with_what_would() -> None:
    policy = Peak(
        role="policy",
        pool="main",
        kept={"weights": 4 << 30},
        phases={"trains": {"gradients": 4 << 30, "activations": 24 << 30}},
    )
    require_room([policy], {"main": 1}, 32 << 30)
    with pytest.raises(ConfigError, match=r"need up to 32.0 GiB, and 31.0 GiB are free") as error:
        require_room([policy], {"main": 1}, 31 << 30)
    assert "activations 24.0 GiB while the policy trains" in str(error.value)
    assert "policy.gradient_checkpointing = true" in error.value.fix
    with pytest.raises(ConfigError, match=r"2 of pool main 64.0 GiB"):
        require_room([policy], {"main": 2}, 40 << 30)


def test_check_says_it_when_asked(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    assert main(["check", str(tmp_path / "run.toml"), "--memory"]) == 0
    said = capsys.readouterr().out
    assert "a rank of pool main: at most" in said and "policy trains: gradients" in said
    assert "policy answers: KV cache" in said
