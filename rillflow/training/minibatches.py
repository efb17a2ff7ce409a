"""Minibatches: the rows of one iteration, in an order that depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from rillflow.formulas.counter import permutation
from rillflow.records.batch import Batch
from rillflow.workers.collectives import Ranks, SingleRank


def minibatches(
    batch: Batch,
    epochs: int,
    parts: int,
    seed: int,
    step: int,
    units: Tensor | None = None,
    ranks: Ranks | None = None,
    *,
    shuffle: bool = True,
) -> Iterator[Batch]:
    """Yield ``parts`` minibatches per epoch, with every row once; their sizes differ by at most one unit.

    Each epoch has another order if ``shuffle`` is set. If there are fewer units than parts, each unit is a
    minibatch. A single minibatch keeps the batch's order, which no loss depends on.

    Args:
        batch: rows of one iteration.
        epochs: passes over them.
        parts: minibatches of one pass.
        seed: the run's seed.
        step: the iteration, which gives each its own order.
        units: [B] int64; rows with the same number stay in one minibatch. None makes each row a unit.
        ranks: the ranks with the rest of the rows, laid end to end, each unit whole. Minibatches are those
            of one rank with all rows; each rank yields its own rows of them, perhaps none.
        shuffle: whether rows are mixed; otherwise minibatches are cut from the batch in its order.
    """
    ranks = ranks or SingleRank()
    if parts == 1:
        yield from [batch] * (epochs if len(batch) or ranks.size > 1 else 0)
        return
    members = gathered(range(len(batch)), units)
    counts = [int(count) for count in ranks.gather(torch.tensor([len(members)]))]
    before, total = sum(counts[: ranks.rank]), sum(counts)
    cuts = [total * part // parts for part in range(parts + 1)]
    for epoch in range(epochs):
        mixed = permutation(seed, total, stream=step * epochs + epoch) if shuffle else torch.arange(total)
        order = (mixed - before).tolist()
        for start, stop in pairwise(cuts):
            own = [unit for unit in order[start:stop] if 0 <= unit < len(members)]
            if stop > start:
                yield batch.select([row for unit in own for row in members[unit]])


def gathered(rows: Iterable[int], units: Tensor | None) -> list[list[int]]:
    """Return the rows grouped by unit; units in the order of their first rows, rows in the given order."""
    if units is None:
        return [[row] for row in rows]
    numbers = units.tolist()
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(numbers[row], []).append(row)
    return list(found.values())


def prompt_units(batch: Batch) -> Tensor:
    """Return [B] int64 units that keep the rows of one (epoch, prompt) together."""
    units: Tensor = torch.unique(batch.ids[:, :2], dim=0, return_inverse=True)[1]
    return units
