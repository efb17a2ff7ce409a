"""Bare Ray actors: the part that the hand-written forms share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from rillflow.errors import ClusterError
from rillflow.records.metrics import Metrics, Sum, merge_metrics
from rillflow_classic.fragment import Fragment, joined
from rillflow_classic.policy import Learner, Weights
from rillflow_classic.workers.actor import Actor


@ray.remote(num_cpus=0)
class RemoteActor:
    """An actor, and a learner of its own if it computes gradients."""

    def __init__(
        self, make: Callable[[int], Actor], index: int, make_learner: Callable[[], Learner] | None = None
    ):
        torch.set_num_threads(1)
        self.actor = make(index)
        self.learner = None if make_learner is None else make_learner()

    def reset(self, seed: int) -> None:
        self.actor.reset(seed)

    def sample(self) -> Any:
        return self.actor.sample()

    def gradients(self) -> Any:
        fragment = self.actor.sample()
        return *self.learner.gradients(fragment), int(fragment.versions.min())

    def load(self, version: int, weights: Weights) -> None:
        self.actor.load(version, weights)
        if self.learner is not None:
            self.learner.policy.load(version, weights)

    def spent_s(self) -> float:
        return time.process_time()


def left_out(actor: Any, live: list[Any], error: Exception) -> Metrics:
    """Leave a lost actor out; return the metric of its loss."""
    if actor not in live:
        return {}
    live.remove(actor)
    logging.warning("an actor is left out: %s", error)
    if not live:
        raise ClusterError("all actors are lost") from error
    return {"actor/lost/sum": Sum(value=1.0)}


def one_round(live: list[Any]) -> tuple[Fragment, Metrics]:
    """Return one fragment of every actor, side by side, and the metric of lost actors."""
    calls, fragments, lost = [(actor, actor.sample.remote()) for actor in live], [], []
    for actor, call in calls:
        try:
            fragments.append(ray.get(call))
        except RayActorError as error:
            lost.append(left_out(actor, live, error))
    return joined(fragments), merge_metrics(lost)


def send(learner: Learner, live: Sequence[Any], loads: Sequence[Any]) -> list[Any]:
    """Send new weights to all actors; return the loads that still run."""
    weights = learner.weights()
    return unfinished(loads) + [actor.load.remote(learner.version, weights) for actor in live]


def unfinished(loads: Sequence[Any]) -> list[Any]:
    """Raise the error of a load that failed; return those that still run."""
    if not loads:
        return []
    done, waiting = ray.wait(list(loads), num_returns=len(loads), timeout=0)
    with suppress(RayActorError):
        ray.get(done)
    return waiting
