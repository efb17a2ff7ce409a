"""The methods as formulas: against plain computations, and by their laws."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow_merging.methods import (
    Span,
    Spans,
    dare,
    kept_elements,
    linear,
    normalised,
    slerp,
    slerp_shares,
    thresholds,
    ties,
)


def pieces(parents: torch.Tensor, base: torch.Tensor, cut: int = 8) -> Spans:
    def found() -> Iterator[Span]:
        for first in range(0, parents.shape[1], cut):
            span = slice(first, first + cut)
            yield Span(name="w", first=first, parents=list(parents[:, span]), base=base[span])

    return found


def merged(method: object, parents: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    of = pieces(parents, base, 8 if parents.shape[1] < 1000 else parents.shape[1])
    combine = method(of)  # type: ignore[operator]
    return torch.cat([combine(piece) for piece in of()])


def drawn(seed: int, count: int = 3, size: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + 1, size, generator=generator).double()
    return values[1:], values[0]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_weights_sum_to_one_and_keep_their_ratio(given_weights: list[float]) -> None:
    found = normalised(given_weights, len(given_weights))
    assert math.fsum(found) == pytest.approx(1)
    assert found[0] / found[1] == pytest.approx(given_weights[0] / given_weights[1])


@settings(max_examples=10)
@given(st.integers(0, 99), st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_every_method_is_linear_where_it_keeps_all_and_nothing_disagrees(
    seed: int, given_weights: list[float]
) -> None:
    """Changes of one direction have no angle, no sign in dispute, and nothing is dropped."""
    parents, base = drawn(seed, 1)
    parents = base + torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64) * (parents[0] - base)
    shares = normalised(given_weights, 3)
    expected = merged(linear(shares), parents, base)
    for method in (slerp(shares), ties(shares, 1.0, 1.0), dare(shares, 1.0, 1.0, seed)):
        torch.testing.assert_close(merged(method, parents, base), expected, rtol=0, atol=1e-12)


@settings(max_examples=10)
@given(st.integers(0, 99), st.floats(0, 1))
def test_slerp_is_the_equation(seed: int, part: float) -> None:
    parents, base = drawn(seed, 2)
    one, two = parents - base
    angle = math.acos(float(one @ two / (one.norm() * two.norm())))
    expected = base + (math.sin((1 - part) * angle) * one + math.sin(part * angle) * two) / math.sin(angle)
    torch.testing.assert_close(merged(slerp([1 - part, part]), parents, base), expected)


def test_slerp_keeps_the_length_of_equally_long_changes() -> None:
    gram = torch.eye(3, dtype=torch.float64)
    for shares in ([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]):
        assert math.hypot(*slerp_shares(gram, shares)) == pytest.approx(1)
    opposed = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert slerp_shares(opposed, [0.25, 0.75]) == pytest.approx([0.25, 0.75])
    assert slerp_shares(torch.zeros(2, 2, dtype=torch.float64), [0.5, 0.5]) == [0.5, 0.5]


@settings(max_examples=10)
@given(st.integers(0, 99), st.floats(0.01, 1))
def test_a_threshold_keeps_the_share_it_should(seed: int, density: float) -> None:
    parents, base = drawn(seed, 2, size=97)
    found = thresholds(pieces(parents, base), density)["w"]
    sizes = (parents - base).float().abs()
    expected = sizes.sort(dim=1, descending=True).values[:, math.ceil(density * 97) - 1]
    assert torch.equal(found, expected)


def test_ties_averages_what_agrees() -> None:
    base = torch.zeros(4, dtype=torch.float64)
    parents = torch.tensor([[4.0, -3.0, 0.1, 2.0], [2.0, 5.0, 0.2, -2.0]], dtype=torch.float64)
    found = merged(ties([0.5, 0.5], 0.75, 1.0), parents, base)
    assert found.tolist() == pytest.approx([3.0, 5.0, 0.0, 0.0])
    assert merged(ties([0.5, 0.5], 0.75, 2.0), parents, base).tolist() == pytest.approx([6.0, 10.0, 0.0, 0.0])


@settings(max_examples=20)
@given(st.integers(0, 99), st.floats(0.01, 1))
def test_a_shared_threshold_is_that_of_all_weights_as_one_vector(seed: int, density: float) -> None:
    """Three weights whose changes are of other sizes, one of them in several pieces."""
    parents, base = drawn(seed, 2, size=97)
    parents = base + (parents - base) * torch.linspace(0.01, 1, 97).double()
    cuts = {"a": (0, 50), "b": (50, 60), "c": (60, 97)}

    def found() -> Iterator[Span]:
        for name, (first, last) in cuts.items():
            for at in range(first, last, 16):
                span = slice(at, min(at + 16, last))
                yield Span(name=name, first=at - first, parents=list(parents[:, span]), base=base[span])

    (least,) = thresholds(found, density, together=True).values()
    sizes = (parents - base).float().abs()
    assert torch.equal(least, sizes.sort(1, descending=True).values[:, math.ceil(density * 97) - 1])


def test_dare_drops_the_share_it_should_and_keeps_the_mean() -> None:
    base = torch.zeros(2**16, dtype=torch.float64)
    parents = torch.ones(2, 2**16, dtype=torch.float64)
    found = merged(dare([0.5, 0.5], 0.25, 1.0, 0), parents, base)
    assert float(found.mean()) == pytest.approx(1, abs=0.02)
    assert float((found == 0).double().mean()) == pytest.approx(0.75**2, abs=0.01)
    assert not torch.equal(found, merged(dare([0.5, 0.5], 0.25, 1.0, 1), parents, base))


def test_what_is_dropped_depends_on_no_cut() -> None:
    whole = Span(name="w", first=0, parents=[torch.zeros(64)])
    part = Span(name="w", first=32, parents=[torch.zeros(30)])
    assert torch.equal(kept_elements(5, whole, 0, 0.5)[32:62], kept_elements(5, part, 0, 0.5))
