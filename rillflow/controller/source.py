"""Source: the prompts of a phase's steps, and the rows that the sampler makes for them.

    source          prompts of a step                their rows
    Source          the next of the stream           made when the step asks for them; in chunks if set;
                                                     after a resume, read from the checkpoint
    AsyncRollout    the groups that are ready first  made before
    TailBatching    the groups that end first        made before
    Gathering       the next of the stream           made before; the last of them on few replicas

    loop     take ──> the step: rows, publish ──> opened ──> ... ──> deliver(weights) ──> the next step

An algorithm's text is the same for all: ``flow.policy.generate`` returns ``rows``, ``flow.publish`` returns
``publish``. The loop asks the source at fixed points of a step and never which kind it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from rillflow.controller.executor import GroupExecutor, write_rows
from rillflow.controller.flow import StageResult
from rillflow.controller.group_table import GENERATE
from rillflow.controller.saved_flight import FlightSave
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.graph.handle import Options
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.roles.sampler import GroupId
from rillflow.rollout.config import SamplingConfig, answering
from rillflow.workers.arguments import Facts, shares
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending, Submission, joined


@dataclass(frozen=True, kw_only=True)
class DataStream:
    """The data of a phase and its position."""

    take: Callable[[int], Batch]
    """Returns the next rows."""
    state: Callable[[], Mapping[str, Any]]
    """Returns the position in the data, for a checkpoint."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics about the data that every step reports."""


@dataclass(frozen=True, kw_only=True)
class GroupSampling:
    """Settings for sampling a phase's groups before its steps ask for rows."""

    groups: int
    """Groups that the phase still has to train."""
    samples: int
    """Trained rows of a group."""
    sampling: SamplingConfig | None
    """Sampling settings; None for those of the recipe."""
    replicas: Sequence[Sequence[int]]
    """The sampler's ranks, replica by replica."""
    deadline_s: float
    """Longest wait for any rank."""
    restarts: int = 0
    """Replacements of a replica in a row, without a complete group in between."""
    restart: Callable[[Sequence[int]], Iterator[Any]] | None = None
    """Replaces ranks of the sampler, step by step; each step is ready when ``is_ready`` is True."""
    may_save: bool = True
    """Whether a row can go on in another process: the row of an agent cannot."""
    say: Callable[[str], None] = lambda _: None
    """Shows the user a line."""


PAUSE_S = 0.02
"""Two calls with a shorter pause, in seconds, count as one span."""


