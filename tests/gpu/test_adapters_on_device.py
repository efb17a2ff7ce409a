"""Adapters, quantised bases and chosen defaults on CUDA; each test runs on the CPU too."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rillflow.cli.main import main
from rillflow.models.adapters import trained_beside
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, choose_device, load_model, quiet, save_model
from rillflow.models.quantised import FORMS, dequantised, quantised_layers
from rillflow.runs import layout
from rillflow.runs.reader import read_metrics
from rillflow.training.config import TrainConfig
from rillflow.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from test_gpu import NEW, engine_of, on_each_device, prompts, sampled

needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
every_base = pytest.mark.parametrize("base", ["full", "int8", pytest.param("4bit", marks=needs_library)])
TOKENS = torch.tensor([[3, 5, 2, 9, 4, 4, 1, 7, 6, 2]])
NUMBERS = 120_000_000
"""Parameters of the smallest model that counts as large."""


def adapted(folder: Path, device: str, dtype: str, base: str = "full") -> LanguageModel:
    """Return a model on a device with an adapter of random values."""
    if not (folder / "base").exists():
        new = NEW.model_copy(update={"init_std": 0.1})
        made = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
        save_model(made, folder / "base")
    named = {"path": str(folder / "base"), "dtype": dtype, "adapter": {"rank": 4, "base": base}}
    config = ModelConfig.model_validate(named)
    model = load_model(config, seed=1, device=choose_device(device), base=Path())
    draw = torch.Generator().manual_seed(7)
    for tensor in trained_beside(model.module).values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=draw).to(tensor))
    return model


def loss_of(module: nn.Module) -> Tensor:
    tokens = TOKENS.to(next(module.parameters()).device)
    logits = module(input_ids=tokens).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits[0], tokens[0, 1:])


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of an adapter by PEFT's names of its matrices."""
    module.zero_grad()
    loss_of(module).backward()
    found = {
        name: each.grad.float().cpu() for name, each in module.named_parameters() if each.grad is not None
    }
    for ours, theirs in (("_adapter.down", ".lora_A"), ("_adapter.up", ".lora_B")):
        found = {name.replace(ours, theirs): each for name, each in found.items()}
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): each for name, each in found.items()
    }


@on_each_device
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_loss_and_gradients_of_an_adapter_are_pefts(
    device: str, dtype: str, within: float, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(tmp_path, device, dtype)
    save_model(model, tmp_path / "saved")
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "saved", is_trainable=True)
    theirs = theirs.to(device)
    assert float(loss_of(model.module)) == pytest.approx(float(loss_of(theirs)), rel=within)
    mine, other = gradients(model.module), gradients(theirs)
    assert mine.keys() == other.keys() and len(mine) == 2 * 7 * NEW.layers
    for name in mine:
        assert float((mine[name] - other[name]).norm()) <= within * float(other[name].norm()) + 1e-6, name


@on_each_device
@every_base
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_over_a_quantised_base_are_those_over_its_dequantised_weights(
    device: str, base: str, dtype: str, tmp_path: Path
) -> None:
    model, full = adapted(tmp_path, device, dtype, base), adapted(tmp_path, device, dtype)
    for name, layer in quantised_layers(model.module).items():
        whole = dequantised(layer.weight, layer.scale, full.module.dtype)
        full.module.get_submodule(name).weight = nn.Parameter(whole, requires_grad=False)
    assert bool(quantised_layers(model.module)) == (base != "full")
    assert float(loss_of(model.module)) == pytest.approx(float(loss_of(full.module)), rel=1e-5)
    mine, other = gradients(model.module), gradients(full.module)
    for name in mine:
        within = (1e-4 if dtype == "float32" else 0.02) * float(other[name].norm()) + 1e-7
        assert float((mine[name] - other[name]).norm()) <= within, name


