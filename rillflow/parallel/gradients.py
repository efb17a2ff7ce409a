"""Gradients: what the ranks of a mesh add up after the backward passes, and the norm of the whole.

    replicated over dp          sum over dp (sharded ones were summed and cut in the backward pass)
    experts, shared out over ep sum over those ranks of dp that have the same ones
    tied, on first and last     sum over the two stages
    SUMMED over tp              sum over tp: every rank has its own heads' share
    whole over tp               tp rank 0's, for all: equal but for rounding, and copies must not drift apart

Sums are taken in the order of ranks, so copies of a weight stay equal bit for bit. In the norm every
logical element counts once: on the first rank of those that hold a copy of it.

Where every rank has the whole module, sums over dp begin while the last backward pass goes on:

    backward pass   weight n ─ n-1 ─ n-2 ─ n-3 ─ ... ─ 0     a gradient is complete: a hook
    groups               └──────┴─> 0        └─────> 1       fixed: the last weights first, 16 MiB at most
    collectives              exchange ─ gather ─ exchange ─ gather ─ ...    one at a time, so on all ranks

    the hooks      consume gradients; wait for nothing; go on with the sums if the collective is through;
                   produce sums of whole groups
    ``finish``     consumes all the rest; waits for each collective; unblocked by the other ranks or by the
                   deadline of their group, which raises; produces all sums

No thread: the sums are one iterator over collectives, and who asks for the next one makes it. So all ranks
make the same ones in the same order, however many passes each has: a rank without a pass makes all in
``finish``, and so does one that met a number that is not finite. After any other error the iterator is
dropped, and ranks that wait in a collective of it wait as in any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import Work

from rillflow.cluster.ranks import ProcessRanks
from rillflow.parallel.mesh import RankGroups

GROUP_BYTES = 2**24
"""Gradients whose sum begins at once: few enough to begin early, enough for their bytes to count."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """How the gradients of one rank's parameters are completed; names are the parameters'."""

    groups: RankGroups
    """Where the rank is."""
    experts: frozenset[str] = frozenset()
    """Those of experts, which ranks of ep share out: the tokens of all of these are in each already."""
    summed: frozenset[str] = frozenset()
    """Those that lack the other tp ranks' shares."""
    whole: frozenset[str] = frozenset()
    """Those that every tp rank has, complete."""
    tied: frozenset[str] = frozenset()
    """Those of a weight that the first and the last stage have."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of every gradient."""
        return self.groups.is_whole

    def early(self, weights: Mapping[str, nn.Parameter]) -> EarlySums | None:
        """What begins sums as gradients become complete; None where all are made together."""
        dp = self.groups.dp
        return EarlySums(dp, weights) if self.is_whole and isinstance(dp, ProcessRanks) else None

    def complete(self, gradients: Mapping[str, Tensor], begun: EarlySums | None) -> None:
        """Make every gradient the sum over all ranks, in place; all ranks call it, for all parameters."""
        groups = self.groups
        if begun is not None:
            begun.finish()
        elif groups.fsdp.size == 1:  # else they are cut over dp, and summed there already
            groups.dp.sum_([gradients[name] for name in gradients if name not in self.experts])
            groups.twins.sum_([gradients[name] for name in gradients if name in self.experts])
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
        copy_over_dp = (groups.twins if name in self.experts else groups.copies).rank > 0
        copy_over_tp = name in self.whole | self.summed and groups.tp.rank > 0
        copy_over_pp = name in self.tied and not groups.first
        return not (copy_over_dp or copy_over_tp or copy_over_pp)


class EarlySums:
    """The sums of one step's gradients over ranks, each begun once all gradients of its group are complete.

    Args:
        ranks: those that have the same weights.
        weights: whose gradients are summed, in place.
    """

    def __init__(self, ranks: ProcessRanks, weights: Mapping[str, nn.Parameter]) -> None:
        self._ranks, self._weights = ranks, weights
        self._incomplete = set(weights)
        self._collectives = self._sums()
        self._work: Work | None = None
        device = next(iter(weights.values())).device
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def complete(self, name: str) -> None:
        """Take a weight's gradient, to which nothing is added any more, and go on without waiting."""
        self._incomplete.discard(name)
        self._go_on(wait=False)

    def finish(self) -> None:
        """Make all sums that are left; every weight has a gradient."""
        self._incomplete.clear()
        self._go_on(wait=True)
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)

    def _go_on(self, *, wait: bool) -> None:
        """Make collectives until gradients lack, or, but on a stream of CUDA, until one is under way."""
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
            wait = True  # which blocks the stream alone
        with nullcontext() if stream is None else stream:
            while wait or self._work is None or self._work.is_completed():
                self._work = None  # it holds a bucket
                self._work = next(self._collectives, None)
                if self._work is None:
                    return

    def _sums(self) -> Iterator[Work | None]:
        """All collectives in turn, and None for as long as a gradient of the next group is not complete."""
        for names in _groups(self._weights):
            while not self._incomplete.isdisjoint(names):
                yield None
            weights = [self._weights[name] for name in names]
            gradients = [each.grad for each in weights if each.grad is not None]
            if self._stream is not None:
                for gradient in gradients:  # one that is dropped half summed keeps its memory until then
                    gradient.record_stream(self._stream)
            yield from self._ranks.summing(gradients)


def _groups(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Names, the last first, by as many as fill a group."""
    groups, filled = list[list[str]](), GROUP_BYTES
    for name in reversed(list(weights)):
        filled += weights[name].nbytes
        if filled > GROUP_BYTES:
            groups.append([])
            filled = weights[name].nbytes
        groups[-1].append(name)
    return groups
