"""The same engines on CUDA: nothing here is written for one device.

Each test runs on the CPU too, so that it is known to work before a GPU is at hand.
"""

from __future__ import annotations

import gc
import json
import logging
import shutil
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import Scores
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, choose_device, load_model, save_model
from rillflow.placement.slices import Slice
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout
from rillflow.runs.reader import read_spans
from rillflow.sharding.digest import slice_digest
from rillflow.sharding.packed_rows import PackedAttention, pack
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.trainer import Trainer

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest difference of two log probabilities: kernels of a GPU add in another order for another shape."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch sees none")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
in_each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


NEW = NewModel(hidden=64, layers=2, heads=4, kv_heads=2, context=512, alphabet="0123456789+-=")


def model_on(device: str, dtype: str = "float32", **settings: Any) -> LanguageModel:
    config = ModelConfig(**{"new": NEW, "dtype": dtype, **settings})
    return load_model(config, seed=0, device=choose_device(device), base=Path())


def prompts(model: LanguageModel, count: int = 6) -> Batch:
    texts = [f"{n}+{7 * n}=" for n in range(count)]
    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(count)]),
        fields={
            "tokens": Ragged.from_rows(model.tokenizer.encode_texts(texts)),
            "columns": Ragged.from_text(["{}"] * count),
        },
    )


def sampled(model: LanguageModel, *, temperature: float = 1.0) -> Batch:
    return engine_of(model, temperature=temperature).generate(prompts(model), samples=4 if temperature else 1)


def engine_of(model: LanguageModel, record_after: float = 64, **settings: Any) -> NativeEngine:
    return NativeEngine(
        model.module,
        RolloutConfig(**{"max_tokens": 12, "max_rows": 8, **settings}),
        stop_tokens=model.tokenizer.stop_tokens,
        seed=3,
        context=model.context,
        record_after=record_after,
    )


