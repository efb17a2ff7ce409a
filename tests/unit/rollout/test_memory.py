"""Memory of the engine: a byte budget, long rows among short ones, chunked and shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import nn

from rillflow.errors import RolloutError
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native import cache_layout, scheduler
from rillflow.rollout.native.engine import NativeEngine
from tests.unit.records.singles import rollouts_of

Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]
Said = dict[RowId, tuple[tuple[int, ...], tuple[float, ...]]]

POSITION_BYTES = 2 * 2 * (8 + 8) * 4
"""Bytes of a position of the tiny model: 2 layers of 2 heads, keys and values of 8 numbers."""


def said(batch: Batch) -> Said:
    return {each.row: (each.tokens, each.logprobs) for each in rollouts_of(batch)}


def gib(positions: int) -> float:
    """Return a budget in GiB for this number of positions, with one layer counted twice."""
    return positions * POSITION_BYTES * 1.5 / 2**30


def tokens_read(used: NativeEngine) -> list[int]:
    """Return a list that collects the lengths of all prefixes that an engine computes from now on."""
    lengths: list[int] = []
    (worker,) = used._workers
    schedule = worker._scheduler.schedule

    def listening() -> scheduler.Step:
        step = schedule()
        lengths.extend(len(prefill.tokens) for prefill in step.prefills)
        return step

    worker._scheduler.schedule = listening  # type: ignore[method-assign]
    return lengths


def drained(used: NativeEngine) -> dict[RowId, Rollout]:
    found = {}
    while used.has_work:
        found |= {each.row: each for each in used.step()}
    return found


def same(one: Said, other: Said) -> None:
    assert {row: tokens for row, (tokens, _) in one.items()} == {
        row: tokens for row, (tokens, _) in other.items()
    }
    for row, (_, logprobs) in one.items():
        assert logprobs == pytest.approx(other[row][1], abs=1e-5)


@pytest.mark.parametrize(("deterministic", "record_after"), [(False, 1), (True, float("inf"))])
def test_a_budget_that_takes_rows_back_changes_no_token(
    engine: Engines, prompts: Prompts, deterministic: bool, record_after: float
) -> None:
    batch = prompts(3, 40, 9, 1, 25)
    make = {"max_tokens": 100, "deterministic": deterministic, "max_rows": 10, "workers": 1}
    wanted = said(engine(**make).generate(batch, samples=2))
    room = 192 + 32 * 64 + 200 if deterministic else 600
    used = engine(**make, cache_gib=gib(room), record_after=record_after)
    taken_back = 0
    requeue = used._workers[0]._scheduler.requeue

    def counting(rows: Sequence[scheduler.Sequence]) -> None:
        nonlocal taken_back
        taken_back += len(rows)
        requeue(rows)

    used._workers[0]._scheduler.requeue = counting  # type: ignore[method-assign]
    found = said(used.generate(batch, samples=2))
    assert used.peak_bytes <= gib(room) * 2**30
    assert taken_back > 0
    if deterministic:
        assert found == wanted
    else:
        same(found, wanted)


def test_a_budget_that_holds_no_row_is_refused_before_anything_runs(engine: Engines) -> None:
    used = engine(max_tokens=100, cache_gib=gib(100), workers=1)
    with pytest.raises(RolloutError, match=r"may reach 103 tokens.*needs .*rollout\.cache_gib is"):
        used.add(Rollout.start(RowId(0, 0, 0), [1, 2, 3]))
    assert not used.has_work
    used.add(Rollout.start(RowId(0, 0, 0), [1, 2, 3]), SamplingConfig(max_tokens=90))
    assert len(drained(used)) == 1


def test_workers_share_a_budget(engine: Engines, prompts: Prompts) -> None:
    budget = gib(4 * 64)
    used = engine(max_tokens=30, cache_gib=budget, workers=2, max_rows=16)
    same(
        said(used.generate(prompts(*range(1, 17)))),
        said(engine(max_tokens=30).generate(prompts(*range(1, 17)))),
    )
    assert 0 < used.peak_bytes <= budget * 2**30


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_long_row_takes_nobody_elses_memory(
    engine: Engines, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Compared with one rectangle; also with recordings of several buckets."""
    batch = prompts(*[9] * 40, 180)
    make = {"max_tokens": 12, "max_rows": 41, "workers": 1, "deterministic": deterministic}
    used = engine(**make, record_after=2)
    found = said(used.generate(batch))
    short = 63 * 64 if deterministic else 40 * 32
    assert used.peak_bytes == (short + 192) * POSITION_BYTES
    monkeypatch.setattr(cache_layout, "WORTH", 10**9)
    one = engine(**make)
    wanted = said(one.generate(batch))
    assert one.peak_bytes == (64 if deterministic else 41) * 192 * POSITION_BYTES
    if deterministic:
        assert found == wanted
    else:
        same(found, wanted)


