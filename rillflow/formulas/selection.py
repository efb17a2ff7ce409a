"""Selection: choose which of a prompt's sampled rows to learn from, as pairs or as the best ones.

    rewards [B], groups [B] ──> pair_places [B]: 1 chosen, -1 rejected, 0 left out ──> is_paired, is_preferred
                                        ──> paired_groups, iterations_without_pairs: numbers of an iteration
                            ──> best_rows [B] bool: the best ones of each group
                            ──> best_of_n_divergence, best_of_n_bound: divergence in nats of taking the best

Ranks within a group follow from rewards and sample numbers, and draws from (seed, epoch, prompt). The
selection depends neither on the order of rows nor on the rest of the batch.
Legend: B rows, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.errors import FormulaError, TrainingError
from rillflow.formulas.config import Selector
from rillflow.formulas.penalty import ended
from rillflow.formulas.shapes import aligned, known, same_length

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged

_STREAM = 0x9E6C63D0876A9A99
"""Mask of the seed, so that selectors draw other numbers than sampling."""


def pair_places(
    rewards: Tensor,
    valid: Tensor,
    ids: Tensor,
    groups: Tensor,
    tokens: Ragged,
    loss_mask: Ragged,
    *,
    selector: Selector,
    seed: int,
    length_price: float = 0.0,
) -> Tensor:
    """Return [B] int64: 1 for the chosen row of each group's pair, -1 for the rejected row, else 0.

    Rows are ranked by ``rewards - length_price x sampled tokens``. ``max_min`` pairs the best with the worst,
    ``max_max`` with the second best, ``max_random`` with any other, ``random`` draws both; selectors of RLHF
    Workflow, arXiv 2405.07863. Rows without a score are ignored. If the two rows have equal ranked rewards or
    equal tokens, the group has no pair.

    Args:
        rewards: [B] float.
        valid: [B] bool, False for a row without a score.
        ids: [B, 3] row ids.
        groups: [B] int64; rows of one group share a number.
        tokens: tokens of the rows.
        loss_mask: True where the policy sampled the token.
        selector: name of the selector.
        seed: seed of the draws, together with epoch and prompt.
        length_price: price of a sampled token.

    Raises:
        FormulaError: shapes differ, the selector is unknown, or the price is negative.
    """
    known("pair_places", Selector, selector=selector)
    if not 0 <= length_price < math.inf:
        raise FormulaError(
            f"pair_places: length_price is {length_price}", why="it must be finite and not negative"
        )
    aligned("pair_places", loss_mask=loss_mask, tokens=tokens, rewards=rewards, valid=valid, groups=groups)
    found = _ranked(rewards - length_price * loss_mask.sums(), groups, valid, ids)
    first, second = _drawn_ranks(found, selector, ids, seed)
    whole = found.size >= 2
    chosen, rejected = (found.order[(found.start + rank)[whole]] for rank in (first, second))
    answers = tokens.where(loss_mask)
    is_pair = found.score[chosen] > found.score[rejected]
    is_pair &= ~_equal(answers.select(chosen), answers.select(rejected))
    places = groups.new_zeros(len(groups))
    places[chosen[is_pair]] = 1
    places[rejected[is_pair]] = -1
    return places


def is_paired(pair_place: Tensor) -> Tensor:
    """Return [B] bool, True for the rows of pairs.

    Args:
        pair_place: [B] from ``pair_places``.
    """
    return pair_place != 0


def is_preferred(pair_place: Tensor) -> Tensor:
    """Return [B] bool, True for the chosen rows of pairs.

    Args:
        pair_place: [B] from ``pair_places``.
    """
    return pair_place > 0


def iterations_without_pairs(pair_place: Tensor, *, so_far: float, steps: int) -> float:
    """Return the number of iterations without a pair, until the first pair; -1 from then on.

    Args:
        pair_place: [B] from ``pair_places``.
        so_far: result of the iteration before; 0 before the first.
        steps: iterations of the phase.

    Raises:
        TrainingError: this was the last iteration, and none had a pair: nothing was learnt.
    """
    if so_far < 0 or bool((pair_place != 0).any()):
        return -1.0
    if so_far + 1 >= steps:
        raise TrainingError(
            f"none of {steps} iterations gave a pair to learn from",
            why="for every prompt the answers were equal, had equal rewards or had no reward",
            fix="raise samples_per_prompt or rollout.temperature, or use a reward with more distinct values",
        )
    return so_far + 1


def paired_groups(pair_place: Tensor) -> float:
    """Return the number of groups with a pair.

    Args:
        pair_place: [B] from ``pair_places``.
    """
    return float((pair_place > 0).sum())


def whole_scores(valid: Tensor, finish: Tensor) -> Tensor:
    """Return [B] bool, True for rows that have a score and were not cut off.

    Args:
        valid: [B] bool, False for a row without a score.
        finish: [B] reason for each row's end.
    """
    return valid & ended(finish)


def best_rows(
    rewards: Tensor, valid: Tensor, ids: Tensor, groups: Tensor, *, keep: int, threshold: float = -math.inf
) -> Tensor:
    """Return [B] bool, True for the ``keep`` best rows of each group by reward; of equal rows the first.

    Best of n with imitation is RAFT (arXiv 2304.06767) and rejection sampling (Llama 2, arXiv 2307.09288).

    Args:
        rewards: [B] float.
        valid: [B] bool; a row without a score is never kept.
        ids: [B, 3] row ids; equal rewards are kept in the order of their samples.
        groups: [B] int64; rows of one group share a number.
        keep: most rows of a group.
        threshold: least reward that is kept.

    Raises:
        FormulaError: shapes differ, or ``keep`` is less than 1.
    """
    same_length("best_rows", rewards=rewards, valid=valid, groups=groups)
    if keep < 1:
        raise FormulaError(f"best_rows: keep is {keep}", why="every group must keep at least one row")
    found = _ranked(rewards, groups, valid, ids)
    best = valid.new_zeros(len(valid))
    best[found.order] = found.rank < keep
    return best & valid & (rewards >= threshold)


def best_of_n_bound(*, n: float) -> float:
    """Return the largest divergence of best of n from the sampling policy in nats: log n - (n - 1) / n.

    It is reached if no two answers have equal rewards; J. Beirami et al., arXiv 2401.01879.

    Args:
        n: number of answers of which the best one is taken.

    Raises:
        FormulaError: n is less than 1.
    """
    if not n >= 1:
        raise FormulaError(f"best_of_n_bound: n is {n}", why="the best answer needs at least one sample")
    return math.log(n) - (n - 1) / n


def best_of_n_divergence(rewards: Tensor, valid: Tensor, groups: Tensor, *, n: int) -> float:
    """Return the divergence of best of n from the sampling policy in nats, the mean over groups.

    sum_r q(r) log (q(r) / p(r)), p(r) the share of a group's rows with the reward r, F(r) of those with r
    at most, q(r) = F(r)^n - F(below r)^n: best of n drawn from the group's own rows. With ties it is smaller
    than ``best_of_n_bound``, which it never exceeds; 0 if all rewards of a group are equal.

    Args:
        rewards: [B] float.
        valid: [B] bool; rows without a score do not count.
        groups: [B] int64; rows of one group share a number.
        n: number of answers of which the best one is taken.

    Raises:
        FormulaError: shapes differ.
    """
    import torch

    same_length("best_of_n_divergence", rewards=rewards, valid=valid, groups=groups)
    if not bool(valid.any()):
        return 0.0
    values = rewards[valid].double().unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    pairs = torch.stack((groups[valid], values), 1)
    kinds, counts = pairs.unique(dim=0, return_counts=True)  # type: ignore[no-untyped-call]
    group = kinds[:, 0].unique(return_inverse=True)[1]
    total = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, counts.double())
    share = counts / total[group]
    reached = share.cumsum(0)
    reached = reached - (reached - share)[torch.searchsorted(group, group)]  # each group begins at 0
    below = (reached - share).clamp_min(0)
    best = reached.clamp_max(1) ** n - below**n
    return float(torch.special.xlogy(best, best / share).sum() / len(total))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ranked:
    order: Tensor
    """[B] rows by group, the best of each group first, those without a score last."""
    rank: Tensor
    """[B] rank of each row of ``order`` in its group, from 0."""
    start: Tensor
    """[G] start of each group in ``order``."""
    size: Tensor
    """[G] number of the group's rows with a score."""
    score: Tensor
    """[B] score by row."""


