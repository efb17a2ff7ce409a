"""Whole weights for vLLM from the shards of two ranks; vLLM itself is not needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.models.quantised import widened
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.workers.collectives import SingleRank, ThreadGroup, ThreadRanks
from rillflow_parts.vllm.shards import Shards, meeting_port
from tests.unit.models.shards import local_weights

CPU = torch.device("cpu")
needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.mark.parametrize("base", [None, "full", "int8", pytest.param("4bit", marks=needs_library)])
def test_two_ranks_join_every_weight_of_the_whole_model(tmp_path: Path, base: str | None) -> None:
    new = NewModel(hidden=128, layers=2, context=32, alphabet="0123456789+")
    save_model(load_model(ModelConfig(new=new), seed=0, device=CPU, base=Path()), tmp_path / "base")
    adapter = None if base is None else AdapterConfig.model_validate({"rank": 4, "base": base})
    config = ModelConfig(path=str(tmp_path / "base"), adapter=adapter)
    whole = load_model(config, seed=1, device=CPU, base=Path()).module
    plan, group = tensor_plan(whole), ThreadGroup(2, 20.0)

    def rank(number: int) -> tuple[dict[str, Tensor], int]:
        ranks = ThreadRanks(group, number)
        module = sampling_module(whole, plan, ranks)
        held = local_weights(whole, plan, number, 2)
        assign(module, held)
        return Shards(module, ranks).whole(widened(held, torch.float32)), meeting_port(ranks)

    with ThreadPoolExecutor(2) as threads:
        (first, port), (second, other) = threads.map(rank, range(2))
    expected = widened({name: each.detach() for name, each in whole.named_parameters()}, torch.float32)
    assert first.keys() == second.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(first[name], weight) and torch.equal(second[name], weight), name
    assert port == other > 0


def test_one_rank_keeps_its_weights() -> None:
    weights = {"a.weight": torch.ones(2)}
    assert Shards(None, SingleRank()).whole(weights)["a.weight"] is weights["a.weight"]
    assert meeting_port(SingleRank()) == 0
