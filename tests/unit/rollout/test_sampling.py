"""Sampling compared with the definitions and with transformers' own filters, as exact frequencies.

Uniform numbers are evenly spaced over [0, 1), so frequencies are exact and no test depends on chance.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.sampling import Drawn, DrawSettings, Seen, draw

CPU = torch.device("cpu")


def even(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def drawn(logits: Tensor, uniforms: Tensor, *rows: SamplingConfig) -> Drawn:
    wanted = rows if len(rows) == len(logits) else rows * len(logits)
    return draw(logits, DrawSettings.of(wanted, CPU), uniforms)


def frequencies(logits: Tensor, config: SamplingConfig, count: int = 40_000) -> Tensor:
    """Return [V] the frequency of each token in draws from one row of logits."""
    tokens = drawn(logits.expand(count, -1), even(count), config).tokens
    return torch.bincount(tokens, minlength=len(logits)) / count


def scores(vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    logits = scores(50)
    wanted = torch.softmax(logits / temperature, -1)
    found = frequencies(logits, SamplingConfig(temperature=temperature))
    assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("vocabulary", [1025, 3000, 4096])
def test_a_large_vocabulary_is_drawn_from_alike(vocabulary: int) -> None:
    logits = scores(vocabulary) * 2
    found = frequencies(logits, SamplingConfig(), count=5000)
    assert float((found - torch.softmax(logits, -1)).abs().max()) < 5e-4


def test_a_large_vocabulary_is_searched_as_a_small_one() -> None:
    """Padding with impossible tokens changes the search method, but not the result."""
    logits = scores(700)[None].expand(999, -1)
    padded = torch.cat([logits, torch.full((999, 900), -torch.inf)], 1)
    one, other = (drawn(rows, even(999), SamplingConfig()) for rows in (logits, padded))
    assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("vocabulary", [16, 2000])
def test_a_forbidden_token_is_never_drawn(vocabulary: int) -> None:
    logits = torch.full((3, vocabulary), -torch.inf)
    logits[:, 7] = 0.0
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    found = drawn(logits, edges, SamplingConfig())
    assert found.tokens.tolist() == [7, 7, 7]
    assert found.logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_logprob_is_that_of_the_whole_vocabulary_after_temperature(temperature: float) -> None:
    logits = torch.stack([scores(40, seed) for seed in range(20)])
    config = SamplingConfig(temperature=temperature, top_k=3, top_p=0.8)
    found = drawn(logits, even(20), config)
    wanted = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, found.tokens[:, None])[:, 0]
    assert torch.equal(found.logprobs, wanted)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.stack([scores(40, seed) for seed in range(20)])
    found = drawn(logits, even(20), SamplingConfig(temperature=0.0, top_k=5, top_p=0.5))
    assert torch.equal(found.tokens, logits.argmax(-1))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    vocabulary=st.sampled_from([5, 30, 1500]),
)
def test_what_is_kept_is_what_transformers_keeps(
    seed: int, top_k: int, top_p: float, vocabulary: int
) -> None:
    logits = scores(vocabulary, seed)[None]
    kept = logits
    if top_k:
        kept = TopKLogitsWarper(top_k)(None, kept)
    if top_p < 1:
        kept = TopPLogitsWarper(top_p)(None, kept)
    wanted = torch.softmax(kept[0], -1)
    found = frequencies(logits[0], SamplingConfig(top_k=top_k, top_p=top_p), count=2000)
    assert float((found - wanted).abs().max()) < 2e-3
    assert not found[wanted == 0].any()


def test_a_top_k_above_the_vocabulary_keeps_all() -> None:
    logits = scores(10)[None].expand(500, -1)
    one = drawn(logits, even(500), SamplingConfig(top_k=99))
    assert torch.equal(one.tokens, drawn(logits, even(500), SamplingConfig()).tokens)


def test_tokens_of_equal_score_stay_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).expand(300, -1)
    found = drawn(logits, even(300), SamplingConfig(top_k=2))
    assert found.tokens.unique().tolist() == [1, 2, 3]


def test_a_row_is_drawn_alike_beside_any_others() -> None:
    kinds = [
        SamplingConfig(),
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=0.6, top_p=0.7),
        SamplingConfig(top_k=4),
        SamplingConfig(top_k=9, top_p=0.9),
        SamplingConfig(top_p=0.2),
    ]
    logits = torch.stack([scores(300, seed) for seed in range(len(kinds))]).bfloat16().float()  # with ties
    count = 500
    mixed = drawn(logits.repeat(count, 1), even(count).repeat_interleave(len(kinds)), *kinds * count)
    for row, kind in enumerate(kinds):
        alone = drawn(logits[row].expand(count, -1), even(count), kind)
        assert torch.equal(alone.tokens, mixed.tokens[row :: len(kinds)])
        assert torch.equal(alone.logprobs, mixed.logprobs[row :: len(kinds)])


def test_beside_a_larger_top_k_no_row_keeps_a_token_more_than_its_own() -> None:
    count = 200
    logits = torch.tensor([3.0, 2.5, 2.0, 1.5, 1.0]).expand(3 * count, -1)
    kinds = [SamplingConfig(top_k=k) for k in (1, 4, 2)]
    tokens = drawn(logits, even(count).repeat_interleave(3), *kinds * count).tokens
    assert [sorted(set(tokens[row::3].tolist())) for row in range(3)] == [[0], [0, 1, 2, 3], [0, 1]]


def test_a_top_k_of_all_tokens_keeps_those_that_rounding_would_lose() -> None:
    """999 tokens of e^-40 each: none of them changes a sum that starts with the likeliest token's mass."""
    logits = torch.full((1, 1000), -40.0)
    logits[0, 999] = 0.0
    number = torch.tensor([100.5 * math.exp(-40)], dtype=torch.float64)
    assert drawn(logits, number, SamplingConfig(top_k=1000)).tokens.tolist() == [100]


