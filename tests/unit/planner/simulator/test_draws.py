"""A row is as long in whatever order it begins; lengths follow the distribution, clipped mass and all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow.planner.simulator.draws import Draws, slow_devices
from rillflow.planner.simulator.layout import Settings
from rillflow.planner.workload import Lengths, Workload

LOGNORMAL = Lengths(kind="lognormal", limit=8192, median=800, sigma=1.0)


def draws(response: Lengths = LOGNORMAL, *, seed: int = 0, samples: int = 8) -> Draws:
    prompt = Lengths(kind="measured", limit=300, values=(100, 200, 300))
    workload = Workload(prompts=4, samples=8, prompt=prompt, response=response)
    return Draws(workload, seed=seed, samples=samples)


def responses(found: Draws, prompts: int) -> np.ndarray:
    return np.array([[row.response_tokens for row in found.rows(prompt)] for prompt in range(prompts)])


@given(order=st.permutations(list(range(6))), seed=st.integers(0, 2**64 - 1))
def test_a_row_depends_on_no_order(order: list[int], seed: int) -> None:
    forwards, mixed = draws(seed=seed), draws(seed=seed)
    expected = [forwards.rows(prompt * 500) for prompt in range(6)]
    found = {prompt: mixed.rows(prompt * 500) for prompt in order}
    assert [found[prompt] for prompt in range(6)] == expected


def test_seeds_and_prompts_differ() -> None:
    assert draws(seed=1).rows(0) != draws(seed=2).rows(0)
    one = draws()
    assert one.rows(0)[0].response_tokens != one.rows(1)[0].response_tokens
    assert {one.rows(prompt)[0].prompt_tokens for prompt in range(50)} == {100, 200, 300}


def test_lengths_have_the_distribution_with_its_clipped_mass() -> None:
    lengths = Lengths(kind="lognormal", limit=2000, median=800, sigma=1.0)
    found = responses(draws(lengths), 4000)
    assert found.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert (found == 2000).mean() == pytest.approx(lengths.clipped, rel=0.05)
    assert np.median(found) == pytest.approx(800, rel=0.03)


def test_measured_lengths_come_as_often_as_they_were_seen() -> None:
    found = responses(draws(Lengths(kind="measured", limit=9, values=(1, 1, 1, 9))), 2000)
    assert set(found.flatten().tolist()) == {1, 9}
    assert (found == 9).mean() == pytest.approx(0.25, abs=0.02)


def test_slow_devices_are_as_many_as_told() -> None:
    assert not slow_devices(0, 1000, 0.0).any()
    assert slow_devices(0, 1000, 1.0).all()
    assert slow_devices(0, 5000, 0.2).mean() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("wrong", [{"straggler_share": -0.1}, {"straggler_factor": 0.5}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(wrong))} is {next(iter(wrong.values())):g}"):
        Settings(**wrong)