def _ranked(score: Tensor, groups: Tensor, valid: Tensor, ids: Tensor) -> _Ranked:
    import torch

    score = score.masked_fill(~valid, -math.inf)
    order = torch.argsort(ids[:, 2], stable=True)
    for key in (-score, (~valid).long(), groups):
        order = order[torch.argsort(key[order], stable=True)]
    numbers, counts = groups[order].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    start = counts.cumsum(0) - counts
    group = torch.repeat_interleave(torch.arange(len(numbers)), counts)
    size = torch.zeros(len(numbers), dtype=torch.int64).index_add(0, group, valid[order].long())
    rank = torch.arange(len(order)) - start[group]
    return _Ranked(order=order, rank=rank, start=start, size=size, score=score)


def _drawn_ranks(found: _Ranked, selector: Selector, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return [G] twice: the ranks of the better and of the worse row."""
    import torch

    from rillflow.formulas.counter import uniform

    best, last = torch.zeros_like(found.size), found.size - 1
    if selector == "max_min":
        return best, last
    if selector == "max_max":
        return best, best + 1
    prompts = ids[found.order[found.start]].clone()
    prompts[:, 2] = 0
    one, other = (uniform(seed ^ _STREAM, prompts, torch.full_like(best, place)) for place in (0, 1))
    if selector == "max_random":
        return best, 1 + (one * last).long()
    first, second = (one * found.size).long(), (other * last).long()
    second = second + (second >= first)
    return torch.minimum(first, second), torch.maximum(first, second)


def _equal(some: Ragged, others: Ragged) -> Tensor:
    """Return [P] bool, True for rows with the same values."""
    equal = some.lengths == others.lengths
    index = equal.nonzero().squeeze(1)
    one, other = some.select(index), others.select(index)
    equal[index] = one.with_values(one.values != other.values).sums() == 0
    return equal
