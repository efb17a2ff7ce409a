"""vLLM continues rows like the native engine: the same tokens, and float32 log probabilities to 1e-5."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from math import inf, nan
from pathlib import Path

import pytest
import torch

from rillflow.app.memory import VLLM_PLACES
from rillflow.errors import RolloutError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.batch import Batch
from rillflow.records.rollout import rollout_batch, starts
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Engine
from rillflow.rollout.native.engine import NativeEngine

sys.path.insert(0, str(Path(__file__).parent))
from small_engines import CONTEXT, SERVED, STOP, assert_same, both, model, prompts, until_empty

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
)


@pytest.fixture(scope="module")
def whole() -> LanguageModel:
    return model()


@pytest.fixture(scope="module", params=[{}, SERVED], ids=["here", "served"])
def engines(whole: LanguageModel, request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """Return the engines of the first tests; vLLM serves one engine per process, the newest."""
    return both(whole, stop=STOP, **request.param)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "max_tokens": 60},
        {"temperature": 0, "max_tokens": 9},
    ],
    ids=str,
)
def test_it_says_what_the_native_engine_says(
    engines: tuple[Engine, Engine], sampling: dict[str, float]
) -> None:
    how = SamplingConfig(**{"max_tokens": 24, "stop": STOP, **sampling})
    found, expected = (each.generate(prompts(), 4, how) for each in engines)
    assert_same(found, expected)
    if not sampling:
        assert {0, 1} == set(found.dense("finish").tolist())


def test_parts_come_as_their_rows_end(engines: tuple[Engine, Engine]) -> None:
    parts = [prompts(4), prompts(4, first=4)]
    found, expected = (list(each.generate_parts(parts, 2)) for each in engines)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert not engines[0].has_work


def with_a_break(each: Engine, passes: int = 5) -> Batch:
    """Sample rows, of which some are aborted and added again later."""
    begun = starts(prompts(6), 2)
    for start in begun:
        each.add(start)
    ended = [row for _ in range(passes) for row in each.step()]
    running = {start.row for start in begun} - {row.row for row in ended}
    aside = [each.abort(row) for row in sorted(running)[::2]]
    assert all(1 <= sum(row.loss_mask) <= passes for row in aside)
    ended += [row for _ in range(3) for row in each.step()]
    for row in aside:
        each.add(row)
    ended += until_empty(each)
    return rollout_batch(sorted(ended, key=lambda row: row.row))


def test_a_row_that_was_taken_out_goes_on_with_its_own_random_numbers(
    engines: tuple[Engine, Engine],
) -> None:
    found = with_a_break(engines[0])
    assert_same(found, with_a_break(engines[1]))
    whole = engines[0].generate(prompts(6), 2)
    assert found.ragged("tokens").lists() == whole.ragged("tokens").lists()


def plain(of: LanguageModel, text: Sequence[int]) -> list[float]:
    """Return log probabilities from one pass of transformers' module."""
    with torch.inference_mode():
        logits = of.module(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    return [float(logits[place, token]) for place, token in enumerate(text[1:])]


def test_a_given_text_takes_the_way_of_drawn_tokens(
    engines: tuple[Engine, Engine], whole: LanguageModel
) -> None:
    """Also while rows run, which continue undisturbed."""
    texts = [[1, 2, 3, 4, 5, 6, 7], [3, 3, 2], [4, 0]]
    made = engines[0]
    for start in starts(prompts(6), 2):
        made.add(start)
    ended = made.step()
    found = made.score(texts)
    ended += until_empty(made)
    expected = [plain(whole, text) for text in texts]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    alone = made.generate(prompts(6), 2)
    assert_same(rollout_batch(sorted(ended, key=lambda row: row.row)), alone)


def test_what_cannot_be_asked_is_said(engines: tuple[Engine, Engine]) -> None:
    made = engines[0]
    (start,) = starts(prompts(1), 1)
    made.add(start)
    with pytest.raises(RolloutError, match="in the engine already"):
        made.add(start)
    made.abort(start.row)
    with pytest.raises(RolloutError, match="not in the engine"):
        made.abort(start.row)
    with pytest.raises(RolloutError, match="context is 64"):
        made.add(start.inserted([1] * CONTEXT))
    assert not made.has_work
    block = VLLM_PLACES["cpu"]
    assert made.held_bytes == 2 * (16 + 1) * block * 64 * 2 * 4, "what check --memory foretells"


def halfway(each: Engine, of: LanguageModel) -> Batch:
    """Sample rows with two versions of weights."""
    for start in starts(prompts(6), 2):
        each.add(start)
    ended = [row for _ in range(6) for row in each.step()]
    other = {name: weight * 1.1 for name, weight in of.module.named_parameters()}
    if isinstance(each, NativeEngine):
        with torch.no_grad():
            for name, weight in of.module.named_parameters():
                weight.copy_(other[name])
    each.load(1, other)
    return rollout_batch(sorted(ended + until_empty(each), key=lambda row: row.row))


def test_rows_go_on_with_new_weights_as_if_they_had_been_read_by_them(whole: LanguageModel) -> None:
    """Keys and values of the old weights are dropped, including those of shared prompts."""
    found, expected = (halfway(each, whole) for each in both(whole))
    assert_same(found, expected)
    assert set(found.ragged("versions").values.tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2"])
def test_other_architectures_have_their_weights_by_name(architecture: str) -> None:
    of = model(architecture) if architecture != "gpt2" else model_of_whole_heads(architecture)
    found, expected = (each.generate(prompts(), 2) for each in both(of))
    assert_same(found, expected)


def model_of_whole_heads(architecture: str) -> LanguageModel:
    new = NewModel(
        architecture=architecture,
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=4,
        context=CONTEXT,
        alphabet="0123456789+=",
    )
    return load_model(ModelConfig(new=new), seed=1, device=torch.device("cpu"), base=Path())


def test_bfloat16_is_near(whole: LanguageModel) -> None:
    del whole
    of = model()
    of.module.to(torch.bfloat16)
    found, expected = (each.generate(prompts(), 2) for each in both(of))
    one, other = found.ragged("sampler_logprobs"), expected.ragged("sampler_logprobs")
    alike = [
        abs(a - b)
        for mine, theirs, tokens, others in zip(
            one.lists(),
            other.lists(),
            found.ragged("tokens").lists(),
            expected.ragged("tokens").lists(),
            strict=True,
        )
        if tokens == others
        for a, b in zip(mine, theirs, strict=True)
    ]
    assert alike and sum(alike) / len(alike) < 0.05


@pytest.mark.parametrize("odd", [nan, inf])
def test_logits_that_are_no_numbers_end_it(odd: float) -> None:
    of = model()
    made, _ = both(of)
    made.load(1, {name: weight * odd for name, weight in of.module.named_parameters()})
    with pytest.raises(RolloutError, match="are not finite"):
        made.generate(prompts(2))
    assert not made.has_work
