"""Bare Ray actors: the part that the hand-written forms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

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


def unfinished(loads: Sequence[Any]) -> list[Any]:
    """Raise the error of a load that failed; return those that still run."""
    if not loads:
        return []
    done, waiting = ray.wait(list(loads), num_returns=len(loads), timeout=0)
    with suppress(RayActorError):
        ray.get(done)
    return waiting
