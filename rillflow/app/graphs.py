"""Drawing: trace the graphs of a recipe's phases from the algorithms' code.

phases ─ step on symbols, with the endpoints of its roles ─> Graph

The endpoints of shipped roles are read from ``endpoints.json``, which docs/draw_graphs.py writes, so a graph
needs neither torch nor models. A role that an algorithm brings declares its endpoints in its class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rillflow.app.phases import PhasePlan
from rillflow.app.role_table import RoleSpec
from rillflow.controller.flow import Flow
from rillflow.graph.graph import Graph
from rillflow.graph.trace import Signature, Symbol, Tracer, trace
from rillflow.workers.config import SAMPLER
from rillflow.workers.transfer import SPLIT_DP_REDUCE

ENDPOINTS = Path(__file__).parent / "endpoints.json"
"""The signatures of every shipped role's endpoints, by the role's class."""


def graphs(phases: Sequence[PhasePlan], table: Mapping[str, RoleSpec]) -> list[Graph]:
    """Return one graph per phase, in order; ``Resolved.graphs`` keeps them.

    Args:
        phases: the phases.
        table: every role that there may be.

    Raises:
        GraphError: a stage reads a field that nothing provides.
    """
    endpoints = signatures(table)
    found = []
    for plan in phases:
        step, config = plan.algorithm.step, plan.config
        extra = plan.algorithm.beside(config)
        beside = {} if extra is None else {str(extra): extra.fields}

        def run(tracer: Tracer, data: Symbol, *more: Symbol, step: Any = step, config: Any = config) -> Any:
            return step(Flow(tracer), data, config, *more)

        given = (*plan.algorithm.data.fields, *config.columns)
        found.append(trace(plan.name, run, Tracer(endpoints), given, beside))
    return found


def unpublished(graph: Graph) -> str:
    """Return a note if a step trains the policy that it samples from and does not publish it; else ""."""
    ours = [stage for stage in graph.stages if stage.role == "policy"]
    trained = [stage for stage in ours if stage.transfer == SPLIT_DP_REDUCE.name]
    published = [stage.index for stage in ours if stage.endpoint == "publish"]
    if not trained or max(published, default=-1) > trained[-1].index:
        return ""
    return (
        f"{graph.name} does not publish what {trained[-1].name} trains: where the sampler has weights of its "
        "own, it goes on with the old ones; add flow.publish(flow.policy)"
    )


def signatures(table: Mapping[str, RoleSpec]) -> Mapping[str, Mapping[str, Signature]]:
    """Return the endpoints of every role that a recipe may have."""
    shipped, found = json.loads(ENDPOINTS.read_bytes()), dict[str, dict[str, Signature]]()
    for name, spec in table.items():
        listed = shipped.get(str(spec.role), {})
        own = {each: _signature(**fields) for each, fields in listed.items()} or signatures_of(name, spec)
        found.setdefault("policy" if name == SAMPLER else name, {}).update(own)
    return found


def signatures_of(role: str, spec: RoleSpec) -> dict[str, Signature]:
    """Return the endpoints that a role's class marks; this loads torch.

    Raises:
        ConfigError: the class that an algorithm brings has no endpoint.
    """
    return {name: marked.signature for name, marked in spec.endpoints(role).items()}


def _signature(transfer: str, **fields: list[str]) -> Signature:
    return Signature(transfer=transfer, **{name: tuple(some) for name, some in fields.items()})
