"""Backend run: a static plan whose reactors are spread over the ranks of a pool; the trace is the same.

    a level's reactions ── one call for each rank: (reactor, method, inputs) ──> ReactorHost ──> results

The backend is one of the core's: inline, processes of this machine, or Ray. Values pass through this process,
so this form is for reactors that need a process or a machine of their own, and not for speed with small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rillflow.errors import GraphError
from rillflow.workers.backend import Backend
from rillflow_classic.executor.plan import StaticPlan
from rillflow_classic.executor.run import PlacedReaction, PlanRun, Traced, method_of
from rillflow_classic.worker_set import WorkerSet


@dataclass(frozen=True, kw_only=True)
class HostedReactor:
    """A reactor as its host makes it."""

    make: Callable[[], Any]
    """Constructs its object."""
    methods: tuple[str, ...]
    """Methods that reactions call."""


@dataclass(frozen=True, kw_only=True)
class HostedResult:
    """What a reaction returned, or the error that it raised."""

    result: Any = None
    """Its result."""
    error: Exception | None = None
    """Its error."""


class ReactorHost:
    """The reactors of one rank."""

    def __init__(self, reactors: Sequence[Mapping[str, HostedReactor]], rank: int) -> None:
        self._calls = {}
        for name, each in reactors[rank].items():
            state = each.make()
            self._calls.update({(name, method): method_of(name, state, method) for method in each.methods})

    def react(self, *reactions: tuple[str, str, list[Any]]) -> list[HostedResult]:
        """Run reactions, each given as reactor, method and inputs, in their order."""
        return [self._react(*each) for each in reactions]

    def _react(self, reactor: str, method: str, given: list[Any]) -> HostedResult:
        try:
            return HostedResult(result=self._calls[reactor, method](*given))
        except Exception as error:  # noqa: BLE001  the run raises it
            return HostedResult(error=error)


class BackendRun(PlanRun):
    """A plan that runs on the ranks of a pool; see PlanRun.

    Args:
        plan: the plan; its reactors are made by functions of a module, or partials of these.
        backend: an open backend.
        pool: name of the pool.
        traced: receives every reaction's result.

    Raises:
        GraphError: the plan cannot run, or a reactor lacks a method.
    """

    def __init__(
        self, plan: StaticPlan, backend: Backend, pool: str, *, traced: Traced | None = None
    ) -> None:
        super().__init__(plan, traced)
        ranks = backend.pools[pool]
        reactors: list[dict[str, HostedReactor]] = [{} for _ in range(ranks)]
        for each in plan.reactors:
            methods = tuple(one.method for one in plan.reactions if one.reactor is each)
            reactors[each.index % ranks][each.name] = HostedReactor(make=each.make, methods=methods)
        self._hosts = WorkerSet(backend, pool, partial(ReactorHost, reactors))

    def _execute(self, due: Sequence[PlacedReaction]) -> int:
        by_rank: defaultdict[int, list[PlacedReaction]] = defaultdict(list)
        for each in due:
            by_rank[each.reactor.index % self._hosts.size].append(each)
        calls = [
            self._hosts.call(
                rank, "react", *((each.reactor.name, each.method, self._given(each)) for each in placed)
            )
            for rank, placed in by_rank.items()
        ]
        for call, placed in zip(calls, by_rank.values(), strict=True):
            for each, found in zip(placed, call.read(), strict=True):
                each.error = found.error
                try:
                    if found.error is None:
                        self._write(each, found.result)
                except GraphError as error:
                    each.error = error
        return len(calls)
