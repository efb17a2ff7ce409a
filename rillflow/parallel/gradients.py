"""Gradients: what the ranks of a mesh add up after the backward passes, and the norm of the whole.

    replicated over dp          sum over dp (sharded ones were summed and cut in the backward pass)
    tied, on first and last     sum over the two stages
    SUMMED over tp              sum over tp: every rank has its own heads' share
    whole over tp               tp rank 0's, for all: equal but for rounding, and copies must not drift apart

Sums are taken in the order of ranks, so copies of a weight stay equal bit for bit. In the norm every
logical element counts once: on the first rank of those that hold a copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rillflow.parallel.mesh import RankGroups


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """How the gradients of one rank's parameters are completed; names are the parameters'."""

    groups: RankGroups
    """Where the rank is."""
    sharded: bool = False
    """Whether every gradient is cut over dp, and summed there already."""
    summed: frozenset[str] = frozenset()
    """Those that lack the other tp ranks' shares."""
    whole: frozenset[str] = frozenset()
    """Those that every tp rank has, complete."""
    tied: frozenset[str] = frozenset()
    """Those of a weight that the first and the last stage have."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of every gradient."""
        return self.groups.pp.size == self.groups.tp.size == 1 and not self.sharded

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Make every gradient the sum over all ranks, in place; all ranks call it, for all parameters."""
        groups = self.groups
        if not self.sharded:
            groups.dp.sum_(list(gradients.values()))
        groups.ends.sum_([gradients[name] for name in gradients if name in self.tied])
        if groups.tp.rank:
            for name in self.whole & gradients.keys():
                gradients[name].zero_()
        groups.tp.sum_([gradients[name] for name in gradients if name in self.whole | self.summed])

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The global norm of completed gradients; the same number on every rank."""
        if self.is_whole:
            return nn.utils.get_total_norm(list(gradients.values()))
        own = [gradient for name, gradient in gradients.items() if self._counts(name)]
        square = torch.zeros(1, dtype=torch.float64)
        if own:
            square += nn.utils.get_total_norm(own).double().cpu() ** 2
        self.groups.everyone.sum_([square])
        return square.sqrt()[0]

    def _counts(self, name: str) -> bool:
        groups = self.groups
        copy_over_dp = groups.copies.rank > 0
        copy_over_tp = name in self.whole | self.summed and groups.tp.rank > 0
        copy_over_pp = name in self.tied and not groups.first
        return not (copy_over_dp or copy_over_tp or copy_over_pp)
