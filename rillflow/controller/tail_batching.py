"""Tail batching: a step begins more rows than it trains and puts the longest aside (RollPacker: 2509.21009).

stream ─ fresh prompts ──────────> short round: all rows advance by equal passes ─┬─ first complete ─> step
                                        │ else                                    └─ the rest ─> put aside
put aside ─ as many as a step trains? ──┴─> long round: begins only what it trains; nothing is left

A prompt that is put aside drops its rows. It is sampled again from the start with the weights that its step
trains, so every token is on-policy. Its rows keep their ids and therefore their random numbers. Long rows are
drawn long again, so the trained lengths follow the policy's distribution. The last steps begin no more
prompts than they train, so a phase trains every drawn prompt once.

loop          ``take``, in the thread of the training loop, before the step's own code runs
consumes      prompts put aside, prompts of the stream
waits for     every replica to advance by ``PASSES``; completion is counted in passes, never by a clock
unblocked by  those ranks; each wait ends at the deadline
produces      the step's prompts, and their rows on the replicas
shutdown      prompts put aside belong to the data position that a checkpoint holds; an interrupted round is
              run again from there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import Any

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.source import DataStream, GroupSampling, OpenedStep, Source, add_work, one_by_one
from rillflow.controller.weight_sync import WeightSync
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Mean, Sum
from rillflow.roles.sampler import Advanced, GroupId, Sampler
from rillflow.workers.arguments import Facts, shares
from rillflow.workers.config import SAMPLER
from rillflow.workers.pending import joined, wait_for

PASSES = 32
"""Tokens that each row advances before the controller counts complete groups."""


ASIDE = "aside"
"""Key in the position in the data for prompts that were put aside."""


class TailBatching(Source):
    """Source of steps that put the longest rows aside.

    Args:
        executor: has the sampler's ranks.
        stream: prompts of the phase.
        how: how groups are sampled.
        prompts: prompts that a short round begins for each trained one; at least 1.
        begun_samples: rows per group that a short round begins; the first to end are trained.
        aside: prompts that were put aside before the run was interrupted.
        sync: see Source.
        chunks: see Source.
    """

    is_salvageable = False

    def __init__(
        self,
        executor: GroupExecutor,
        stream: DataStream,
        *,
        how: GroupSampling,
        prompts: float,
        begun_samples: int,
        aside: Batch | None,
        sync: WeightSync | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__(executor, stream, sync=sync, chunks=chunks)
        self._how, self._left = how, how.groups
        self._prompts, self._begun_samples = prompts, begun_samples
        self._aside = [*one_by_one(aside)] if aside is not None else []
        self._worked: list[Facts] = []
        self._begun = self._passes = self._wasted = 0

    def take(self, step: int, groups: int) -> Batch:  # noqa: ARG002
        """Return the prompts of a step, whose rows ``rows`` then returns."""
        self._left = max(self._left - groups, 0)
        self._begun = self._passes = self._wasted = 0
        return self.more(groups)

    def more(self, groups: int) -> Batch:
        """See Source."""
        fresh = 0
        if len(self._aside) < groups:
            fresh = min(ceil(groups * self._prompts - 1e-9), groups + self._left - len(self._aside))
        again = max(groups - fresh, 0)
        begun, self._aside = self._aside[:again], self._aside[again:]
        begun += [self._stream.take(fresh)] if fresh else []
        return self._round(concatenate(begun), groups, self._how.samples if again else self._begun_samples)

    @property
    def aside(self) -> list[GroupId]:
        """Epoch and prompt id of every prompt that is put aside, for a checkpoint."""
        return [each.row_ids()[0].group for each in self._aside]

    def position(self) -> Mapping[str, Any]:
        """See Source; it includes the prompts that are put aside."""
        return {**super().position(), ASIDE: self.aside}

    def opened(self) -> OpenedStep:
        """See Source; the metrics are of the rounds of the step."""
        return replace(
            super().opened(),
            measured={
                "tail/begun/sum": Sum(value=self._begun),
                "tail/aside/mean": Mean(total=len(self._aside), count=1),
                "tail/passes/sum": Sum(value=self._passes),
                "tail/wasted_tokens/sum": Sum(value=self._wasted),
            },
        )

    def _round(self, begun: Batch, groups: int, samples: int) -> Batch:
        """Sample prompts until ``groups`` are complete; return the kept prompts, in the order they began."""
        cut = [begun.slice(share.start, share.stop) if share else None for share in self._shares(len(begun))]
        places = {row.group: place for place, row in enumerate(begun.row_ids())}
        ended: list[tuple[int, int]] = []  # sorted by pass, then by position in ``begun``
        self._worked, passes = [], 0
        while len(ended) < groups:
            made = self._advance(cut, passes=PASSES, samples=samples, enough=groups)
            ended += [(passes + at, places[group]) for one in made for group, at in one.complete.items()]
            cut, passes = [None] * len(cut), passes + PASSES
        ended = sorted(ended)[:groups]
        self._begun, self._passes = self._begun + len(begun), self._passes + ended[-1][0]
        return self._trained(begun, sorted(place for _, place in ended))

    def _trained(self, begun: Batch, taken: Sequence[int]) -> Batch:
        """Return the trained prompts, keep their rows for ``rows``, and drop the rows of the others."""
        groups, left = [row.group for row in begun.row_ids()], {*range(len(begun))} - {*taken}
        self._aside += [begun.slice(place, place + 1) for place in sorted(left)]
        homes = self._shares(len(begun))
        if left:
            self._advance(
                [None] * len(homes), [[groups[each] for each in share if each in left] for share in homes]
            )
        kept = [[groups[each] for each in share if each not in left] for share in homes]
        parts = [
            self._executor.on_ranks(SAMPLER, ranks, Sampler.collect, own)
            for ranks, own in zip(self._how.replicas, kept, strict=True)
            if own
        ]
        prompts = begun.select(taken)
        self._formed = prompts, joined("policy.generate", parts, worked=self._worked)
        return prompts

    def _shares(self, count: int) -> list[range]:
        """Return the range of prompts that each replica samples."""
        sizes = shares(count, len(self._how.replicas))
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def _advance(
        self,
        prompts: Sequence[Batch | None],
        given_up: Sequence[Sequence[GroupId]] | None = None,
        *,
        passes: int = 0,
        samples: int = 1,
        enough: int = 0,
    ) -> list[Advanced]:
        """Call ``Sampler.advance`` on every replica at once, with its own prompts."""
        how = (passes, samples, self._how.sampling, self._how.samples, enough)
        calls = [
            self._executor.on_ranks(SAMPLER, ranks, Sampler.advance, own, forgotten, *how)
            for ranks, own, forgotten in zip(
                self._how.replicas, prompts, given_up or [()] * len(prompts), strict=True
            )
        ]
        wait_for(calls, self._how.deadline_s)
        made: list[Advanced] = [each.read(self._how.deadline_s) for each in calls]
        for call in calls:
            add_work(self._worked, [*call.facts(self._how.deadline_s), *call.beside])
        self._wasted += sum(each.wasted for each in made)
        return made
