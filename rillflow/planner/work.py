"""Work: what a stage of the graph asks of its role, and of how many rows.

stage's endpoint ─> kind of work ─> the cost model's term
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rillflow.errors import PlanError, nearest
from rillflow.graph.graph import CONTROLLER, Stage


class Work(StrEnum):
    """What a stage costs by."""

    GENERATE = "generate"
    """Tokens one by one, a read of all weights and of the cache for each."""
    SCORE = "score"
    """One forward pass over whole rows."""
    TRAIN = "train"
    """Forward and backward passes, and the optimiser's."""
    PUBLISH = "publish"
    """Weights from training to generation."""
    FUNCTION = "function"
    """A function of the rows, beside the devices: a programmed reward."""
    FORMULA = "formula"
    """Numbers only, in the controller."""


ENDPOINTS: Mapping[str, Work] = {
    "generate": Work.GENERATE,
    "greedy": Work.GENERATE,
    "logprobs": Work.SCORE,
    "values": Work.SCORE,
    "final_values": Work.SCORE,
    "score": Work.SCORE,
    "update": Work.TRAIN,
    "publish": Work.PUBLISH,
}
"""What a model's endpoint asks for; a role without a model computes a function."""


def work_of(stage: Stage, *, has_model: bool) -> Work:
    """The kind of work of a stage.

    Raises:
        PlanError: an endpoint the planner does not know.
    """
    if stage.role == CONTROLLER:
        return Work.FORMULA
    if not has_model:
        return Work.FUNCTION
    if stage.endpoint not in ENDPOINTS:
        raise PlanError(
            f"the stage {stage.name} cannot be planned",
            why=f"what the endpoint {stage.endpoint!r} costs is not known",
            fix=nearest(stage.endpoint, ENDPOINTS),
        )
    return ENDPOINTS[stage.endpoint]
