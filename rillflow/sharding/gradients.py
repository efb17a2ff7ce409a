"""Gradients: sums over the ranks of a mesh after the backward passes, and the global norm.

    replicated over dp          sum over dp (sharded ones were reduce-scattered in the backward pass)
    experts, sharded over ep    sum over the dp ranks with the same experts
    tied, on first and last     sum over the two stages
    SUMMED over tp              sum over tp: every rank has its own heads' part
    replicated over tp          tp rank 0's, for all: equal except for rounding, and copies must not diverge

Sums are added in the order of ranks, so copies of a weight stay bitwise equal. In the norm every logical
element counts once: on the first rank with a copy of it.

If every rank has the whole module, sums over dp start during the last backward pass:

    backward pass   weight n ─ n-1 ─ n-2 ─ n-3 ─ ... ─ 0     a gradient is complete: a hook
    groups               └──────┴─> 0        └─────> 1       fixed: the last weights first, 16 MiB at most
    collectives              exchange ─ gather ─ exchange ─ gather ─ ...    one at a time, so on all ranks

    the hooks      consume gradients; wait for nothing; continue the sums if the collective is done;
                   produce sums of whole groups
    ``finish``     consumes the rest; waits for each collective; unblocked by the other ranks or by the
                   deadline of their group, which raises; produces all sums

There is no thread: the sums are one iterator over collectives, advanced by the hooks and ``finish``. So all
ranks run the same collectives in the same order, however many passes each has. A rank without a pass, or
with a non-finite number, runs all of them in ``finish``. After any other error the iterator is dropped, and
the other ranks wait in a collective until its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import Work

from rillflow.sharding.mesh import RankGroups
from rillflow.workers.collectives import ProcessRanks

GROUP_BYTES = 2**24
"""Maximum bytes of gradients summed together: small enough to start early, large enough to use bandwidth."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """Sums of the gradients of one rank's parameters over ranks, by the parameters' names."""

    groups: RankGroups
    """The rank's groups."""
    experts: frozenset[str] = frozenset()
    """Parameters of experts sharded over ep; their gradients already cover the tokens of all ep ranks."""
    summed: frozenset[str] = frozenset()
    """Parameters whose gradients lack the other tp ranks' parts."""
    whole: frozenset[str] = frozenset()
    """Parameters whose complete gradient is on every tp rank."""
    tied: frozenset[str] = frozenset()
    """Parameters of a weight on both the first and the last stage."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of every gradient."""
        return self.groups.is_whole

    def early(self, weights: Mapping[str, nn.Parameter]) -> EarlySums | None:
        """Return an object that starts sums as gradients complete; None if all are summed at the end."""
        dp = self.groups.dp
        return EarlySums(dp, weights) if self.is_whole and isinstance(dp, ProcessRanks) else None

    def complete(self, gradients: Mapping[str, Tensor], begun: EarlySums | None) -> None:
        """Replace every gradient by its sum over all ranks, in place; every rank passes all parameters."""
        groups = self.groups
        if begun is not None:
            begun.finish()
        elif groups.fsdp.size == 1:  # otherwise they are sharded over dp, and already summed
            groups.dp.sum_([gradients[name] for name in gradients if name not in self.experts])
            groups.twins.sum_([gradients[name] for name in gradients if name in self.experts])
        groups.ends.sum_([gradients[name] for name in gradients if name in self.tied])
        if groups.tp.rank:
            for name in self.whole & gradients.keys():
                gradients[name].zero_()
        groups.tp.sum_([gradients[name] for name in gradients if name in self.whole | self.summed])

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the global norm of completed gradients, equal on every rank."""
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
    """Sums of one step's gradients over ranks; each starts when all gradients of its group are complete.

    Args:
        ranks: the ranks with the same weights.
        weights: the weights whose gradients are summed, in place.
    """

    def __init__(self, ranks: ProcessRanks, weights: Mapping[str, nn.Parameter]) -> None:
        self._ranks, self._weights = ranks, weights
        self._incomplete = set(weights)
        self._collectives = self._sums()
        self._work: Work | None = None
        device = next(iter(weights.values())).device
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def complete(self, name: str) -> None:
        """Mark a weight's gradient as complete, and continue the sums without waiting."""
        self._incomplete.discard(name)
        self._go_on(wait=False)

    def finish(self) -> None:
        """Run all remaining sums; every weight has a gradient."""
        self._incomplete.clear()
        self._go_on(wait=True)
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)

    def _go_on(self, *, wait: bool) -> None:
        """Run collectives until a gradient is missing or, except on a CUDA stream, one is still running."""
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
            wait = True  # it blocks only the stream
        with nullcontext() if stream is None else stream:
            while wait or self._work is None or self._work.is_completed():
                self._work = None  # it references a bucket
                self._work = next(self._collectives, None)
                if self._work is None:
                    return

    def _sums(self) -> Iterator[Work | None]:
        """Yield all collectives in order, and None while a gradient of the next group is incomplete."""
        for names in _groups(self._weights):
            while not self._incomplete.isdisjoint(names):
                yield None
            weights = [self._weights[name] for name in names]
            gradients = [each.grad for each in weights if each.grad is not None]
            if self._stream is not None:
                for gradient in gradients:  # keeps a gradient's memory until the stream is done
                    gradient.record_stream(self._stream)
            yield from self._ranks.summing(gradients)


def _groups(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return groups of names, the last parameters first, each filled up to the limit."""
    groups, filled = list[list[str]](), GROUP_BYTES
    for name in reversed(list(weights)):
        filled += weights[name].nbytes
        if filled > GROUP_BYTES:
            groups.append([])
            filled = weights[name].nbytes
        groups[-1].append(name)
    return groups
