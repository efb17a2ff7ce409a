"""A sum tree agrees with cumulative sums of the same priorities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow_classic.sum_tree import SumTree

PRIORITIES = st.one_of(st.just(0.0), st.floats(0.01, 100.0))


@settings(deadline=None)
@given(st.lists(PRIORITIES, min_size=1, max_size=1200), st.integers(0, 2**32 - 1))
def test_draws_and_totals_agree_with_cumulative_sums(priorities: list[float], seed: int) -> None:
    random, leaves = np.random.default_rng(seed), np.array(priorities)
    tree = SumTree(len(leaves))
    tree.set(np.arange(len(leaves)), random.random(len(leaves)))
    order = random.permutation(len(leaves))
    tree.set(order, leaves[order])
    assert tree.total == pytest.approx(leaves.sum())
    assert np.array_equal(tree.leaves, leaves)
    if leaves.sum() == 0:
        return
    masses = random.random(64) * tree.total
    found, sums = tree.find(masses), leaves.cumsum()
    assert (leaves[found] > 0).all()
    slack = 1e-9 * tree.total
    assert (sums[found] >= masses - slack).all()
    assert (sums[found] - leaves[found] <= masses + slack).all()


@pytest.mark.parametrize("num_places", [1, 31, 32, 33, 1024, 1025])
def test_the_whole_mass_finds_the_last_place_with_priority(num_places: int) -> None:
    tree = SumTree(num_places)
    tree.set(np.array([num_places // 2]), np.array([0.1]))
    assert tree.find(np.array([0.0, tree.total, 2 * tree.total])).tolist() == [num_places // 2] * 3