@on_each_device
@needs_library
def test_four_bits_mean_the_same_on_every_device(device: str) -> None:
    form = FORMS["4bit"]
    rows = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight, scale = form.quantise(rows)
    expected = form.dequantise(weight, scale, torch.float32)
    found = form.dequantise(weight.to(device), scale.to(device), torch.float32).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    there = form.quantise(rows.to(device))
    assert float((there[0].cpu() != weight).float().mean()) < 0.01, "ties may be rounded the other way"
    torch.testing.assert_close(there[1].cpu(), scale)


@on_each_device
@pytest.mark.parametrize(
    "base", [pytest.param("int8", marks=pytest.mark.slow), pytest.param("4bit", marks=needs_library)]
)
def test_recorded_passes_over_a_quantised_base_draw_the_same_tokens(
    device: str, base: str, tmp_path: Path
) -> None:
    model = adapted(tmp_path, device, "float32", base)
    found = []
    for record_after in (3, inf):
        engine = engine_of(model, record_after, temperature=0.0, max_tokens=24)
        made = [engine.generate(prompts(model)) for _ in range(2)]
        found.append([each.ragged("tokens").values for each in made])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    rows = sampled(model)
    ours = Trainer(model.module, TrainConfig(), total_steps=1).scorer.logprobs(rows).values.cpu()
    mask = rows.ragged("loss_mask").values.cpu()
    assert float((ours - rows.ragged("sampler_logprobs").values.cpu())[mask].abs().max()) < 1e-3


@on_each_device
@needs_library
def test_four_bits_take_an_eighth_of_the_device_memory(device: str, tmp_path: Path) -> None:
    """A layer's numbers take 4 bits, and 64 of them a float32 scale."""
    model = adapted(tmp_path, device, "float32", "4bit")
    for layer in quantised_layers(model.module).values():
        held = layer.weight.nbytes + layer.scale.nbytes
        assert held == layer.in_features * layer.out_features * FORMS["4bit"].per_number
        assert layer.weight.device.type == layer.scale.device.type == device


@on_each_device
@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["all weights", "lora"])
def test_a_run_with_the_chosen_defaults_learns_resumes_and_keeps_them(
    device: str, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    """On CUDA the model is large enough for bfloat16 and gradient checkpointing; on the CPU it is small."""
    hidden = 1024 if device == "cuda" else 64
    layers = -(-NUMBERS // (13 * hidden**2)) if device == "cuda" else 2
    new = NewModel(hidden=hidden, layers=layers, heads=8, kv_heads=2, context=64, alphabet="0123456789+-=")
    made = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    save_model(made, tmp_path / "model")
    (tmp_path / "reward.py").write_text(
        "def even(completions):\n    return [sum(c in '02468' for c in text) / 8 for text in completions]\n"
    )
    lines = "" if adapter is None else f"model.adapter.rank = {adapter['rank']}\n"
    recipe = tmp_path / "run.toml"
    recipe.write_text(
        f'[run]\ndevice = "{device}"\n[task]\nsource = "arithmetic"\ndigits = 1\nheld_out = 5\n'
        f'[policy]\nmodel.path = "model"\n{lines}'
        '[rollout]\nmax_tokens = 8\nmax_rows = 32\n[reward]\nfunction = "reward.py:even"\n'
        '[algorithm]\nname = "grpo"\nsteps = 2\nprompts_per_step = 4\nsamples_per_prompt = 4\n'
    )
    words = ["run", str(recipe), "--dir", str(tmp_path / "run"), "--quiet"]
    assert main([*words, "--set", "algorithm.steps=1"]) == 0
    assert main(words) == 0
    kept = json.loads((tmp_path / "run" / layout.CONFIG).read_text())["policy"]
    is_large = device == "cuda"
    rate = 1e-5 if adapter or not is_large else 1e-6
    assert kept["model"]["dtype"] == ("bfloat16" if is_large else "float32")
    assert (kept["lr"], kept["gradient_checkpointing"]) == (rate, is_large)
    steps = [step.metrics for step in read_metrics(tmp_path / "run")]
    assert len(steps) == 2 and all(step["train/grad_norm/mean"].value > 0 for step in steps)
    gaps = [step["mismatch/kl/mean"].value for step in steps]
    assert max(map(abs, gaps)) < (0.01 if is_large else 1e-5)