def long_rows(tokens: int = 400) -> Batch:
    """Rows that share a prompt and are longer than one block of any attention kernel."""
    draw = torch.Generator().manual_seed(5)
    prompt = torch.randint(2, 14, (tokens // 2,), generator=draw).tolist()
    lengths = [tokens // 2, tokens // 3, tokens // 4, 7]
    rows = [prompt + torch.randint(2, 14, (length,), generator=draw).tolist() for length in lengths]
    masks = [[False] * len(prompt) + [True] * length for length in lengths]
    return Batch(
        ids=row_ids([RowId(0, 0, sample) for sample in range(len(rows))]),
        fields={
            "tokens": Ragged.from_rows(rows),
            "loss_mask": Ragged.from_rows(masks, torch.bool),
            "advantages": torch.tensor([1.0, -0.5, 0.5, -1.0]),
        },
    )


def updated(model: LanguageModel, rows: Batch, steps: int = 2, **settings: Any) -> Trainer:
    """Return a new trainer after some steps on the same rows."""
    trainer = Trainer(model.module, TrainConfig(lr=1e-3, **settings), total_steps=9)
    for _ in range(steps):
        take_step(trainer, rows)
    return trainer


def take_step(trainer: Trainer, rows: Batch) -> None:
    """Do one on-policy step."""
    old = rows.ragged("tokens").with_values(trainer.scorer.logprobs(rows).values)
    trainer.update(rows.with_fields(sampler_logprobs=old), PolicyLoss(PolicyLossConfig(), max_tokens=12))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in module.named_parameters()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def largest_difference(model: LanguageModel, rollouts: Batch) -> float:
    """Between the trainer's log probabilities and the sampler's, over the sampled tokens."""
    trainer = Trainer(model.module, TrainConfig(tokens_per_micro_batch=64), total_steps=1)
    ours = trainer.scorer.logprobs(rollouts).values.cpu()
    mask = rollouts.ragged("loss_mask").values.cpu()
    return float((ours - rollouts.ragged("sampler_logprobs").values.cpu())[mask].abs().max())


@on_each_device
def test_sampler_and_trainer_agree(device: str) -> None:
    model = model_on(device)
    assert largest_difference(model, sampled(model)) < TOLERANCE[device]


@on_each_device
def test_an_update_raises_what_was_rewarded(device: str) -> None:
    model = model_on(device)
    rollouts = sampled(model)
    mask = rollouts.ragged("loss_mask").values
    rows = rollouts.with_fields(advantages=torch.ones(len(rollouts)))
    trainer = Trainer(model.module, TrainConfig(lr=1e-3), total_steps=1)
    before = trainer.scorer.logprobs(rollouts).values[mask].mean()
    metrics = trainer.update(rows, PolicyLoss(PolicyLossConfig(), max_tokens=12))
    assert float(trainer.scorer.logprobs(rollouts).values[mask].mean()) > float(before)
    assert metrics["train/grad_norm/mean"].value > 0


@on_each_device
def test_bfloat16_generates_and_trains(device: str) -> None:
    model = model_on(device, "bfloat16")
    rollouts = sampled(model)
    rows = rollouts.with_fields(advantages=torch.ones(len(rollouts)))
    metrics = Trainer(model.module, TrainConfig(lr=1e-3), total_steps=1).update(
        rows, PolicyLoss(PolicyLossConfig(), max_tokens=12)
    )
    assert metrics["train/grad_norm/mean"].value > 0


@on_each_device
def test_an_offloaded_state_is_in_host_memory_and_changes_no_bit(device: str) -> None:
    states = []
    for offload in (None, "optimizer"):
        model = model_on(device, "bfloat16")
        rows = sampled(model).with_fields(advantages=torch.ones(24))
        config = TrainConfig(lr=1e-3, optimizer_dtype="bfloat16", offload=offload)  # type: ignore[arg-type]
        trainer = Trainer(model.module, config, total_steps=2)
        for _ in range(2):
            trainer.update(rows, PolicyLoss(PolicyLossConfig(), max_tokens=12))
        states.append(trainer.optimizer.state())
    moments = [tensor for name, tensor in states[1].items() if name.startswith(("exp_avg", "master"))]
    assert {tensor.device.type for tensor in moments} == {"cpu"}
    assert {tensor.is_pinned() for tensor in moments if device == "cuda"} <= {True}
    assert all(torch.equal(states[1][name].cpu(), tensor.cpu()) for name, tensor in states[0].items())


@on_each_device
@in_each_dtype
def test_two_updates_from_the_same_weights_have_the_same_bits(device: str, dtype: str) -> None:
    found = []
    for _ in range(2):
        model = model_on(device, dtype)
        updated(model, long_rows())
        found.append(weights_of(model.module))
    assert same_bits(*found)


@on_each_device
@in_each_dtype
def test_generation_and_scoring_repeat_their_bits(device: str, dtype: str) -> None:
    model, found = model_on(device, dtype), []
    for _ in range(2):
        rollouts = sampled(model)
        scored = Trainer(model.module, TrainConfig(), total_steps=1).scorer.logprobs(rollouts)
        parts = [rollouts.ragged(name).values for name in ("tokens", "sampler_logprobs")]
        found.append({str(place): part for place, part in enumerate([*parts, scored.values])})
    assert same_bits(*found)


@on_each_device
@in_each_dtype
def test_a_resumed_update_has_the_same_bits(device: str, dtype: str, tmp_path: Path) -> None:
    """Weights and training state pass through files, as in a checkpoint."""
    model = model_on(device, dtype)
    rows = sampled(model).with_fields(advantages=torch.linspace(-1, 1, 24))
    trainer = updated(model, rows)
    save_model(model, tmp_path / "model")
    save_file(trainer.optimizer.state(), tmp_path / "state")
    again = model_on(device, dtype, new=None, path=str(tmp_path / "model"))
    resumed = updated(again, rows, steps=0)
    resumed.optimizer.load_state(load_file(tmp_path / "state"))
    for each in (trainer, resumed):
        take_step(each, rows)
    assert same_bits(weights_of(again.module), weights_of(model.module))
    assert resumed.optimizer.steps == 3


@on_each_device
@in_each_dtype
def test_gradient_checkpointing_changes_no_bit(device: str, dtype: str) -> None:
    found = []
    for recomputes in (False, True):
        model = model_on(device, dtype)
        rows = sampled(model).with_fields(advantages=torch.linspace(-1, 1, 24))
        updated(model, rows, gradient_checkpointing=recomputes)
        found.append(weights_of(model.module))
    assert same_bits(*found)


@on_each_device
@pytest.mark.parametrize("base", ["full", "int8"])
def test_an_adapter_learns_and_its_base_stays(device: str, base: str, tmp_path: Path) -> None:
    save_model(model_on("cpu"), tmp_path / "base")
    adapter = AdapterConfig(rank=4, base=base)  # type: ignore[arg-type]
    model = model_on(device, "bfloat16", new=None, path=str(tmp_path / "base"), adapter=adapter)
    rows = sampled(model).with_fields(advantages=torch.ones(24))
    mask, before = rows.ragged("loss_mask").values, weights_of(model.module)
    gap = Trainer(model.module, TrainConfig(), total_steps=1).scorer.logprobs(rows).values
    assert float((gap - rows.ragged("sampler_logprobs").values)[mask].abs().mean()) < 0.05
    trainer = updated(model, rows)
    after = weights_of(model.module)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and changed <= model.trained
    assert float((trainer.scorer.logprobs(rows).values - gap)[mask].mean()) > 0


@on_each_device
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_packed_attention_is_each_rows_own(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients against plain attention in float64, with the heads of Qwen2.5-0.5B."""
    packed = pack(long_rows().ragged("tokens"))
    draw, count = torch.Generator().manual_seed(1), len(packed.tokens)
    shapes = [(1, heads, count, 64) for heads in (14, 2, 2)]
    exact = [torch.randn(shape, generator=draw).to(dtype).double().requires_grad_() for shape in shapes]
    slopes = torch.randn(1, count, 14, 64, generator=draw)
    given = [each.detach().to(device, dtype).requires_grad_() for each in exact]
    plan = PackedAttention(packed, torch.device(device))
    found = plan.attend(0, given[0], given[1], given[2], Scores(scaling=0.125))
    (found.float() * slopes.to(device)).sum().backward()
    seen: set[int] = set()
    for places in packed.places.rows():
        new = [index for index, place in enumerate(places.tolist()) if place not in seen]
        seen |= set(places.tolist())
        with sdpa_kernel(SDPBackend.MATH):
            own = nn.functional.scaled_dot_product_attention(
                *(each[:, :, places] for each in exact), is_causal=True, scale=0.125, enable_gqa=True
            ).transpose(1, 2)[0]
        torch.testing.assert_close(
            found[0, places].detach().cpu().double(), own.detach(), rtol=0, atol=tolerance
        )
        (own[new] * slopes[0, places[new]]).sum().backward()
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        error = (mine.grad.cpu().double() - theirs.grad).norm() / theirs.grad.norm()
        assert float(error) < tolerance


@on_each_device
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_packed_rows_score_as_transformers_own_padded_rows(
    device: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    model, rows = model_on(device, dtype, new=NEW.model_copy(update={"init_std": 0.2})), long_rows()
    ours = Trainer(model.module, TrainConfig(), total_steps=1).scorer.logprobs(rows)
    save_model(model, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="sdpa", dtype=model.module.dtype
    ).to(device)
    tokens = rows.ragged("tokens")
    ids, there = tokens.padded(0), tokens.with_values(torch.ones_like(tokens.values)).padded(0)
    with torch.no_grad():
        logits = plain(input_ids=ids.to(device), attention_mask=there.to(device)).logits
    theirs = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None].to(device)).squeeze(-1).cpu()
    mask = rows.ragged("loss_mask").padded(False)[:, 1:]
    assert float((ours.padded(0.0)[:, 1:] - theirs)[mask].abs().mean()) < tolerance


@on_each_device
@in_each_dtype
def test_in_deterministic_mode_a_row_has_its_bits_in_any_batch(device: str, dtype: str) -> None:
    model = model_on(device, dtype)
    engine = engine_of(model, deterministic=True)
    together = engine.generate(prompts(model), samples=4)
    alone = engine.generate(prompts(model).select(torch.tensor([3])), samples=4)
    mine = together.select((together.ids[:, 1] == 3).nonzero().squeeze(1))
    for name in ("tokens", "sampler_logprobs"):
        assert torch.equal(mine.ragged(name).values, alone.ragged(name).values)


@on_each_device
@in_each_dtype
def test_recorded_passes_draw_the_same_tokens(
    device: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace on a CPU, a CUDA graph on a GPU; both run without the module's Python."""
    caplog.set_level(logging.INFO)
    model = model_on(device, dtype)
    calls = [0]
    model.module.register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
    found, spent = [], []
    for record_after in (3, inf):
        engine, before = engine_of(model, record_after, temperature=0.0, max_tokens=24), calls[0]
        made = [engine.generate(prompts(model)) for _ in range(2)]
        found.append(
            [(each.ragged("tokens").values, each.ragged("sampler_logprobs").values) for each in made]
        )
        spent.append(calls[0] - before)
    assert all(all(map(torch.equal, found[0][0], each)) for calls in found for each in calls)
    assert spent[0] < spent[1], spent
    assert "runs without" not in caplog.text


@on_each_device
def test_a_run_with_a_sampler_apart_resumes_with_the_same_bits(device: str, tmp_path: Path) -> None:
    """Weights cross between two copies in one process; digests are compared at every publish."""
    runs = []
    for name in ("whole", "resumed"):
        run = tmp_path / name
        run_small(run, device)
        if name == "resumed":
            (run / layout.FINISHED).unlink()
            shutil.rmtree(max((run / layout.CHECKPOINTS).iterdir()))
            run_small(run, device)
        newest = max((run / layout.CHECKPOINTS).iterdir())
        runs.append([file.read_bytes() for file in sorted((newest / "policy").glob("*.safetensors"))])
        assert {"policy.send", "sampler.receive"} <= {span.stage for span in read_spans(run)}
    assert runs[0] and runs[0] == runs[1]


def run_small(run: Path, device: str) -> None:
    """Run, or go on with, two steps of GRPO in float32."""
    (folder := run.with_name("recipe")).mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    loaded = load_recipe(
        folder / "run.toml", [f"run.dir={json.dumps(str(run))}", f"run.device={json.dumps(device)}"]
    )
    launch(loaded, quiet=True)


RECIPE = """
[run]
seed = 3
checkpoint_every = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 40
held_out = 4
[policy]
model.new = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
[placement]
backend = "inline"
pools = { main = 1, answers = 1 }
roles = { sampler = "answers" }
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 4
samples_per_prompt = 4
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


@needs_cuda
@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_an_offloaded_state_takes_no_device_memory_between_steps(offload: str | None) -> None:
    """bfloat16 weights take 2 bytes each; masters and two moments take 12 more, on the device or the host."""
    new = NEW.model_copy(update={"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 8})
    updated(model_on("cuda", "bfloat16"), long_rows(), steps=1)  # cuBLAS allocates its workspace once
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = model_on("cuda", "bfloat16", new=new)
    trainer = updated(model, long_rows(), steps=1, offload=offload)
    count = sum(weight.numel() for weight in model.module.parameters())
    bytes_each = (torch.cuda.memory_allocated() - before) / count
    assert trainer.optimizer.steps == 1
    assert (2 <= bytes_each < 3) if offload else (14 <= bytes_each < 15), f"{bytes_each:.2f} bytes a weight"


@needs_cuda
def test_both_devices_give_the_same_greedy_answers() -> None:
    answers = [
        sampled(model_on(device), temperature=0.0).ragged("tokens").values.cpu() for device in TOLERANCE
    ]
    assert torch.equal(*answers)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    values, box = torch.randn(70, 70_000).to(dtype), Slice(((3, 73), (11, 70_011)))
    assert slice_digest(values, box, dtype) == slice_digest(values.cuda(), box, dtype).cpu()


@pytest.mark.slow
def test_the_benchmark_is_ready_for_a_gpu() -> None:
    """On processors, on the mesh of one rank."""
    script = Path(__file__).parents[2] / "benchmarks" / "training" / "gpu.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rehearse", "--steps", "1"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    row = next(line for line in done.stdout.splitlines() if line.startswith("| one device"))
    assert "policy.publish" in row and "failed" not in done.stdout


@needs_cuda
def test_auto_is_the_gpu() -> None:
    assert choose_device("auto").type == "cuda"