@pytest.mark.parametrize("vocabulary", [16, 2000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_show_in_the_logprob(
    vocabulary: int, bad: float, temperature: float
) -> None:
    logits = torch.zeros(2, vocabulary)
    logits[1, 3] = bad
    found = drawn(logits, even(2), SamplingConfig(temperature=temperature))
    assert found.logprobs.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("vocabulary", [50, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rest", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.7}])
def test_min_p_is_transformers_own_before_the_other_cuts(vocabulary: int, rest: dict[str, float]) -> None:
    logits = scores(vocabulary)[None]
    wanted = MinPLogitsWarper(0.05)(None, logits / rest.get("temperature", 1.0))
    if "top_k" in rest:
        wanted = TopKLogitsWarper(9)(None, wanted)
    if "top_p" in rest:
        wanted = TopPLogitsWarper(0.8)(None, wanted)
    found = frequencies(logits[0], SamplingConfig(min_p=0.05, **rest), count=20_000)
    assert float((found - wanted[0].softmax(-1)).abs().max()) < 2e-4


def seen_in(*rows: tuple[list[int], list[int]]) -> Tensor:
    seen = Seen(50, CPU)
    for index, (tokens, sampled) in enumerate(rows):
        seen.begin(RowId(0, index, 0), tokens, sampled[:-1])
        if sampled:
            seen.add(RowId(0, index, 0), sampled[-1])
    return seen.of([RowId(0, index, 0) for index in range(len(rows))])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_penalties_bend_the_choice_and_leave_the_log_probability(temperature: float) -> None:
    """One row without penalty, one with a repetition penalty, one with count penalties; each as if alone."""
    logits = torch.stack([scores(50, seed) for seed in range(3)])
    kinds = [
        SamplingConfig(temperature=temperature),
        SamplingConfig(temperature=temperature, repetition_penalty=1.8),
        SamplingConfig(temperature=temperature, presence_penalty=0.5, frequency_penalty=0.25),
    ]
    had = seen_in(([3, 9, 9], [9]), ([3, 9], [7, 7]))
    had[0, 1, 7] = 2
    bent = logits.clone()
    bent[1:2] = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([[3, 9, 9]]), logits[1:2])
    bent[2, 7] -= 0.5 + 2 * 0.25
    if temperature == 0:
        found = draw(logits, DrawSettings.of(kinds, CPU), even(3), had).tokens
        assert torch.equal(found, bent.argmax(-1))
        return
    count = 20_000
    for index, kind in enumerate(kinds):
        own = had[:, index - 1 : index].repeat(1, count, 1) if index else None
        rows = DrawSettings.of([kind] * count, CPU)
        found = draw(logits[index].expand(count, -1), rows, even(count), own)
        often = torch.bincount(found.tokens, minlength=50) / count
        assert float((often - (bent[index] / temperature).softmax(-1)).abs().max()) < 2e-4
        plain = (logits[index] / temperature).log_softmax(-1)
        assert torch.equal(found.logprobs, plain[found.tokens])
    uniforms = even(3)
    together = draw(logits, DrawSettings.of(kinds, CPU), uniforms, had).tokens.tolist()
    for index, kind in enumerate(kinds):
        own = had[:, index - 1 : index] if index else None
        row = slice(index, index + 1)
        alone = draw(logits[row], DrawSettings.of([kind], CPU), uniforms[row], own).tokens
        assert alone.tolist() == together[row]
