"""ChunkedResult: run stages in chunks, so that rows of one chunk move on while later chunks are generated.

    stage      part 1   part 2   part 3        submitted column by column: the second stage of part 1
    generate     1        4        7           does not queue behind the first stage of part 3
    score        2        5        8
    update       3        6        9

A stage that needs all rows at once (whitening, an update that mixes them, a number) is submitted after all
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rillflow.controller.executor import GroupExecutor
from rillflow.formulas import granularity
from rillflow.graph.handle import Formula, Handle, Options
from rillflow.records.batch import Batch
from rillflow.rollout.config import answering
from rillflow.workers.backend import Backend, Place
from rillflow.workers.config import SAMPLER
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending, joined
from rillflow.workers.transfer import ROWS
from rillflow.workers.values import shares


class ChunkedResult(Pending):
    """One stage's result in chunks, concatenated when it is used as a whole.

    Args:
        stage: name of the stage.
        count: number of parts.
        submit: submits the parts and calls ``complete``; called when a caller first needs them.
        is_partial: whether the parts are partial sums to be added.
    """

    def __init__(self, stage: str, count: int, submit: Callable[[], None], *, is_partial: bool) -> None:
        Handle.__init__(self, stage)
        self.count = count
        self.parts: list[Pending] = []
        self._submit, self._are_shares = submit, is_partial

    @classmethod
    def of(cls, whole: Pending) -> ChunkedResult:
        """Wrap a joined result so that its parts can be read one by one."""
        made = cls(whole.stage, len(whole.parts), lambda: None, is_partial=False)
        made.__dict__ |= whole.__dict__
        return made

    def complete(self) -> None:
        """Join the parts, all of which exist now."""
        self.__dict__ |= joined(self.stage, self.parts, is_partial=self._are_shares).__dict__

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in ("places", "lie", "_facts", "_references", "_held"):  # attributes of the whole
                return super().__getattr__(name)
            self._submit()
            return self.__dict__[name]


class PartedExecutor(GroupExecutor):
    """Executor that runs stages part by part if their rows come in parts.

    Args:
        groups: groups by name; several may serve one role.
        backend: the backend that runs the groups.
        parts: number of parts of the policy's answers to a batch of prompts.
        publishes: whether the policy publishes after each part of an update.
    """

    def __init__(
        self, groups: Mapping[str, Group], backend: Backend, *, parts: int, publishes: bool = False
    ) -> None:
        super().__init__(groups, backend)
        self._parts, self._publishes = parts, publishes
        self._chain: list[tuple[ChunkedResult, Callable[[int], Pending]]] = []
        self._chain_parts = 0

    def compute(
        self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options
    ) -> Pending:
        """See Executor."""
        is_whole = into is None or any(isinstance(each, ChunkedResult) for each in options.values())
        parts = 0 if is_whole or granularity(formula) == "batch" else _parts(batches)
        one = super().compute
        if not parts:
            return one(formula, batches, into, options)
        return self._later(
            formula.__name__, parts, lambda index: one(formula, _part(batches, index), into, options)
        )

    def filter(self, batch: Any, field: str, by: Any = None) -> Pending:
        """See Executor."""
        given, one = [batch] if by is None else [batch, by], super().filter
        parts = _parts(given)
        if not parts:
            return one(batch, field, by)
        return self._later(
            "filter", parts, lambda index: one(_part([batch], index)[0], field, *_part(given[1:], index))
        )

    def _asked(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending:
        if any(isinstance(each, ChunkedResult) for each in options.values()):
            self._submit()  # all parts share the option
        if (
            group.role == SAMPLER
            and endpoint == "generate"
            and self._parts > 1
            and isinstance(args[0], Batch)
        ):
            return self._answers(group, args[0], args[1:], options)
        called, parts, stage = group.endpoints.get(endpoint), _parts(args), f"{group.of}.{endpoint}"
        if called is not None and parts and ROWS in called.transfer.receive.values():
            return self._later(
                stage, parts, lambda index: group.call(endpoint, *_part(args, index), **options)
            )
        if called is None or not parts or not called.by_parts or not options["passes"].goes_by(parts):
            self._submit()
            return super()._asked(group, endpoint, args, options)
        if any(each.stage.startswith(f"{group.of}.") for each, _ in self._chain):
            self._submit()  # these calls need the weights before the update

        def train(index: int) -> Pending:
            made = group.call(endpoint, *_part(args, index), **options, part=(index, parts))
            if self._publishes and group.of == "policy" and index < parts - 1:
                self.follows["policy.publish"](group.call("publish"))
            return made

        return self._later(stage, parts, train, is_partial=True)

    def _answers(self, group: Group, prompts: Batch, args: Sequence[Any], options: Options) -> Pending:
        """Return the answers to a batch of prompts, whose parts become ready one after the other."""
        sizes = [size for size in shares(len(prompts), self._parts) if size]
        ends = list(accumulate(sizes))
        cut = [prompts.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        first = group.call("first_part", *cut, **answering(args, options))
        made = [first, *(group.call("next_part") for _ in cut[1:])]
        return self._later(f"{group.of}.generate", len(made), lambda index: made[index])

    def _later(
        self, stage: str, parts: int, make: Callable[[int], Pending], *, is_partial: bool = False
    ) -> Pending:
        """Return a stage that is submitted part by part, after the earlier stages of each part."""
        if self._chain and self._chain_parts != parts:
            self._submit()
        made = ChunkedResult(stage, parts, self._submit, is_partial=is_partial)
        self._chain_parts = parts
        self._chain.append((made, make))
        return made

    def _submit(self) -> None:
        """Submit all deferred stages part by part: every stage of the first part, then of the second, ..."""
        chain, self._chain = self._chain, []
        for index in range(self._chain_parts):
            for made, make in chain:
                made.parts.append(make(index))
        for made, _ in chain:
            made.complete()

    def _at(self, places: Sequence[Place], *how: Any, **cut: Any) -> Pending:
        self._submit()
        return super()._at(places, *how, **cut)

    def deal(self, *how: Any) -> list[Pending]:
        """See GroupExecutor."""
        self._submit()
        return super().deal(*how)


def _parts(values: Sequence[Any]) -> int:
    """Return the number of parts of some results; 0 if they differ in it."""
    counts = {each.count if isinstance(each, ChunkedResult) else 0 for each in values}
    return counts.pop() if len(counts) == 1 else 0


def _part(values: Sequence[Any], index: int) -> list[Any]:
    """Return the same part of each value."""
    return [each.parts[index] for each in values]
