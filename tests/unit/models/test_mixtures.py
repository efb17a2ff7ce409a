"""Mixtures of experts: grouped products give the outputs and gradients of the module's expert loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_gradients_are_those_of_the_module_s_own_loop(kind: str) -> None:
    new = NewModel(architecture=kind, hidden=32, layers=2, context=64)
    module = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path()).module
    assert module.config._experts_implementation == "grouped_mm", "what a run computes with"
    tokens = torch.randint(0, 20, (1, 48), generator=torch.Generator().manual_seed(1))
    found = []
    for way in ("grouped_mm", "eager"):
        module.set_experts_implementation(way)
        module.zero_grad()
        logits = module(input_ids=tokens, use_cache=False).logits
        nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        found.append({name: each.grad.clone() for name, each in module.named_parameters()})
    experts = [name for name in found[0] if ".experts." in name]
    assert experts and all(float(found[0][name].abs().max()) > 0 for name in experts)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=1e-5 * float(gradient.abs().max()))
