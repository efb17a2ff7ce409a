"""Joined call: submit two calls of two roles as one call of their ranks, and run it there.

controller   submit_joined ── one call ──> run_joined, on each rank: both calls in turn, with a baton
                  └─ a result of each call <──────── result and Facts of each
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from rillflow.workers.arguments import RemoteValue
from rillflow.workers.backend import Site
from rillflow.workers.group import PreparedCall
from rillflow.workers.pending import Pending, pending_of
from rillflow.workers.program import object_of, ready_call
from rillflow_parts.fusion.alternating_calls import run_both
from rillflow_parts.fusion.shared_pipeline import SharedPipeline


def submit_joined(first: PreparedCall, second: PreparedCall) -> tuple[Pending, Pending]:
    """Run two calls of two roles on the same ranks at once; return their results."""
    backend, made = first.backend, list[Sequence[Any]]()
    for (place, one), (_, other) in zip(first.calls, second.calls, strict=True):
        made.append(backend.submit(place, run_joined, one, other, results=4))
    both = []
    for index, each in enumerate((first, second)):
        own = [
            (place, RemoteValue(value=parts[2 * index], facts=parts[2 * index + 1]))
            for (place, _), parts in zip(each.calls, made, strict=True)
        ]
        both.append(pending_of(each.stage, backend, own, **each.described))
    return both[0], both[1]


def run_joined(site: Site, first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    """Run two updates at once, each given as the arguments of ``workers.program.run``; they share the passes.

    Returns:
        The first call's result and Facts, then the second's.
    """
    calls = [ready_call(site, *each) for each in (first, second)]
    roles = [object_of(site, each[0].role) for each in (first, second)]
    return tuple(chain(*run_both([SharedPipeline.of(role.pipeline) for role in roles], calls)))
