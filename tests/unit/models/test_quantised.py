"""An int8 and a 4-bit base: stored weights, computation, and slice-wise reading."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rillflow.errors import ModelError, install_package
from rillflow.models import nf4
from rillflow.models import quantised as module_of
from rillflow.models.adapters import adapted, merge, restore, trained_beside
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, outline, quiet, save_model
from rillflow.models.quantised import (
    FORMS,
    QuantisedLinear,
    dequantised,
    keep_quantised,
    product,
    quantised,
    widened,
)
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.workers.collectives import Ranks, ThreadGroup, ThreadRanks
from tests.unit.models.shards import local_weights

CPU = torch.device("cpu")
TOKENS = torch.tensor([[3, 5, 2, 9, 4, 4, 1]])
Load = Callable[..., LanguageModel]
needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
every_base = pytest.mark.parametrize("kept", ["int8", pytest.param("4bit", marks=needs_library)])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    new = NewModel(hidden=128, layers=2, context=64)
    save_model(load_model(ModelConfig(new=new), seed=0, device=CPU, base=Path()), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def load(base: Path) -> Load:
    def loaded(path: Path = base, dtype: Any = "float32", **adapter: Any) -> LanguageModel:
        config = AdapterConfig(**adapter) if adapter else None
        return load_model(
            ModelConfig(path=str(path), dtype=dtype, adapter=config), seed=1, device=CPU, base=Path()
        )

    return loaded


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=TOKENS).logits
    return found


def trained(model: LanguageModel) -> LanguageModel:
    """Return the model with adapter values that training could have produced."""
    draw = torch.Generator().manual_seed(7)
    for tensor in trained_beside(model.module).values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=draw))
    return model


def test_a_number_is_off_by_half_a_step_of_its_row_at_most() -> None:
    rows = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 7)[:, None]
    rows[3] = 0
    whole, scale = quantised(rows)
    assert whole.dtype == torch.int8 and scale.shape == (7, 1)
    assert whole.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    off = (dequantised(whole, scale, torch.float32) - rows).abs()
    assert (off <= scale * 0.5001).all()
    assert float(off.sum()) > 0, "8 bits are not enough for random numbers"


@needs_library
def test_4_bits_are_the_nearest_of_16_values_times_the_largest_of_64_numbers() -> None:
    rows = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 6)[:, None]
    form = FORMS["4bit"]
    whole, scale = form.quantise(rows)
    assert whole.dtype == torch.uint8 and whole.shape == (6, 64) and scale.shape == (6, 2)
    blocks = rows.view(6, 2, 64)
    assert torch.equal(scale, blocks.abs().amax(-1))
    found = form.dequantise(whole, scale, torch.float32).view(6, 2, 64) / scale[..., None]
    values = found.mul(1e4).round().unique() / 1e4
    assert len(values) == 16 and (values[0], values[-1]) == (-1, 1)
    nearest = (blocks[..., None] / scale[..., None, None] - values).abs().amin(-1)
    torch.testing.assert_close((found - blocks / scale[..., None]).abs(), nearest, rtol=0, atol=2e-4)
    part = form.quantise(rows[2:4])
    assert torch.equal(part[0], whole[2:4]) and torch.equal(part[1], scale[2:4])
    assert form.per_number == 0.5625


@every_base
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_dequantised_weight_and_keeps_none_for_the_gradient(
    dtype: torch.dtype, kept: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(128, 20).to(dtype).requires_grad_(False)
    form = FORMS[kept]
    whole, scale = form.quantise(layer.weight)
    keep_quantised(layer, form)
    layer.weight, layer.scale = (nn.Parameter(each, requires_grad=False) for each in (whole, scale))
    states = torch.randn(2, 5, 128, generator=draw).to(dtype).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        found = layer(states)
    assert sum(each.nbytes for each in saved) == whole.nbytes + scale.nbytes
    weight = dequantised(whole, scale, torch.float32).to(dtype)
    expected = nn.functional.linear(states, weight, layer.bias)
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(layer(states), expected)
    given = torch.randn(found.shape, generator=draw).to(dtype)
    (gradient,) = torch.autograd.grad(found, states, given)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, states, given)[0])
    assert torch.equal(product(layer, states), nn.functional.linear(states, weight))


@every_base
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "lora"), ("bfloat16", "lora"), ("float32", "dora")])
def test_the_bodys_linear_weights_are_quantised_and_all_else_is_unchanged(
    load: Load, dtype: Any, kind: Any, kept: str
) -> None:
    how = {"rank": 4, "kind": kind, "targets": ("q_proj", "v_proj")}
    model, full = load(dtype=dtype, base=kept, **how), load(dtype=dtype, **how)
    held, plain = dict(model.module.named_parameters()), dict(full.module.named_parameters())
    narrow = {name for name, each in held.items() if each.dtype == FORMS[kept].dtype}
    assert len(narrow) == 2 * 7 and len(adapted(model.module)) == 2 * 2
    assert all("_proj.weight" in name for name in narrow)
    for name, each in plain.items():
        assert name in narrow or name.endswith(".length") or torch.equal(held[name], each), name
    assert model.trained == full.trained == {name for name in held if held[name].requires_grad}
    expected = logits(full.module)
    assert not torch.equal(logits(model.module), expected)
    near = (0.01 if dtype == "float32" else 0.05) * (1 if kept == "int8" else 10)
    torch.testing.assert_close(
        logits(model.module), expected, rtol=0, atol=near * float(expected.abs().max())
    )


@every_base
def test_what_it_says_is_what_a_full_model_of_the_dequantised_weights_says(load: Load, kept: str) -> None:
    model = trained(load(rank=4, base=kept))
    full = load(rank=4)
    handed = widened(dict(model.module.named_parameters()), torch.float32)
    assert handed.keys() == dict(full.module.named_parameters()).keys()
    for name, parameter in full.module.named_parameters():
        parameter.data = handed[name].detach()
    assert torch.equal(logits(model.module), logits(full.module))


@every_base
def test_what_was_saved_says_what_its_base_was_kept_in(load: Load, tmp_path: Path, kept: str) -> None:
    model = trained(load(rank=4, base=kept))
    save_model(model, tmp_path / "saved")
    assert set(load_file(tmp_path / "saved/adapter_model.safetensors")) == {
        f"base_model.model.{name.replace('_adapter.down', '.lora_A').replace('_adapter.up', '.lora_B')}"
        for name in model.trained
    }
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again.module), logits(model.module))
    assert again.adapter is not None and again.adapter.config.base == kept
    path = tmp_path / "saved/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rillflow_base": "int4"}))
    with pytest.raises(ModelError, match="has rillflow_base = 'int4'"):
        load(tmp_path / "saved")


def test_peft_reads_it_beside_the_full_base(load: Load, tmp_path: Path, base: Path) -> None:
    peft = pytest.importorskip("peft")
    model = trained(load(rank=4, base="int8"))
    save_model(model, tmp_path / "saved")
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(base)
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "saved").eval()
    restore(model.module, torch.float32, dict(load().module.named_parameters()))
    torch.testing.assert_close(logits(model.module), logits(theirs), rtol=0, atol=2e-6)


@every_base
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_it_says_what_was_trained(load: Load, tmp_path: Path, kind: str, kept: str) -> None:
    model = trained(load(rank=4, kind=kind, base=kept))
    expected = logits(model.module)
    restore(model.module, torch.float32)
    merge(model.module)
    assert {type(part) for part in model.module.modules() if isinstance(part, nn.Linear)} == {nn.Linear}
    save_model(replace(model, adapter=None), tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged").module), expected, rtol=0, atol=2e-5)


@every_base
@pytest.mark.parametrize("block", [2**24, 2400])
def test_slices_are_those_of_the_whole(
    base: Path, monkeypatch: pytest.MonkeyPatch, block: int, kept: Any
) -> None:
    config = ModelConfig(path=str(base), adapter=AdapterConfig(rank=4, base=kept))
    how: dict[str, Any] = {"seed": 1, "device": CPU, "base": Path()}
    whole = dict(load_model(config, **how).module.named_parameters())
    monkeypatch.setattr(module_of, "_BLOCK", block)
    source = dict(outline(LanguageModel, config, section="x", **how).source())
    assert source.keys() == whole.keys()
    for name, read in source.items():
        box = tuple(slice(length // 3, length // 3 + max(1, length // 2)) for length in whole[name].shape)
        assert torch.equal(read(box).to(whole[name].dtype), whole[name][box]), name
        assert torch.equal(read(()).to(whole[name].dtype), whole[name]), name


@every_base
def test_ranks_share_it_in_generation(load: Load, kept: str) -> None:
    whole = trained(load(rank=4, base=kept)).module
    plan, group = tensor_plan(whole), ThreadGroup(2, 20.0)

    def part(rank: int) -> Tensor:
        ranks: Ranks = ThreadRanks(group, rank)
        module = sampling_module(whole, plan, ranks)
        assign(module, local_weights(whole, plan, rank, 2))
        assert sum(isinstance(each, QuantisedLinear) for each in module.modules()) == 2 * 7
        return logits(module)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(part, range(2)))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], logits(whole), rtol=0, atol=1e-5)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(base: Path, load: Load, odd: float) -> None:
    file, name = base / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name][3, 4] = odd
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"the weight {name} has numbers that are not finite"):
        load(rank=4, base="int8")


@needs_library
def test_a_layer_without_whole_blocks_is_refused_by_name(tmp_path: Path) -> None:
    new = load_model(ModelConfig(new=NewModel(hidden=32, layers=2)), seed=0, device=CPU, base=Path())
    save_model(new, tmp_path / "narrow")
    config = ModelConfig(path=str(tmp_path / "narrow"), adapter=AdapterConfig(rank=2, base="4bit"))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj has 32 inputs") as caught:
        load_model(config, seed=0, device=CPU, base=Path())
    assert 'base = "int8"' in str(caught.value)


def test_a_missing_library_is_named_with_its_extra(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=re.escape(install_package("quant"))):
        load(rank=4, base="4bit")
