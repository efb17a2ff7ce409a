"""A row is as long in whatever order it begins; lengths follow the distribution, clipped mass and all."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow_planner.simulator.draws import Row, rows_of
from rillflow_planner.simulator.layout import Layout
from rillflow_planner.workload import BLOCK, Lengths, Workload

LOGNORMAL = Lengths(kind="lognormal", limit=8192, median=800, sigma=1.0)


def rows(response: Lengths, prompt: int, *, seed: int = 0, samples: int = 8) -> list[Row]:
    lengths = Lengths(kind="measured", limit=300, values=(100, 200, 300))
    workload = Workload(prompts=4, samples=8, prompt=lengths, response=response)
    return rows_of(workload, prompt, seed=seed, samples=samples)


def responses(response: Lengths, prompts: int) -> np.ndarray:
    return np.array([[row.response_tokens for row in rows(response, prompt)] for prompt in range(prompts)])


@given(prompt=st.integers(0, 2**40), seed=st.integers(0, 2**64 - 1))
def test_a_row_is_the_same_whatever_begins_beside_it(prompt: int, seed: int) -> None:
    few, many = (rows(LOGNORMAL, prompt, seed=seed, samples=samples) for samples in (4, 9))
    assert few == many[:4]


def test_seeds_and_prompts_differ() -> None:
    assert rows(LOGNORMAL, 0, seed=1) != rows(LOGNORMAL, 0, seed=2)
    assert rows(LOGNORMAL, 0)[0].response_tokens != rows(LOGNORMAL, 1)[0].response_tokens
    assert {rows(LOGNORMAL, prompt)[0].prompt_tokens for prompt in range(50)} == {100, 200, 300}


def test_lengths_have_the_distribution_with_its_clipped_mass() -> None:
    lengths = Lengths(kind="lognormal", limit=2000, median=800, sigma=1.0)
    found = responses(lengths, 4000)
    assert found.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert (found == 2000).mean() == pytest.approx(1 - NormalDist().cdf(math.log(2000 / 800)), rel=0.05)
    assert np.median(found) == pytest.approx(800, rel=0.03)


def test_a_block_of_steps_has_the_middles_of_equal_parts_of_the_distribution() -> None:
    """So few steps have as many long rows as they should: of 512 rows one is the longest of 512."""
    found = responses(LOGNORMAL, BLOCK * 4)
    assert sorted(found.flatten().tolist()) == LOGNORMAL.spread(BLOCK * 4 * 8).round().tolist()
    assert len(set(found.argmax(axis=0).tolist())) > 1, "each sample has an order of its own"


def test_measured_lengths_come_as_often_as_they_were_seen() -> None:
    found = responses(Lengths(kind="measured", limit=9, values=(1, 1, 1, 9)), 2000)
    assert set(found.flatten().tolist()) == {1, 9}
    assert (found == 9).mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("wrong", [{"parts": -1}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(wrong))} is {next(iter(wrong.values())):g}"):
        Layout(problem=None, costs=None, plan=None, **wrong)  # type: ignore[arg-type]
