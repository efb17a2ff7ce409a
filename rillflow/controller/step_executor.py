"""StepExecutor: run the stages of a phase's steps; rows come from the phase's source, whole or in chunks.

Rows of one chunk move on while later chunks are generated:

    stage      chunk 1  chunk 2  chunk 3       submitted column by column: the second stage of chunk 1
    generate     1        4        7           does not queue behind the first stage of chunk 3
    score        2        5        8
    update       3        6        9

A stage that needs all rows at once (whitening, an update that mixes them, a number) is submitted after all
chunks. ``StepCalls`` submits a call to its group; a plugin may hold one back and submit several as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.source import ChunkedResult, Source
from rillflow.formulas import granularity
from rillflow.graph.handle import Formula, Options
from rillflow.records.metrics import Metric
from rillflow.runs.passes import PassesRecord
from rillflow.workers.backend import Place
from rillflow.workers.config import SAMPLER
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending
from rillflow.workers.transfer import ROWS


class StepCalls:
    """Submits the calls of a phase's steps to their groups, one by one; a plugin may bring a derived class.

    A derived class may hold a call back: it returns a ``Pending`` that has no submission yet, and submits the
    call together with a later one, or in ``before`` a call that reads what it writes.
    """

    def before(self, group: Group, endpoint: str) -> None:
        """Prepare for a call of the step; nothing of it is submitted yet."""

    def call(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending:
        """Return the result of a call."""
        return group.call(endpoint, *args, **options)

    def release(self) -> None:
        """Submit every call that is held back."""

    def drop(self) -> None:
        """Forget every call that is held back, because the run is stopped."""

    def metrics(self, passes: Sequence[PassesRecord]) -> Mapping[str, Metric]:
        """Return metrics of a finished step from the pipeline passes of its stages."""
        del passes
        return {}


class StepExecutor(GroupExecutor):
    """Executor of a phase's steps.

    Args:
        executor: has the groups and their backend.
        source: gives the sampler's rows, and takes the policy's versions.
        calls: submits the calls.
    """

    def __init__(self, executor: GroupExecutor, source: Source, calls: StepCalls | None = None) -> None:
        super().__init__(executor.groups, executor.backend)
        self._source, self._calls = source, calls or StepCalls()
        self._chain: list[tuple[ChunkedResult, Callable[[int], Pending]]] = []
        self._chunks = 0

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Pending:
        """See Executor."""
        group = self.serving(role, endpoint)
        self._calls.before(group, endpoint)
        if group.role == SAMPLER:
            rows = self._source.rows(group, endpoint, args, options)
            if rows is not None:
                return rows
        made = self._source.streamed(f"{role}.{endpoint}", args)
        if made is not None:
            return made
        made = self._asked(group, endpoint, args, options)
        return self._source.publish(made) if (group.of, endpoint) == ("policy", "publish") else made

    def _asked(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending:
        """Submit a stage of a role to its group, or defer it chunk by chunk."""
        if any(isinstance(each, ChunkedResult) for each in options.values()):
            self._submit()  # all chunks share the option
        called, chunks, stage = group.endpoints.get(endpoint), _chunks(args), f"{group.of}.{endpoint}"
        if called is not None and chunks and ROWS in called.transfer.receive.values():
            return self._later(
                stage, chunks, lambda index: group.call(endpoint, *_chunk(args, index), **options)
            )
        if called is None or not chunks or not called.by_parts or not options["passes"].goes_by(chunks):
            self._submit()
            return self._calls.call(group, endpoint, args, options)
        if any(each.stage.startswith(f"{group.of}.") for each, _ in self._chain):
            self._submit()  # these calls need the weights before the update

        def train(index: int) -> Pending:
            made = group.call(endpoint, *_chunk(args, index), **options, part=(index, chunks))
            if self._source.publishes_chunks and group.of == "policy" and index < chunks - 1:
                self._source.publish(group.call("publish"))
            return made

        return self._later(stage, chunks, train, is_partial=True)

    def compute(
        self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options
    ) -> Pending:
        """See Executor."""
        is_whole = into is None or any(isinstance(each, ChunkedResult) for each in options.values())
        chunks = 0 if is_whole or granularity(formula) == "batch" else _chunks(batches)
        one = super().compute
        if not chunks:
            return one(formula, batches, into, options)
        return self._later(
            formula.__name__, chunks, lambda index: one(formula, _chunk(batches, index), into, options)
        )

    def filter(self, batch: Any, field: str, by: Any = None) -> Pending:
        """See Executor."""
        given, one = [batch] if by is None else [batch, by], super().filter
        chunks = _chunks(given)
        if not chunks:
            return one(batch, field, by)

        def filtered(index: int) -> Pending:
            rows, *flags = _chunk(given, index)
            return one(rows, field, *flags)

        return self._later("filter", chunks, filtered)

    def _later(
        self, stage: str, chunks: int, make: Callable[[int], Pending], *, is_partial: bool = False
    ) -> Pending:
        """Return a stage that is submitted chunk by chunk, after the earlier stages of each chunk."""
        if self._chain and self._chunks != chunks:
            self._submit()
        made = ChunkedResult(stage, chunks, self._submit, is_partial=is_partial)
        self._chunks = chunks
        self._chain.append((made, make))
        return made

    def _submit(self) -> None:
        """Submit all deferred stages chunk by chunk: every stage of the first, then of the second, ..."""
        chain, self._chain = self._chain, []
        for index in range(self._chunks if chain else 0):
            for made, make in chain:
                made.chunks.append(make(index))

    def _at(self, places: Sequence[Place], name: str, role: str, *how: Any, **cut: Any) -> Pending:
        self._submit()
        if role:
            self._calls.release()
        return super()._at(places, name, role, *how, **cut)

    def abandon(self) -> float:
        """See GroupExecutor; deferred stages are dropped."""
        self._chain.clear()
        self._calls.drop()
        return super().abandon()

    def deal(self, *how: Any) -> list[Pending]:
        """See GroupExecutor."""
        self._submit()
        self._calls.release()
        return super().deal(*how)


def _chunks(values: Sequence[Any]) -> int:
    """Return the number of chunks of some results; 0 if they differ in it."""
    counts = {each.count if isinstance(each, ChunkedResult) else 0 for each in values}
    return counts.pop() if len(counts) == 1 else 0


def _chunk(values: Sequence[Any], index: int) -> list[Any]:
    """Return the same chunk of each value."""
    return [each.chunk(index) for each in values]
