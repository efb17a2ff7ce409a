"""Minibatches: the rows of one iteration, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from rillflow.cluster.ranks import Ranks, SingleRank
from rillflow.formulas.counter import permutation
from rillflow.records.batch import Batch


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
    """Every row once in every epoch, in ``parts`` minibatches whose sizes differ by at most one unit.

    Each epoch has another order, unless rows are not to be mixed. Where there are fewer units than parts,
    each unit is a minibatch; a whole pass in one minibatch keeps the batch's order, which no loss depends on.

    Args:
        batch: rows of one iteration.
        epochs: passes over them.
        parts: minibatches of one pass.
        seed: the run's seed.
        step: the iteration, so that no two are cut alike.
        units: [B] int64; rows that share a number stay in one minibatch. Each row is a unit without it.
        ranks: those that have the rest of the rows, laid end to end, each unit whole. Minibatches are those
            of one rank with all rows, each rank yields its own rows of them, perhaps none.
        shuffle: whether rows are mixed; else minibatches are cut from the batch as it is.
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
    """The rows by unit; units in the order of their first rows, the rows of one in the order given."""
    if units is None:
        return [[row] for row in rows]
    numbers = units.tolist()
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(numbers[row], []).append(row)
    return list(found.values())


def prompt_units(batch: Batch) -> Tensor:
    """[B] int64 the units of a batch whose rows of one (epoch, prompt) stay together."""
    units: Tensor = torch.unique(batch.ids[:, :2], dim=0, return_inverse=True)[1]
    return units
