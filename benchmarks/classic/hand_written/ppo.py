"""PPO and A2C by hand: rounds of all actors, an update, new weights for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hand_written.actors import one_round, send
from rillflow.records.metrics import Metrics
from rillflow_classic.policy import Learner


def train(actors: Sequence[Any], learner: Learner) -> Iterator[Metrics]:
    """Yield the metrics of every update."""
    live, loads = list(actors), []
    while True:
        fragment, lost = one_round(live)
        metrics = {**learner.update(fragment), **lost}
        loads = send(learner, live, loads)
        yield metrics
