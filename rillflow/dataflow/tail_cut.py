"""Tail cut: a step begins more than it trains and leaves the longest for later (RollPacker: 2509.21009).

stream ─ fresh prompts ──────────> short round: all go on by as many passes ─┬─ those complete first ─> step
                                        │ else                               └─ the rest ─> put aside
put aside ─ as many as a step trains? ──┴─> long round: no more begins than is trained; nothing is left

A prompt that was put aside forgets its rows and is sampled from the start, by the weights that its step
trains: every token is on-policy. Its rows have their ids, and with them their random numbers, again: what was
to be long is drawn as long, so the lengths that are trained are those of the policy. In the last steps no
more begins than they train, so that a phase trains every prompt that it drew, once.

loop          ``take``, in the thread of the pipeline's loop, before the text of a step runs
consumes      prompts put aside, prompts of the stream
waits for     every replica to go on by ``PASSES``; what is complete is counted by passes, never by a clock
unblocked by  those ranks; each wait ends at the deadline
produces      the step's prompts, and their rows on the replicas
shutdown      what is put aside belongs to the place in the data that a checkpoint holds; a round that was
              interrupted is made again from there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil

from rillflow.cluster.config import SAMPLER
from rillflow.dataflow.executor import GroupExecutor
from rillflow.dataflow.ready_first import add_work, one_by_one
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Mean, Metric, Sum
from rillflow.roles.sampler import Advanced, GroupId, Sampler
from rillflow.rollout.config import SamplingConfig
from rillflow.workers.pending import joined, wait_for
from rillflow.workers.values import Facts, shares

PASSES = 32
"""Tokens that rows go on by before the controller counts what is complete."""


class TailCut:
    """The rounds of one phase whose steps leave the longest for later.

    Args:
        executor: has the sampler's ranks.
        take: the next prompts of the stream.
        groups: that the phase is still to train.
        prompts: begun for each that is trained, of a short round; at least 1.
        samples: rows of a group that are trained.
        begun_samples: rows of a group that begin in a short round; the first that end are trained.
        sampling: how their tokens are drawn; None as the recipe says.
        replicas: the sampler's ranks, replica by replica.
        aside: prompts that were put aside before the run was interrupted.
        deadline_s: longest wait for any rank.
    """

    def __init__(
        self,
        executor: GroupExecutor,
        take: Callable[[int], Batch],
        *,
        groups: int,
        prompts: float,
        samples: int,
        begun_samples: int,
        sampling: SamplingConfig | None,
        replicas: Sequence[Sequence[int]],
        aside: Batch | None,
        deadline_s: float,
    ) -> None:
        self._executor, self._take, self._left = executor, take, groups
        self._prompts, self._samples, self._begun_samples = prompts, samples, begun_samples
        self._sampling, self._replicas, self._deadline_s = sampling, replicas, deadline_s
        self._aside = [*one_by_one(aside)] if aside is not None else []
        self._worked: list[Facts] = []
        self._begun = self._passes = self._wasted = 0

    def take(self, groups: int) -> Batch:
        """The prompts of a step, of which the executor then has the rows."""
        self._left = max(self._left - groups, 0)
        self._begun = self._passes = self._wasted = 0
        return self.more(groups)

    def more(self, groups: int) -> Batch:
        """The same of further groups for the same step."""
        fresh = 0
        if len(self._aside) < groups:
            fresh = min(ceil(groups * self._prompts - 1e-9), groups + self._left - len(self._aside))
        again = max(groups - fresh, 0)
        begun, self._aside = self._aside[:again], self._aside[again:]
        begun += [self._take(fresh)] if fresh else []
        return self._round(concatenate(begun), groups, self._samples if again else self._begun_samples)

    @property
    def aside(self) -> list[GroupId]:
        """The epoch and the number of every prompt that is put aside, for a checkpoint."""
        return [each.row_ids()[0].group for each in self._aside]

    @property
    def measured(self) -> dict[str, Metric]:
        """What is known of the rounds of a step as they have been made."""
        return {
            "tail/begun/sum": Sum(value=self._begun),
            "tail/aside/mean": Mean(total=len(self._aside), count=1),
            "tail/passes/sum": Sum(value=self._passes),
            "tail/wasted_tokens/sum": Sum(value=self._wasted),
        }

    def _round(self, begun: Batch, groups: int, samples: int) -> Batch:
        """Sample prompts until ``groups`` are complete; what is kept, in the order in which it was begun."""
        cut = [begun.slice(share.start, share.stop) if share else None for share in self._shares(len(begun))]
        places = {row.group: place for place, row in enumerate(begun.row_ids())}
        ended: list[tuple[int, int]] = []  # by the pass, then by the place among what was begun
        self._worked, passes = [], 0
        while len(ended) < groups:
            made = self._advance(cut, passes=PASSES, samples=samples, enough=groups)
            ended += [(passes + at, places[group]) for one in made for group, at in one.complete.items()]
            cut, passes = [None] * len(cut), passes + PASSES
        ended = sorted(ended)[:groups]
        self._begun, self._passes = self._begun + len(begun), self._passes + ended[-1][0]
        return self._kept(begun, sorted(place for _, place in ended))

    def _kept(self, begun: Batch, taken: Sequence[int]) -> Batch:
        """The prompts that are trained: the executor has their rows; those of the others are forgotten."""
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
            for ranks, own in zip(self._replicas, kept, strict=True)
            if own
        ]
        prompts = begun.select(taken)
        self._executor.ready = prompts, joined("policy.generate", parts, worked=self._worked)
        return prompts

    def _shares(self, count: int) -> list[range]:
        """Which of so many prompts every replica has."""
        sizes = shares(count, len(self._replicas))
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
        """Have every replica do its own, all of them at once; see ``Sampler.advance``."""
        how = (passes, samples, self._sampling, self._samples, enough)
        calls = [
            self._executor.on_ranks(SAMPLER, ranks, Sampler.advance, own, forgotten, *how)
            for ranks, own, forgotten in zip(
                self._replicas, prompts, given_up or [()] * len(prompts), strict=True
            )
        ]
        wait_for(calls, self._deadline_s)
        made: list[Advanced] = [each.read(self._deadline_s) for each in calls]
        for call in calls:
            add_work(self._worked, [*call.facts(self._deadline_s), *call.beside])
        self._wasted += sum(each.wasted for each in made)
        return made
