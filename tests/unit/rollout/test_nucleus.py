"""The threshold of top-k and top-p in a large vocabulary equals that of a full sort and is faster."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.sampling import DrawSettings, draw, least_kept

ALL = torch.iinfo(torch.int64).max


def by_sorting(weights: Tensor, top_k: int, top_p: float) -> float:
    """Return the threshold by definition: a token stays while those before it hold less than p of the sum."""
    best = weights.sort(descending=True).values[:top_k].double()
    before = best.cumsum(0) - best
    stays = int((before < top_p * best.sum()).sum()) if top_p < 1 else len(best)
    return float(best[stays - 1])


def weights_of(kind: str, vocabulary: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(vocabulary, generator=generator)
    logits = {
        "flat": noise * 0.1,
        "spread": noise * 3,
        "peaked": noise * 9,
        "with ties": (noise * 3).bfloat16().float(),
        "equal": torch.zeros(vocabulary),
        "one alone": torch.full((vocabulary,), -torch.inf).index_fill_(
            0, torch.tensor([seed % vocabulary]), 0.0
        ),
        "likely where the sample looks": noise.index_fill(0, torch.arange(0, vocabulary, 64), 9.0),
        "likely where it does not": noise.index_fill(0, torch.arange(1, vocabulary, 64), 9.0),
        "in order": torch.linspace(-9, 0, vocabulary),
    }[kind]
    return torch.softmax(logits, -1)


KINDS = (
    *("flat", "spread", "peaked", "with ties", "equal", "one alone"),
    *("likely where the sample looks", "likely where it does not", "in order"),
)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1025, 8193, 20_000, 40_011]),
    top_k=st.sampled_from([1, 50, 9_000, ALL]),
    top_p=st.sampled_from([1e-9, 0.01, 0.5, 0.95, 0.9999, 1.0]),
)
def test_the_threshold_is_that_of_a_whole_sort(
    kind: str, seed: int, vocabulary: int, top_k: int, top_p: float
) -> None:
    weights = weights_of(kind, vocabulary, seed)
    found = least_kept(weights.numpy(), top_k, top_p, np.empty(vocabulary, np.float32))
    if found == by_sorting(weights, top_k, top_p):
        return
    best = weights.sort(descending=True).values[:top_k].double()  # or two sums are equal up to rounding
    assert 1 > top_p > best[best > found].sum() / best.sum() - 1e-7
    assert best[best >= found].sum() / best.sum() > top_p - 1e-7


def test_a_part_that_holds_the_wanted_sum_exactly_has_the_threshold() -> None:
    """4,096 weights of 2 and 8,192 of 1 hold half each; the sample makes the second cut separate them."""
    weights = np.ones(12_288, np.float32)
    weights[::64][:114] = 2
    weights[np.flatnonzero(np.arange(12_288) % 64)[: 4_096 - 114]] = 2
    assert least_kept(weights, ALL, 0.5, np.empty_like(weights)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_themselves_stay_as_they_were(kind: str) -> None:
    weights = weights_of(kind, 20_000, 1)
    before = weights.clone()
    least_kept(weights.numpy(), 500, 0.9, np.empty(20_000, np.float32))
    assert torch.equal(weights, before)


def test_rows_of_a_large_vocabulary_draw_the_tokens_of_the_definition_beside_any_others() -> None:
    kinds = [
        SamplingConfig(),
        SamplingConfig(temperature=0.6, top_p=0.7),
        SamplingConfig(top_k=40),
        SamplingConfig(top_k=900, top_p=0.9),
        SamplingConfig(top_p=1e-6),
        SamplingConfig(temperature=0.0, top_p=0.5),
    ]
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(len(kinds), 20_000, generator=generator) * 4).bfloat16().float()
    uniforms = torch.rand(len(kinds), generator=generator, dtype=torch.float64)
    together = draw(logits, DrawSettings.of(kinds, torch.device("cpu")), uniforms)
    for row, kind in enumerate(kinds):
        alone = draw(
            logits[row : row + 1], DrawSettings.of([kind], torch.device("cpu")), uniforms[row : row + 1]
        )
        assert torch.equal(alone.tokens, together.tokens[row : row + 1])
        weights = torch.softmax(logits[row] / (kind.temperature or 1.0), -1)
        kept = weights.double() * (weights >= by_sorting(weights, kind.top_k or ALL, kind.top_p))
        falls = int(torch.searchsorted(kept.cumsum(0), uniforms[row] * kept.sum(), right=True))
        assert int(together.tokens[row]) == (falls if kind.temperature else int(logits[row].argmax()))


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_the_threshold_takes_a_fraction_of_a_sort(spread: float) -> None:
    weights = torch.softmax(torch.randn(151_936, generator=torch.Generator().manual_seed(0)) * spread, -1)
    space = np.empty(len(weights), np.float32)

    def seconds(work: object) -> float:
        start = time.process_time()
        assert callable(work)
        work()
        return time.process_time() - start

    threshold = min(seconds(lambda: least_kept(weights.numpy(), ALL, 0.95, space)) for _ in range(9))
    whole = min(seconds(lambda: weights.sort(descending=True)) for _ in range(3))
    assert threshold < whole / 3
