"""WeightSync: a publish is served once every receiver has it, and never where one does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
import torch

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.weight_sync import WeightSync
from rillflow.errors import ClusterError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.placement.mesh import Mesh
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.publishing import ReceivedWeights, SentWeights
from rillflow.workers.backend import Pool
from rillflow.workers.collectives import SingleRank
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend

NEW = NewModel(hidden=16, layers=1, heads=2, context=16, alphabet="01")


def model(seed: int) -> LanguageModel:
    return load_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())


@dataclass
class Trained:
    """A trained role, as far as a delivery knows it."""

    weights: SentWeights

    def announce(self) -> None:
        self.weights.publish(4)


@dataclass
class Sampled:
    """A sampler, as far as a delivery knows it."""

    weights: ReceivedWeights


def sampled() -> Sampled:
    mesh = Mesh.of(first=1, dp=1, tp=1)
    return Sampled(ReceivedWeights(model(2), mesh=mesh, ranks=SingleRank(), rank=0))


@pytest.fixture
def executor() -> Iterator[GroupExecutor]:
    """A trained role and a sampler on ranks of their own."""
    backend = InlineBackend()
    backend.open([Pool(name="main", size=1), Pool(name="answers", size=1)])
    pools = {"policy": "main", "sampler": "answers"}
    made = {
        role: Group(role, {}, mesh=Mesh.of(dp=1), pool=pool, backend=backend) for role, pool in pools.items()
    }
    made["policy"].start(lambda _: Trained(SentWeights(ModelShard.whole(model(1)))))
    made["sampler"].start(lambda _: sampled())
    yield GroupExecutor(made, backend)
    backend.close()


def announce(policy: Trained) -> None:
    policy.announce()


def wait(_: Sampled, until: Event) -> None:
    until.wait(5.0)


def test_the_version_is_served_once_its_weights_have_arrived(executor: GroupExecutor) -> None:
    deliver = WeightSync(executor, deadline_s=30.0)
    assert deliver(executor.on_all_ranks("policy", announce)).read(30.0) == 4


def test_a_receiver_that_does_not_answer_ends_the_delivery(executor: GroupExecutor) -> None:
    deliver, answers = WeightSync(executor, deadline_s=0.5), Event()
    executor.on_all_ranks("sampler", wait, answers)
    with pytest.raises(ClusterError, match="receive has not answered on rank 0 of pool 'answers'"):
        deliver(executor.on_all_ranks("policy", announce))
    answers.set()
