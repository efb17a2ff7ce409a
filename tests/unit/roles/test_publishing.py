"""Publishing to remote samplers: only missing weights are sent, and only complete versions are served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.placement.mesh import Mesh
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.policy import Policy
from rillflow.roles.publishing import ReceivedWeights, SentWeights, links_of
from rillflow.roles.sampler import Sampler
from rillflow.roles.trained_role import Training
from rillflow.rollout.config import RolloutConfig
from rillflow.training.config import TrainConfig
from rillflow.workers.collectives import SingleRank

NEW = NewModel(hidden=16, layers=2, heads=2, context=16, alphabet="0123456789+=")


def model(seed: int) -> LanguageModel:
    return load_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())


class Ends:
    """One connected trainer and sampler with different seeds."""

    def __init__(self, most_bytes: int) -> None:
        self.trained, other = model(1), model(2)
        self.sent = SentWeights(ModelShard.whole(self.trained))
        self.received = ReceivedWeights(other, mesh=Mesh.of(first=1, dp=1, tp=1), ranks=SingleRank(), rank=0)
        self.plan = replace(self.received.plan(self.sent.lie()), most_bytes=most_bytes)
        self.links = links_of(self.plan)
        self.received.connect(self.plan)
        assert self.sent.connect(self.plan) == self.links
        self.sampler = Sampler(
            self.received, model=other, rollout=RolloutConfig(max_tokens=2, max_rows=2), seed=0
        )

    def deliver(self) -> list[Tensor]:
        """Send every bucket; return the sent tensors."""
        found = []
        for bucket in range(len(self.links)):
            (packed,) = self.sent.send(bucket)
            self.received.receive(bucket, packed)
            found.append(packed)
        return found

    def held(self) -> dict[str, Tensor]:
        return dict(self.received.module.named_parameters())


@pytest.mark.parametrize("most_bytes", [500, 2**20])
def test_what_was_trained_is_what_is_sampled_in_buckets_of_any_size(most_bytes: int) -> None:
    ends = Ends(most_bytes)
    ends.sent.publish(3)
    packed = ends.deliver()
    assert ends.received.serve(ends.sent.what_was_published()) == ends.received.version == 3
    trained, held = dict(ends.trained.module.named_parameters()), ends.held()
    assert held.keys() == trained.keys()
    assert all(torch.equal(held[name], weight) for name, weight in trained.items())
    whole = sum(weight.nbytes for weight in trained.values())
    assert sum(each.nbytes for each in packed) == ends.plan.received(1) == whole, "each byte, and once"
    assert (len(packed) > 10) == (most_bytes == 500)


def test_nothing_is_sampled_before_a_publish_or_while_one_is_on_its_way() -> None:
    ends = Ends(2**20)
    with pytest.raises(WeightError, match="no published weights"):
        ends.received.turn_to_generation(lambda: None)
    ends.sent.publish(0)
    ends.deliver()
    ends.received.serve(ends.sent.what_was_published())
    ends.received.turn_to_generation(lambda: None)
    ends.received.receive(0, *ends.sent.send(0))
    with pytest.raises(WeightError, match="since the last publish began"):
        ends.received.turn_to_generation(lambda: None)


def test_weights_that_differ_are_named_and_not_served() -> None:
    ends = Ends(2**20)
    ends.sent.publish(1)
    ends.deliver()
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        ends.held()[name].view(-1)[7] += 1e-6
    with pytest.raises(WeightError, match=rf"{name} differs from what was published as version 1"):
        ends.received.serve(ends.sent.what_was_published())
    with pytest.raises(WeightError):
        ends.received.turn_to_generation(lambda: None)


def test_what_is_trained_after_the_announcement_is_not_served() -> None:
    ends = Ends(2**20)
    ends.sent.publish(1)
    with torch.no_grad():
        next(iter(ends.trained.module.parameters())).mul_(1.5)
    ends.deliver()
    with pytest.raises(WeightError, match="embed_tokens"):
        ends.received.serve(ends.sent.what_was_published())


def test_a_publish_that_is_not_compared_is_served_as_it_arrives() -> None:
    ends = Ends(2**20)
    ends.sent.publish(4, compared=False)
    ends.deliver()
    with torch.no_grad():
        next(iter(ends.held().values())).mul_(1.5)
    assert ends.received.serve(ends.sent.what_was_published()) == 4


@pytest.mark.parametrize(("every", "wanted"), [(1, [True] * 4), (2, [False, True] * 2)])
def test_a_policy_has_one_publish_in_so_many_compared(every: int, wanted: list[bool]) -> None:
    share, found = ModelShard.whole(model(1)), []
    rollout = RolloutConfig(max_tokens=2, weight_check_interval=every)
    training = Training(config=TrainConfig(), seed=0)
    policy = Policy(share, training, rollout=rollout, weights=SentWeights(share))
    for _ in wanted:
        policy.publish()
        assert isinstance(policy.weights, SentWeights)
        found.append(bool(policy.weights.what_was_published().of))
    assert found == wanted


def test_bytes_of_another_plan_are_refused() -> None:
    ends = Ends(2**20)
    with pytest.raises(WeightError, match="packed 8 bytes for rank 1"):
        ends.received.receive(0, torch.zeros(8, dtype=torch.uint8))
