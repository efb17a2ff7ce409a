"""vLLM runs an adapter with its base, in this process and served, and matches the native engine."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.models.adapters import is_adapter
from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch
from rillflow.records.rollout import rollout_batch, starts
from rillflow.rollout.engine import Engine
from rillflow.rollout.native.engine import NativeEngine

sys.path.insert(0, str(Path(__file__).parent))
from small_engines import SERVED, adapted_model, assert_same, both, prompts, until_empty

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
)


def changed(each: Engine, of: LanguageModel, version: int) -> None:
    """Load the next version into an engine; only the adapter changes."""
    weights = dict(of.module.named_parameters())
    is_native = isinstance(each, NativeEngine)
    factor = 0.5 ** (1 if is_native else version)  # the native engine samples from the module itself
    other = {name: weight * factor if is_adapter(name) else weight for name, weight in weights.items()}
    if is_native:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(other[name])
    each.load(version, other)


def by_three_versions(each: Engine, of: LanguageModel) -> Batch:
    """Sample rows of the first adapter, rows of two adapters, and new rows of the third."""
    for start in starts(prompts(6), 2):
        each.add(start)
    ended = [row for _ in range(6) for row in each.step()]
    changed(each, of, 1)
    ended += until_empty(each)
    changed(each, of, 2)
    for start in starts(prompts(6, first=6), 2):
        each.add(start)
    ended += until_empty(each)
    return rollout_batch(sorted(ended, key=lambda row: row.row))


@pytest.mark.parametrize(
    ("where", "kind", "base"),
    [({}, "lora", "full"), (SERVED, "rslora", "full"), ({}, "lora", "int8")],
    ids=["here, lora", "served, rslora", "beside int8"],
)
def test_each_versions_adapter_is_sampled_with(where: dict[str, Any], kind: str, base: str) -> None:
    """Each version recomputes shared prompts."""
    of = adapted_model(kind, base)
    vllm, native = both(of, **where)
    found = by_three_versions(vllm, of)
    assert_same(found, by_three_versions(native, of), within=1e-4)
    assert set(found.ragged("versions").values.tolist()) == {-1, 0, 1, 2}
    assert vllm.score([[1, 2, 3, 4]]) != vllm.score([[1, 2, 3, 5]])


def test_the_base_is_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = adapted_model()
    vllm, _ = both(of)
    handed: list[str] = []
    monkeypatch.setattr(vllm._core, "reload", lambda *_: handed.append("base"))
    changed(vllm, of, 1)
    assert handed == []
