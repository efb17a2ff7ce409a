"""Minibatches: the rows of one iteration, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator

from rillflow.formulas.counter import permutation
from rillflow.records.batch import Batch


def minibatches(batch: Batch, epochs: int, parts: int, seed: int, step: int) -> Iterator[Batch]:
    """Every row once in every epoch, in ``parts`` minibatches whose sizes differ by at most one.

    Each epoch has another order. Where there are fewer rows than parts, each row is a minibatch; a
    whole pass in one minibatch keeps the batch's order, which no loss depends on.

    Args:
        batch: rows of one iteration.
        epochs: passes over them.
        parts: minibatches of one pass.
        seed: the run's seed.
        step: the iteration, so that no two are cut alike.
    """
    for epoch in range(epochs):
        rows = batch
        if parts > 1:
            rows = batch.select(permutation(seed, len(batch), stream=step * epochs + epoch))
        yield from (part for part in rows.split(parts) if len(part))
