"""PPO and A2C by hand: rounds of all actors, an update, new weights for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from hand_written.actors import unfinished
from rillflow.errors import ClusterError
from rillflow.records.metrics import Metrics, Sum
from rillflow_classic.fragment import joined
from rillflow_classic.policy import Learner


def train(actors: Sequence[Any], learner: Learner) -> Iterator[Metrics]:
    """Yield the metrics of every update."""
    live, loads = list(actors), []
    while True:
        lost = 0
        calls = [(actor, actor.sample.remote()) for actor in live]
        fragments = []
        for actor, call in calls:
            try:
                fragments.append(ray.get(call))
            except RayActorError as error:
                live.remove(actor)
                lost += 1
                logging.warning("an actor is left out: %s", error)
        if not live:
            raise ClusterError("all actors are lost")
        metrics = dict(learner.update(joined(fragments)))
        if lost:
            metrics["actor/lost/sum"] = Sum(value=float(lost))
        weights = learner.weights()
        loads = unfinished(loads)
        loads += [actor.load.remote(learner.version, weights) for actor in live]
        yield metrics
