"""Ape-X by hand: fragments into shards of a replay, batches out of them, updates, priorities, weights."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from hand_written.actors import left_out, send, unfinished
from rillflow.records.metrics import Metrics, merge_metrics
from rillflow_classic.on_policy import fragment_metrics


def train(actors: Sequence[Any], shards: Sequence[Any], learner: Any, settings: Any) -> Iterator[Metrics]:
    """Yield the metrics of every ``settings.updates`` updates."""
    generator = random.Random(0)
    least = max(settings.learning_starts // len(shards), settings.batch_size)
    live, sent, held = list(actors), [], []
    sampling = {actor.sample.remote(): actor for _ in range(settings.num_async) for actor in actors}
    drawing = {
        shard.draw.remote(settings.batch_size, least): shard
        for _ in range(settings.num_async)
        for shard in shards
    }
    batches: deque[Any] = deque()
    count = 0
    while True:
        waiting = [*sampling, *(drawing if len(batches) < settings.queued else ())]
        done, _ = ray.wait(waiting, num_returns=1, timeout=0 if batches else None)
        for call in done:
            if call in drawing:
                shard = drawing.pop(call)
                batch = ray.get(call)
                if batch is not None:
                    batches.append((shard, batch))
                drawing[shard.draw.remote(settings.batch_size, least)] = shard
                continue
            actor = sampling.pop(call)
            try:
                fragment = ray.get(call)
            except RayActorError as error:
                held.append(left_out(actor, live, error))
                continue
            held.append(fragment_metrics(fragment, learner.version))
            sent = unfinished(sent)
            sent.append(generator.choice(shards).add.remote(fragment))
            sampling[actor.sample.remote()] = actor
        if not batches:
            continue
        shard, batch = batches.popleft()
        held.append(learner.update(batch))
        sent.append(shard.set_priorities.remote(batch.serials, learner.errors))
        if learner.version % settings.publish_every == 0:
            sent = send(learner, live, sent)
        count += 1
        if count % settings.updates == 0:
            yield merge_metrics(held)
            held = []
