"""A small model, engines for it, and comparisons of their rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from rillflow.models.adapters import attach, is_adapter
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.models.quantised import quantised, quantised_layers
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Rollout
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import Engine, Stops
from rillflow.rollout.native.engine import NativeEngine
from rillflow.workers.collectives import SingleRank

CONTEXT = 64
STOP = ("12", "+4")
"""Stop texts of two tokens each."""
SERVED = {"server": sys.executable}


def model(architecture: str = "qwen2") -> LanguageModel:
    """Return a small model with scaled weights, because fresh weights make all tokens alike."""
    new = NewModel(
        architecture=architecture, hidden=128, layers=2, heads=4, context=CONTEXT, alphabet="0123456789+="
    )
    made = load_model(ModelConfig(new=new), seed=1, device=torch.device("cpu"), base=Path())
    with torch.no_grad():
        for each in made.module.parameters():
            each *= 4 if each.ndim > 1 else 1
    return made


def engine(kind: type[Engine], of: LanguageModel, **settings: Any) -> Engine:
    config = RolloutConfig(**{"max_tokens": 24, "max_rows": 16, **settings})
    stops = Stops(config.stop, of.tokenizer)
    made = kind(
        of.module, config, stop_tokens=stops.tokens, seed=7, context=of.context, tp=SingleRank(), stops=stops
    )
    made.load(0, dict(of.module.named_parameters()))
    return made


def both(of: LanguageModel, **settings: Any) -> tuple[Engine, Engine]:
    from rillflow_parts.vllm.engine import VllmEngine

    return engine(VllmEngine, of, **settings), engine(NativeEngine, of, **settings)


def prompts(count: int = 10, first: int = 0) -> Batch:
    texts = [[1 + index % 9, 2, 3, 4][: 1 + index % 4] for index in range(count)]
    return Batch(
        ids=torch.tensor([[0, first + index, 0] for index in range(count)]),
        fields={"tokens": Ragged.from_rows(texts), "columns": Ragged.from_text(["{}"] * count)},
    )


def assert_same(found: Batch, expected: Batch, within: float = 1e-5) -> None:
    for name in ("tokens", "loss_mask", "versions"):
        assert found.ragged(name).lists() == expected.ragged(name).lists(), name
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.dense("finish").tolist() == expected.dense("finish").tolist()
    assert found.ragged("columns").to_text() == expected.ragged("columns").to_text()
    gap = found.ragged("sampler_logprobs").values - expected.ragged("sampler_logprobs").values
    assert gap.abs().max() < within


def until_empty(each: Engine) -> list[Rollout]:
    ended = []
    while each.has_work:
        ended += each.step()
    return ended


def adapted_model(kind: str = "lora", base: str = "full") -> LanguageModel:
    """Return the small model with an adapter whose layers change its output."""
    of = model()
    whole = {name: weight.detach().clone() for name, weight in of.module.named_parameters()}
    attach(of.module, AdapterConfig(rank=4, alpha=8, kind=kind, base=base))
    for name, layer in quantised_layers(of.module).items():
        numbers, scale = quantised(whole[f"{name}.weight"])
        layer.weight = torch.nn.Parameter(numbers, requires_grad=False)
        layer.scale = torch.nn.Parameter(scale, requires_grad=False)
    for name, weight in list(of.module.named_parameters()):
        if is_adapter(name):
            owner, _, last = name.rpartition(".")
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 3
            of.module.get_submodule(owner).register_parameter(last, torch.nn.Parameter(drawn))
    return of
