"""vLLM with a copy of the weights over two ranks: the same rows as on one, with weights from both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.records.batch import Batch
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import Stops
from rillflow.rollout.native.engine import NativeEngine
from rillflow.workers.collectives import ThreadGroup, ThreadRanks

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/models"))
sys.path.insert(0, str(Path(__file__).parent))
from shards import local_weights
from small_engines import CONTEXT, adapted_model, assert_same, engine, model, prompts

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each server one thread: threads of two servers on two cores would wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_two_ranks(of: Any, work: Callable[[Any, int], Batch]) -> list[Batch]:
    """Make an engine on each of two ranks, and return what ``work`` returns there."""
    from rillflow_parts.vllm.engine import VllmEngine

    plan, group = tensor_plan(of.module), ThreadGroup(2, 300.0)
    config = RolloutConfig(max_tokens=24, max_rows=16)

    def rank(number: int) -> Batch:
        ranks = ThreadRanks(group, number)
        module = sampling_module(of.module, plan, ranks)
        held = local_weights(of.module, plan, number, 2)
        assign(module, held)
        stops = Stops(config.stop, of.tokenizer)
        made = VllmEngine(
            module, config, stop_tokens=stops.tokens, seed=7, context=CONTEXT, tp=ranks, stops=stops
        )
        made.load(0, held)
        return work(made, number)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


def test_two_ranks_sample_what_one_samples() -> None:
    of = model()
    expected = engine(NativeEngine, of).generate(prompts(), 2)
    first, second = on_two_ranks(of, lambda made, _: made.generate(prompts(), 2))
    assert_same(first, expected)
    assert_same(second, first, within=1e-6)


def test_an_adapter_of_two_ranks_is_whole_in_vllm() -> None:
    of = adapted_model()
    expected = engine(NativeEngine, of).generate(prompts(), 1)
    first, second = on_two_ranks(of, lambda made, _: made.generate(prompts(), 1))
    assert_same(first, expected, within=1e-4)
    assert_same(second, first, within=1e-6)


def test_a_later_version_takes_new_weights_from_both_ranks() -> None:
    of = model()

    def again(made: Any, number: int) -> Batch:
        made.generate(prompts(2), 1)
        held = local_weights(of.module, tensor_plan(of.module), number, 2)
        made.load(1, {name: weight * 1.5 for name, weight in held.items()})
        return made.generate(prompts(), 1)

    first, _ = on_two_ranks(of, again)
    with torch.no_grad():
        for weight in of.module.parameters():
            weight *= 1.5
    expected = engine(NativeEngine, of)  # it samples from the module's own weights
    expected.load(1, dict(of.module.named_parameters()))
    assert_same(first, expected.generate(prompts(), 1))
