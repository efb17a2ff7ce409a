"""Rows agree with plain passes of the same weights, however cache rows are reused (see reused_rows).

Passes are rounded as on CUDA, so padding rows write into the cache too.
"""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.rollout.reused_rows import Reuse, engine_of, round_passes

POSITION_BYTES = 2 * 2 * (8 + 8) * 4
"""Bytes of a position of the tiny model."""
MOST = {"float32": 1e-5, "bfloat16": 0.02}
"""Largest deviation of a log probability."""


def reused(module: nn.Module, seed: int, *, is_rounded: bool, events: int = 15, **more: object) -> Reuse:
    """Run random events on an engine and return them."""
    chance, own = Random(seed), copy.deepcopy(module)
    rows, positions = chance.choice([2, 5, 12, 20]), chance.choice([None, 300, 450, 600])
    if positions is not None and not more.get("deterministic"):
        more["cache_gib"] = positions * POSITION_BYTES * 1.5 / 2**30
    engine = engine_of(own, max_rows=rows, **more)
    if is_rounded:
        round_passes(engine)
    events_of = Reuse(module=own, engine=engine, chance=chance)
    events_of.run(events)
    return events_of


EXAMPLES = 4
seeds = st.integers(0, 2**32)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds)
@pytest.mark.parametrize(("dtype", "is_rounded"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_rows_agree_with_plain_passes_however_cache_rows_are_reused(
    tiny: nn.Module, dtype: str, is_rounded: bool, seed: int
) -> None:
    rows = reused(copy.deepcopy(tiny).to(getattr(torch, dtype)), seed, is_rounded=is_rounded)
    assert max(rows.deviations(), default=0.0) <= MOST[dtype]


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds)
def test_in_deterministic_mode_too(tiny: nn.Module, seed: int) -> None:
    rows = reused(tiny, seed, is_rounded=True, deterministic=True)
    assert max(rows.deviations(), default=0.0) <= MOST["float32"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds, is_rounded=st.booleans())
def test_a_row_that_keeps_its_cache_shares_no_keys_of_older_weights(
    tiny: nn.Module, seed: int, is_rounded: bool
) -> None:
    """The offered cache rows are compared with the present weights after each step."""
    assert reused(tiny, seed, is_rounded=is_rounded, keep_cache=True).offered >= 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"deterministic": True}, {"keep_cache": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_rows_agree(tiny: nn.Module, dtype: str, mode: dict[str, bool]) -> None:
    """The same with long histories, and every way of reuse is met."""
    module, found = copy.deepcopy(tiny).to(getattr(torch, dtype)), list[Reuse]()
    for seed in range(60):
        found.append(reused(module, seed, is_rounded=True, events=40, **mode))
        if not mode.get("keep_cache"):
            assert max(found[-1].deviations(), default=0.0) <= MOST[dtype], f"seed {seed}"
    assert sum(rows.copied for rows in found) > 1000
    assert sum(rows.offered for rows in found) > 10_000
    assert sum(rows.requeued for rows in found) > 100


def test_the_events_meet_padding_copies_and_preemption(tiny: nn.Module) -> None:
    """So the properties above are tried on them."""
    own = copy.deepcopy(tiny)
    engine = engine_of(own, max_rows=12, cache_gib=600 * POSITION_BYTES * 1.5 / 2**30)
    passes = round_passes(engine)
    rows = Reuse(module=own, engine=engine, chance=Random(1), is_cache_compared=False)
    rows.run(40)
    assert 4 * passes.padded > passes.passes > 100
    assert rows.copied > 20
    assert rows.requeued > 0
