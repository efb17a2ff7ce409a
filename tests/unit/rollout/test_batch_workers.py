"""Several workers in one engine: the same rows in the same order, and no leftover threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import nn

from rillflow.errors import RolloutError
from rillflow.records.batch import Batch, concatenate
from rillflow.records.rollout import Rollout, completions
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.engine import WORKER_ROWS, NativeEngine
from tests.unit.records.singles import rollouts_of

Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_workers_change_no_row(count: int, engine: Engines, prompts: Prompts) -> None:
    """One worker and three sample the same tokens, also for fewer prompts; only rounding differs."""
    batch = prompts(*[[1 + index, 2, 3] for index in range(count)])
    alone, beside = (engine(workers=workers, max_rows=6).generate(batch, samples=3) for workers in (1, 3))
    assert alone.ids.tolist() == beside.ids.tolist()
    assert torch.equal(completions(alone).values, completions(beside).values)
    torch.testing.assert_close(
        alone.ragged("sampler_logprobs").values, beside.ragged("sampler_logprobs").values
    )


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("sizes", [(7,), (1, 6), (2, 2, 3), (1,) * 7])
def test_parts_laid_end_to_end_are_what_all_prompts_give_at_once(
    workers: int, sizes: tuple[int, ...], engine: Engines, prompts: Prompts
) -> None:
    """Rows of later parts run while the first ones are returned; no row is lost and no bit changes."""
    batch = prompts(*[[1 + index, 2, 3] for index in range(7)])
    ends = list(accumulate(sizes))
    parts = [batch.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    used = engine(workers=workers, max_rows=6)
    found, running = [], []
    for part in used.generate_parts(parts, samples=3):
        found.append(part)
        running.append(used.has_work)
    assert [len(part) for part in found] == [3 * size for size in sizes] and not used.has_work
    assert not running[-1] and (len(sizes) == 1 or running[0])
    whole, parted = engine(workers=workers, max_rows=6).generate(batch, samples=3), concatenate(found)
    assert torch.equal(whole.ids, parted.ids)
    for name in ("tokens", "sampler_logprobs", "versions"):
        assert torch.equal(whole.ragged(name).values, parted.ragged(name).values)


@pytest.mark.parametrize("workers", [1, 3])
def test_each_prompt_may_have_settings_of_its_own(workers: int, engine: Engines, prompts: Prompts) -> None:
    """A row's tokens are those of a call in which all rows have its settings."""
    batch = prompts(*[[1 + index, 2, 3] for index in range(7)])
    settings = [SamplingConfig(max_tokens=2 + index, temperature=0.5 + index / 4) for index in range(7)]
    mixed = rollouts_of(engine(workers=workers, max_rows=6).generate(batch, samples=2, sampling=settings))
    for place, own in enumerate(settings):
        alike = rollouts_of(engine(workers=workers, max_rows=6).generate(batch, samples=2, sampling=own))
        rows = slice(2 * place, 2 * place + 2)
        assert [row.tokens for row in mixed[rows]] == [row.tokens for row in alike[rows]]
        assert all(sum(row.loss_mask) == own.max_tokens for row in mixed[rows])


def test_settings_for_another_number_of_prompts_are_refused(engine: Engines, prompts: Prompts) -> None:
    with pytest.raises(RolloutError, match="3 sampling settings for 2 prompts"):
        engine(workers=2).generate(prompts([1, 2], [3, 4]), sampling=[SamplingConfig()] * 3)


def test_a_repeated_call_has_the_same_bits(engine: Engines, prompts: Prompts) -> None:
    """A row's worker depends on its index only, not on time."""
    batch = prompts(*[[token, 5] for token in range(1, 12)])
    first, second = (engine(workers=2, max_rows=4).generate(batch, samples=2) for _ in range(2))
    for name in ("tokens", "sampler_logprobs"):
        assert torch.equal(first.ragged(name).values, second.ragged(name).values)


