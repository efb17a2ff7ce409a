"""A3C: asynchronous advantage actor-critic (Mnih et al., arXiv 1602.01783).

    dtheta = sum_t grad[ -A_t log pi(a_t | s_t) + w 0.5 (V(s_t) - R_t)^2 - h entropy ]

Each actor computes the gradient of its own fragment with the weights that acted. The controller takes a step
with each gradient as it comes, and only the actor that sent it gets the new weights. So a gradient is as old
as the steps that the other actors caused meanwhile (``actor/lag/mean``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rillflow.records.metrics import Metrics
from rillflow_classic.algorithm import ClassicAlgorithm
from rillflow_classic.algorithms.a2c import A2CConfig
from rillflow_classic.on_policy import OnPolicyLearner
from rillflow_classic.operators.iterators import from_workers
from rillflow_classic.operators.steps import apply_gradients, compute_gradients, report_metrics


class A3CConfig(A2CConfig):
    """``[algorithm]`` of A3C."""

    num_async: int = Field(1, ge=1, description="Calls in flight at each actor.")
    report_every: int = Field(1, ge=1, description="Gradients that make one step of the run.")


def plan(system: Any, settings: A3CConfig) -> Iterable[Metrics]:
    """Return the dataflow: gradients of the actors as they come, a step, weights for their source."""
    learner = system.learner
    return (
        from_workers(system.actors, "sample")
        .for_each(compute_gradients())
        .gather_async(settings.num_async)
        .for_each(apply_gradients(learner))
        .combine(report_metrics(settings.report_every))
    )


ALGORITHM = ClassicAlgorithm(
    name="a3c", config=A3CConfig, learner=OnPolicyLearner, plan=plan, is_in_step=False, calls_actors=True
)
