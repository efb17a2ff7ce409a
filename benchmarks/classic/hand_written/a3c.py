"""A3C by hand: gradients as they come, a step, new weights for their actor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from hand_written.actors import unfinished
from rillflow.errors import ClusterError
from rillflow.records.metrics import Mean, Metrics, Sum
from rillflow_classic.policy import Learner


def train(actors: Sequence[Any], learner: Learner, num_async: int = 1) -> Iterator[Metrics]:
    """Yield the metrics of every gradient."""
    first = ray.put(learner.weights())
    loads = [actor.load.remote(learner.version, first) for actor in actors]
    calls = {actor.gradients.remote(): actor for _ in range(num_async) for actor in actors}
    live, lost = set(actors), 0
    while calls:
        done, _ = ray.wait(list(calls), num_returns=1)
        actor = calls.pop(done[0])
        try:
            gradients, metrics, version = ray.get(done[0])
        except RayActorError as error:
            if actor in live:
                live.remove(actor)
                lost += 1
                logging.warning("an actor is left out: %s", error)
            continue
        lag = Mean(total=float(learner.version - version), count=1.0)
        learner.apply(gradients)
        loads = unfinished(loads)
        loads.append(actor.load.remote(learner.version, learner.weights()))
        metrics = {**metrics, "actor/lag/mean": lag}
        if lost:
            metrics["actor/lost/sum"], lost = Sum(value=float(lost)), 0
        yield metrics
        calls[actor.gradients.remote()] = actor
    raise ClusterError("all actors are lost")
