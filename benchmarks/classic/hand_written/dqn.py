"""DQN by hand: rounds of all actors into a buffer, updates from it, new weights for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hand_written.actors import one_round, send
from rillflow.records.metrics import Metrics
from rillflow_classic.off_policy import make_replay
from rillflow_classic.on_policy import fragment_metrics


def train(actors: Sequence[Any], learner: Any) -> Iterator[Metrics]:
    """Yield the metrics of every round."""
    live, loads, buffer = list(actors), [], make_replay(learner.inputs)
    while True:
        fragment, lost = one_round(live)
        acted = fragment_metrics(fragment, learner.version)
        buffer.add(fragment)
        metrics = {**acted, **learner.train(buffer), **lost}
        loads = send(learner, live, loads)
        yield metrics