def test_rows_added_one_by_one_run_in_lanes(engine: Engines, prompts: Prompts) -> None:
    used = engine(workers=2, max_rows=4, max_tokens=6)
    whole = rollouts_of(used.generate(prompts([1, 2], [3, 4], [5, 6])))
    for row in whole:
        used.add(Rollout.start(row.row, row.tokens[:2], row.columns))
    ended = used.step()
    taken = used.abort(RowId(0, 1, 0))
    assert taken.tokens == whole[1].tokens[:3]
    used.add(taken)
    while used.has_work:
        ended += used.step()
    assert {row.row: row.tokens for row in ended} == {row.row: row.tokens for row in whole}
    assert used.held_bytes == 0


def test_a_lane_that_fails_ends_the_others(engine: Engines, build: Callable[..., nn.Module]) -> None:
    """The error names the row, no worker keeps rows, and the engine works again."""
    module = build()
    used = engine(module, workers=2, max_rows=4, max_tokens=200)
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        kept = embedding.weight[9].clone()
        embedding.weight[9] = float("nan")
    batch = _rows([[9, 9], [1, 2], [9, 8], [3, 4]])
    with pytest.raises(RolloutError, match="epoch 0 prompt 0 sample 0"):
        used.generate(batch)
    assert not used.has_work and used.held_bytes == 0
    with torch.no_grad():
        embedding.weight[9] = kept
    assert len(used.generate(batch)) == 4


def test_a_step_that_fails_in_one_lane_empties_all(engine: Engines, build: Callable[..., nn.Module]) -> None:
    module = build()
    used = engine(module, workers=2, max_rows=4)
    with torch.no_grad():
        module.get_input_embeddings().weight[9] = float("nan")  # type: ignore[operator]
    for prompt, token in enumerate((9, 1)):
        used.add(Rollout.start(RowId(0, prompt, 0), [token, 2]))
    with pytest.raises(RolloutError, match="epoch 0 prompt 0 sample 0"):
        used.step()
    assert not used.has_work and used.held_bytes == 0


def test_versions_reach_every_lane(engine: Engines, prompts: Prompts) -> None:
    used = engine(workers=2, max_rows=4)
    used.load(8, {})
    rows = used.generate(prompts([1], [2], [3]))
    sampled = rows.ragged("loss_mask").values
    assert set(rows.ragged("versions").values[sampled].tolist()) == {8}


@pytest.mark.parametrize(("workers", "max_rows"), [(2, 4), (None, 2 * WORKER_ROWS)])
def test_workers_end_with_their_engine(
    workers: int | None, max_rows: int, engine: Engines, prompts: Prompts
) -> None:
    """By default, on a CPU, there is a worker for each of torch's threads."""
    others, threads = set(threading.enumerate()), torch.get_num_threads()
    torch.set_num_threads(2)
    used = engine(workers=workers, max_rows=max_rows)
    torch.set_num_threads(threads)
    mine, until = set[threading.Thread](), time.monotonic() + 60
    while len(mine) < 2 and time.monotonic() < until:  # a worker that is done at once takes two parts
        used.generate(prompts([1], [2]))
        mine = {each for each in threading.enumerate() if each.name.startswith("rillflow-worker")} - others
    assert len(mine) == 2
    del used
    for thread in mine:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in mine)


def test_the_callers_threads_stay(engine: Engines, prompts: Prompts) -> None:
    before = torch.get_num_threads()
    engine(workers=2, max_rows=4).generate(prompts([1], [2]))
    assert torch.get_num_threads() == before


def _rows(tokens: list[list[int]]) -> Batch:
    from rillflow.records.batch import row_ids
    from rillflow.records.ragged import Ragged

    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(len(tokens))]),
        fields={
            "tokens": Ragged.from_rows(tokens, torch.int64),
            "columns": Ragged.from_text(["{}"] * len(tokens)),
        },
    )
