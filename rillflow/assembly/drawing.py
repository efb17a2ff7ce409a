"""Drawing: the graphs of a recipe's phases, from the algorithms' own text.

recipe ─> phases ─ step on symbols, with the endpoints of the real roles ─> Graph
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rillflow.algorithms.algorithm import Data
from rillflow.assembly.phases import phase_plans
from rillflow.assembly.recipe import Recipe
from rillflow.assembly.role_factories import role_class
from rillflow.assembly.role_table import table_of
from rillflow.cluster.config import SAMPLER
from rillflow.dataflow.flow import Flow
from rillflow.graph.graph import Graph
from rillflow.graph.trace import Signature, Symbol, Tracer, trace
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.transfer import TRAIN

DATA_FIELDS = {
    Data.PROMPTS: ("tokens", "columns"),
    Data.DEMONSTRATIONS: ("tokens", "loss_mask"),
    Data.PREFERENCES: ("tokens", "loss_mask"),
}
"""What a step is given."""


def graphs(recipe: Recipe) -> list[Graph]:
    """One graph a phase, in order.

    Raises:
        GraphError: a stage reads a field that nothing provides.
    """
    endpoints = signatures(recipe)
    found = []
    for plan in phase_plans(recipe):
        stated = plan.algorithm.roles is not None
        roles = {role: endpoints[role] for role in plan.roles} if stated else endpoints
        step, config = plan.algorithm.step, plan.config
        extra = plan.algorithm.beside(config)
        beside = {} if extra is None else {str(extra): DATA_FIELDS[extra]}

        def run(tracer: Tracer, data: Symbol, *more: Symbol, step: Any = step, config: Any = config) -> Any:
            return step(Flow(tracer), data, config, *more)

        found.append(trace(plan.name, run, Tracer(roles), DATA_FIELDS[plan.algorithm.data], beside))
    return found


def unpublished(graph: Graph) -> str:
    """What to say of a step that trains the policy it samples from, and does not publish it; or nothing."""
    ours = [stage for stage in graph.stages if stage.role == "policy"]
    trained = [stage for stage in ours if stage.transfer == TRAIN.name]
    published = [stage.index for stage in ours if stage.endpoint == "publish"]
    if not trained or max(published, default=-1) > trained[-1].index:
        return ""
    return (
        f"{graph.name} does not publish what {trained[-1].name} trains: where the sampler has weights of its "
        "own, it goes on with the old ones; add flow.publish(flow.policy)"
    )


def signatures(recipe: Recipe) -> Mapping[str, Mapping[str, Signature]]:
    """The endpoints of every role a recipe may have."""
    found: dict[str, dict[str, Signature]] = {}
    for name, kind in table_of(recipe).items():
        endpoints = endpoints_of(role_class(name, kind))
        own = {each: marked.signature for each, marked in endpoints.items()}
        found.setdefault("policy" if name == SAMPLER else name, {}).update(own)
    return found
