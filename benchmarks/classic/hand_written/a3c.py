"""A3C by hand: gradients as they come, a step, new weights for their actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from hand_written.actors import left_out, send
from rillflow.records.metrics import Mean, Metrics
from rillflow_classic.policy import GradientLearner


def train(actors: Sequence[Any], learner: GradientLearner, num_async: int = 1) -> Iterator[Metrics]:
    """Yield the metrics of every gradient."""
    live, lost = list(actors), {}
    loads = send(learner, live, [])
    calls = {actor.gradients.remote(): actor for _ in range(num_async) for actor in actors}
    while True:
        done, _ = ray.wait(list(calls), num_returns=1)
        actor = calls.pop(done[0])
        try:
            gradients, metrics, version = ray.get(done[0])
        except RayActorError as error:
            lost |= left_out(actor, live, error)
            continue
        lag = Mean(total=float(learner.version - version), count=1.0)
        learner.apply(gradients)
        loads = send(learner, [actor], loads)
        yield {**metrics, "actor/lag/mean": lag, **lost}
        lost = {}
        calls[actor.gradients.remote()] = actor
