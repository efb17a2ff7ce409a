"""The same engines on CUDA: nothing here is written for one device.

Each test runs on the CPU too, so that it is known to work before a GPU is at hand.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, choose_device, load_model
from rillflow.placement.slices import Slice
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.sharding.digest import slice_digest
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.trainer import Trainer

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest difference of two log probabilities: kernels of a GPU add in another order for another shape."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch sees none")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def model_on(device: str, dtype: str = "float32") -> LanguageModel:
    new = NewModel(hidden=64, layers=2, heads=4, kv_heads=2, context=64, alphabet="0123456789+-=")
    return load_model(
        ModelConfig(new=new, dtype=dtype),  # type: ignore[arg-type]
        seed=0,
        device=choose_device(device),
        base=Path(),
    )


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
    engine = NativeEngine(
        model.module,
        RolloutConfig(max_tokens=12, max_rows=8, temperature=temperature),
        stop_tokens=model.tokenizer.stop_tokens,
        seed=3,
        context=model.context,
    )
    return engine.generate(prompts(model), samples=4 if temperature else 1)


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
    """On processors, under the one mesh of one rank."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rehearse", "--ranks", "1"],
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
