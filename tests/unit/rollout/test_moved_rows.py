"""Rows that move to another engine with their KV caches: nothing is read again, and tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout, moved_batch, rollouts_of, starts
from rillflow.records.row import RowId
from rillflow.rollout.native.engine import NativeEngine

Build = Callable[..., nn.Module]
Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]


def ended(engine: NativeEngine) -> dict[RowId, Rollout]:
    """Run an engine until it is empty; return its rows."""
    found: dict[RowId, Rollout] = {}
    while engine.has_work:
        found |= {row.row: row for row in engine.step()}
    return found


def sent(rows: list[Rollout]) -> list[Rollout]:
    """Rows as the other engine receives them."""
    return rollouts_of(moved_batch(rows))


def test_a_row_alone_goes_on_elsewhere_bit_for_bit(engine: Engines, prompts: Prompts) -> None:
    (start,) = starts(prompts(7), 1)
    alone, first, second = engine(), engine(), engine()
    alone.add(start)
    known = ended(alone)[start.row]
    first.add(start)
    for _ in range(4):
        first.step()
    moved = first.detach(start.row)
    assert moved.cache is not None and len(moved.cache) == len(moved.tokens) - 1 == 10
    assert not first.has_work
    (arrived,) = sent([moved])
    second.add(arrived)
    found = ended(second)[start.row]
    assert (found.tokens, found.logprobs, found.versions) == (known.tokens, known.logprobs, known.versions)
    assert found.cache is None


def test_the_cache_is_used_and_not_computed_again(engine: Engines, prompts: Prompts) -> None:
    """A cache of another text changes what follows; the right one does not."""
    one, other = starts(prompts(9, 9), 1)
    found = {}
    for name in ("own", "other"):
        source, target = engine(), engine()
        source.add(one)
        source.add(other)
        for _ in range(3):
            source.step()
        own, foreign = source.detach(one.row), source.detach(other.row)
        assert own.cache is not None and foreign.cache is not None
        target.add(own if name == "own" else replace(own, cache=foreign.cache))
        found[name] = ended(target)[one.row]
    assert found["own"].tokens[:12] == found["other"].tokens[:12]
    assert found["own"].logprobs != found["other"].logprobs


@pytest.mark.parametrize("with_caches", [True, False])
def test_in_float64_rows_have_the_same_tokens_wherever_they_run(
    with_caches: bool, engine: Engines, build: Build, prompts: Prompts
) -> None:
    """Batches change shape when rows move: probabilities differ by rounding, tokens do not."""
    module = build().double()
    rows = starts(prompts(3, 7, 20, 33, 40), 3)
    known_engine, source, target = (engine(module, max_tokens=24, max_rows=8) for _ in range(3))
    for row in rows:
        known_engine.add(row)
    known = ended(known_engine)
    for row in rows[:9]:
        source.add(row)
    for row in rows[9:]:
        target.add(row)
    found: dict[RowId, Rollout] = {}
    for _ in range(11):
        found |= {row.row: row for each in (source, target) for row in each.step()}
    left = [row.row for row in rows[:9] if row.row not in found]
    moved = sent([source.detach(row) if with_caches else source.abort(row) for row in left])
    assert [row.cache is not None for row in moved] == [
        with_caches and len(row.tokens) > len(rows[index].tokens) for index, row in enumerate(moved)
    ]
    for row in moved:
        target.add(row)
    found |= ended(target)
    for name, row in known.items():
        assert found[name].tokens == row.tokens
        gap = torch.tensor(found[name].logprobs) - torch.tensor(row.logprobs)
        assert gap.abs().max() < 1e-6


def test_rows_that_wait_or_have_ended_move_without_a_cache(engine: Engines, prompts: Prompts) -> None:
    first, second = starts(prompts(5, 5), 1)
    used = engine(max_rows=1)
    used.add(first)
    used.add(second)
    used.step()
    waiting = used.detach(second.row)
    assert waiting.cache is None and waiting.tokens == second.tokens
    found = ended(used)[first.row]
    back = sent([found, waiting])
    assert [row.tokens for row in back] == [found.tokens, second.tokens]
    assert not any(row.cache is not None for row in back)


def test_new_weights_drop_a_cache_that_has_not_been_used(engine: Engines, prompts: Prompts) -> None:
    first, second = starts(prompts(5, 6), 1)
    source, target = engine(), engine(max_rows=1)
    source.add(first)
    source.step()
    moved = source.detach(first.row)
    target.add(second)
    target.step()
    target.add(moved)
    target.load(1, {})
    found = ended(target)[first.row]
    plain = engine()
    plain.add(replace(moved, cache=None))
    plain.load(1, {})
    assert found.tokens == ended(plain)[first.row].tokens