@pytest.mark.slow
def test_a_row_that_grows_leaves_its_band(engine: Engines, prompts: Prompts) -> None:
    """Short rows come and go while one row keeps running; none of them gets its memory."""
    batch = prompts(*[20] * 400)
    used, wanted = (engine(max_rows=50, workers=1, max_tokens=10) for _ in range(2))
    long = SamplingConfig(max_tokens=230)
    first, *rest = (
        Rollout.start(row, tokens)
        for row, tokens in zip(batch.row_ids(), batch.ragged("tokens").lists(), strict=True)
    )
    for each in (used, wanted):
        each.add(first, long)
    for row in rest:
        used.add(row)
    (alone,) = drained(wanted).values()
    found = drained(used)
    assert len(found) == 400
    assert found[first.row].tokens == alone.tokens
    assert found[first.row].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert used.peak_bytes <= 50 * (96 + 80 // 2) * POSITION_BYTES


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prefix_longer_than_a_step_reads_is_read_in_pieces(
    tiny: nn.Module, engine: Engines, prompts: Prompts, deterministic: bool
) -> None:
    batch = prompts(5, 150, 7, 100)
    make = {"max_rows": 4, "deterministic": deterministic, "workers": 1}
    wanted = said(engine(**make).generate(batch, samples=2))
    used = engine(**make)
    used._workers[0]._scheduler._prefill_tokens = 48
    lengths = tokens_read(used)
    same(said(used.generate(batch, samples=2)), wanted)
    assert max(lengths) <= 48 and sum(lengths) < 4 + 149 + 6 + 99


def test_prompts_with_one_system_prompt_read_it_once(engine: Engines) -> None:
    system = [index % 50 for index in range(80)]
    starts = [Rollout.start(RowId(0, index, 0), [*system, 50 + index, 7, 8]) for index in range(3)]
    used = engine(workers=1)
    lengths = tokens_read(used)
    for start in starts:
        used.add(start)
    found = drained(used)
    assert lengths == [82, 2, 2]
    for start in starts:
        alone = engine(workers=1)
        alone.add(start)
        wanted = drained(alone)[start.row]
        assert found[start.row].tokens == wanted.tokens
        assert found[start.row].logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


@pytest.mark.parametrize("away", [0, 3])
def test_the_next_turn_reads_what_was_inserted(engine: Engines, away: int) -> None:
    """Also after other rows have run, one of which was moved into its place."""
    used = engine(workers=1, max_tokens=60)
    rows = [Rollout.start(RowId(0, index, 0), [index, *range(50)]) for index in range(4)]
    for row in rows:
        used.add(row)
    for _ in range(30):
        used.step()
    taken = used.abort(rows[1].row)
    for _ in range(away):
        used.step()
    lengths = tokens_read(used)
    used.add(taken.inserted([5, 6, 7]))
    found = drained(used)[taken.row]
    assert lengths == [3]
    alone = engine(workers=1, max_tokens=60)
    alone.add(taken.inserted([5, 6, 7]))
    wanted = drained(alone)[taken.row]
    assert found.tokens == wanted.tokens
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