@dataclass(frozen=True, kw_only=True)
class OpenedStep:
    """Facts that a source reports once all stages of a step are submitted."""

    measured: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the sampling."""
    given_up: Sequence[tuple[GroupId, str]] = ()
    """Groups that were dropped since the step before, with reasons."""
    arriving: Sequence[Pending] = ()
    """Transfers of the version that the step samples with; empty if the sampler had it."""
    parcels: Sequence[PackedWeights] = ()
    """Versions that the step published for later steps."""


class ChunkedResult(Pending):
    """One stage's result in chunks, joined when it is used as a whole.

    Args:
        stage: name of the stage.
        count: number of chunks.
        submit: submits one or more chunks and appends them to ``chunks``; called when one is used first.
        is_partial: whether the chunks are partial sums to be added.
        worked: work of ranks before the result was requested; the caller may append to it.
    """

    def __init__(
        self,
        stage: str,
        count: int,
        submit: Callable[[], None],
        *,
        is_partial: bool = False,
        worked: Sequence[Facts] = (),
    ) -> None:
        super().__init__(stage, self._joined)
        self.count = count
        self.chunks: list[Pending] = []
        self._submit, self._is_partial, self._worked = submit, is_partial, worked

    @classmethod
    def of(cls, stage: str, chunks: Sequence[Pending], worked: Sequence[Facts] = ()) -> ChunkedResult:
        """Return the result that chunks make up which are submitted already."""
        made = cls(stage, len(chunks), lambda: None, worked=worked)
        made.chunks += chunks
        return made

    def chunk(self, index: int) -> Pending:
        """Return a chunk, and submit it if it is not there."""
        for _ in range(len(self.chunks), index + 1):
            self._submit()
        return self.chunks[index]

    def _joined(self) -> Submission:
        chunks = [self.chunk(index) for index in range(self.count)]
        return joined(self.stage, chunks, is_partial=self._is_partial, worked=self._worked).work


class Source:
    """Prompts in the order of the stream, whose rows the sampler makes when a step asks for them.

    Args:
        executor: has the groups of ranks.
        stream: prompts of the phase.
        sync: transfer of versions to a sampler on its own ranks; None if it shares the policy's ranks.
        chunks: number of chunks of the answers to a batch of prompts.
        kept: returns, for a step of the run, the files of rows sampled before the run was interrupted.
    """

    is_salvageable = True
    """Whether a step can be saved without the rows of a sampler that has died."""
    publishes_chunks = False
    """Whether the policy publishes after each chunk of an update."""

    def __init__(
        self,
        executor: GroupExecutor,
        stream: DataStream,
        *,
        sync: WeightSync | None = None,
        chunks: int = 1,
        kept: Callable[[int], Sequence[Path]] = lambda _: (),
    ) -> None:
        self._executor, self._stream, self._sync = executor, stream, sync
        self._chunks, self._kept = chunks, kept
        self._files = deque[Path]()
        self._formed: tuple[Batch, Pending] | None = None
        self._columns: list[tuple[Pending, Mapping[str, Pending]]] = []
        self._arriving: list[Pending] = []

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics about the data that every step reports."""
        return self._stream.metrics

    def begin(self, close: Callable[[], Sequence[Pending] | None], after: int) -> None:
        """Begin the phase, or go on with it; an evaluation of the weights that it begins with is over.

        Args:
            close: delivers a version or closes a step, if one is ready, and returns None; else it returns the
                results that the next one waits for. A source whose rows run between steps calls it whenever
                it waits.
            after: steps of the run before the next one.
        """

    def until(self, done: Callable[[], bool]) -> None:
        """Run rows until ``done`` returns True; without rows between steps, return at once."""

    def take(self, step: int, groups: int) -> Batch:
        """Return the prompts of a step of the run."""
        self._files.extend(self._kept(step))
        return self._stream.take(groups)

    def more(self, groups: int) -> Batch:
        """Return the prompts of further groups for the same step."""
        return self._stream.take(groups)

    def rows(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending | None:
        """Return the result of an endpoint of the sampler; None if the sampler is to be called as usual."""
        if self._files:
            return self._executor.load_sampled(group, endpoint, self._files.popleft())
        if endpoint != "generate" or not args or not isinstance(args[0], Batch):
            return None
        if self._formed is not None and args[0] is self._formed[0]:
            (_, made), self._formed = self._formed, None
            return made
        return self._in_chunks(group, args[0], args[1:], options) if self._chunks > 1 else None

    def _in_chunks(self, group: Group, prompts: Batch, args: Sequence[Any], options: Options) -> Pending:
        """Return the answers to a batch of prompts, whose chunks become ready one after the other."""
        sizes = [size for size in shares(len(prompts), self._chunks) if size]
        ends = accumulate(sizes)
        cut = [prompts.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        first = group.call("first_part", *cut, **answering(args, options))
        made = [first, *(group.call("next_part") for _ in cut[1:])]
        return ChunkedResult.of(f"{group.of}.generate", made)

    def streamed(self, stage: str, args: Sequence[Any]) -> Pending | None:
        """Return the result of a stage that ran on sampled rows before the step; None if none did."""
        return next((made.get(stage) for rows, made in self._columns if args and args[0] is rows), None)

    def _made(self, prompts: Batch, results: Mapping[str, Pending]) -> Batch:
        """Keep the results of a step's groups until its stages ask for them; return its prompts."""
        self._formed = prompts, results[GENERATE]
        others = {stage: made for stage, made in results.items() if stage != GENERATE}
        self._columns.append((results[GENERATE], others))
        return prompts

    def publish(self, published: Pending) -> Pending:
        """Return the version that the policy published, on its way to the sampler."""
        return published if self._sync is None else self._sync(published)

    def opened(self) -> OpenedStep:
        """Note that all stages of the step are submitted."""
        arriving, self._arriving = self._arriving, []
        self._columns.clear()
        return OpenedStep(arriving=arriving, parcels=self._published())

    def _published(self) -> Sequence[PackedWeights]:
        return self._sync.take() if self._sync is not None else ()

    def deliver(self, parcel: PackedWeights) -> None:
        """Have the sampler receive a version before the rows of the next step."""
        if self._sync is not None:
            self._arriving += self._sync.install(parcel)

    def moved(self, arriving: Sequence[Pending]) -> Mapping[str, Sequence[Facts]]:
        """Wait for a step's transfers; return the facts of all transfers since the last call, by stage."""
        if self._sync is None:
            return {}
        self._sync.arrived(arriving)
        return self._sync.moved()

    def settle(self, step: int) -> None:
        """Wait until the sampler has the version that was delivered last, to evaluate after a step."""

    def position(self) -> Mapping[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return dict(self._stream.state())

    def begin_saving(self, folder: Path) -> FlightSave | None:  # noqa: ARG002
        """Begin to write the groups in flight after the newest step; None if it keeps none.

        Args:
            folder: folder of a checkpoint that begins with the step.
        """
        return None

    def finish_saving(self, save: FlightSave, *, must: bool) -> bool:  # noqa: ARG002
        """Run rows until groups in flight are written; return whether they are.

        Args:
            save: what ``begin_saving`` returned.
            must: whether to write without running rows if running them does not lead there.
        """
        return True

    def save_sampled(self, stages: Sequence[StageResult], name: str) -> list[Pending]:
        """Write the sampler's results of a later step, in order, to files whose names begin with ``name``."""
        made = [each.result for each in stages if self._executor.is_sampled(each.stage)]
        return [
            self._executor.apply(write_rows, f"{name}-{index:03d}.safetensors", rows, place=rows.places[0])
            for index, rows in enumerate(made)
        ]


def one_by_one(prompts: Batch) -> Iterable[Batch]:
    """Return every prompt as a batch of its own."""
    return (prompts.slice(place, place + 1) for place in range(len(prompts)))


def add_work(worked: list[Facts], more: Sequence[Facts]) -> None:
    """Merge the times of a call into those of earlier calls."""
    for each in more:
        for place, before in enumerate(worked):
            if before.place == each.place and 0 <= each.began - before.ended < PAUSE_S:
                worked[place] = replace(before, ended=each.ended)
                break
        else:
            worked.append(replace(each, rows=0))


class Collects(Protocol):
    """A role that runs groups, and gives each of them up once it is complete."""

    def collect(self, groups: Sequence[GroupId]) -> Batch:
        """Return the rows of complete groups, and forget them."""


def collected_each(role: Collects, groups: Sequence[GroupId]) -> tuple[Batch, ...]:
    """Return the rows of each of some complete groups."""
    return tuple(role.collect([group]) for group in groups)
