"""Rows of a sampler in a checkpoint continue with the tokens of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import rollout_batch, rollouts_of
from rillflow.records.row import RowId
from rillflow.roles.sampler import Sampler
from rillflow.rollout.config import RolloutConfig
from tests.simulation.roles import Engine, Numbers, model

SAMPLES = 2


def sampler() -> Sampler:
    """Return a sampler whose tokens follow from weights, row and position."""
    whole = model(Numbers())
    weights = SimpleNamespace(
        version=3, canary=(), tp=None, module=whole.module, turn_to_generation=lambda _: None
    )
    return Sampler(
        cast(Any, weights), model=whole, rollout=RolloutConfig(max_rows=4), seed=0, engine=cast(Any, Engine)
    )


def prompts(count: int) -> Batch:
    ids = row_ids([RowId(0, prompt, 0) for prompt in range(count)])
    columns = Ragged.from_text(["{}"] * count)
    return Batch(
        ids=ids, fields={"tokens": Ragged.from_rows([[p] for p in range(count)]), "columns": columns}
    )


def ended(made: Sampler, passes: int) -> dict[tuple[int, int], list[list[int]]]:
    """Advance rows; return the tokens of the groups that became complete."""
    complete = made.advance(None, [], passes, SAMPLES, None).complete
    return {group: made.collect([group]).ragged("tokens").lists() for group in complete}


def test_restored_rows_end_with_the_tokens_of_the_saved_ones(tmp_path: Path) -> None:
    first, second = sampler(), sampler()
    first.advance(prompts(6), [], 3, SAMPLES, None)
    first.save(tmp_path, "replica-000")
    there = second.restore(tmp_path, "replica-000", SAMPLES, None)
    assert {*there.values()} == {0, 1, 2} or {*there.values()} >= {0, 2}
    complete = {group for group, running in there.items() if not running}
    assert {group: first.collect([group]).ragged("tokens").lists() for group in complete} == {
        group: second.collect([group]).ragged("tokens").lists() for group in complete
    }
    found = ended(first, 60)
    assert found == ended(second, 60) and found.keys() | complete == {(0, n) for n in range(6)}


def test_rollouts_are_those_that_a_batch_was_made_of() -> None:
    made = sampler()
    made.advance(prompts(3), [], 40, SAMPLES, None)
    rows = [row for group in made._running.values() for row in group.ended]
    assert rows and rollouts_of(rollout_batch(rows)) == [
        row.__class__(**{**vars(row), "logprobs": tuple(torch.tensor(row.logprobs).tolist())}) for row in rows
    ]
