"""Sums of gradients through a codec, and the codec's state in a checkpoint."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.sharding.codec import CodedSum, State
from rillflow.sharding.mesh import Gradients, RankGroups
from rillflow.training.config import OptimizerConfig
from rillflow.training.optimizer import Optimizer
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks


class Rounded:
    """Sends whole numbers, and keeps what rounding left for the next time."""

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec."""
        wanted = tensor + state.get("error", torch.zeros_like(tensor))
        state["error"] = wanted - wanted.round()
        return wanted.round().to(torch.int8).flatten().view(torch.uint8)

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        del state
        into.copy_(payload.view(torch.int8).view(into.shape))


def summed(steps: list[list[dict[str, Tensor]]], sums: list[CodedSum]) -> list[dict[str, Tensor]]:
    """Sum the tensors of every step on two threads; return the sums of the first rank."""
    group = ThreadGroup(2, 60.0)

    def rank(index: int) -> list[dict[str, Tensor]]:
        own = [{name: each.clone() for name, each in step[index].items()} for step in steps]
        for tensors in own:
            sums[index].sum_(ThreadRanks(group, index), tensors)
        return own

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    return first


def drawn(steps: int) -> list[list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    return [[{"a": torch.randn(3, 2) * 5, "b": torch.randn(4) * 5} for _ in range(2)] for _ in range(steps)]


def test_every_rank_gets_the_sum_of_the_decoded_tensors() -> None:
    (step,) = drawn(1)
    (found,) = summed([step], sums := [CodedSum(Rounded()), CodedSum(Rounded())])
    for name in found:
        assert torch.equal(found[name], step[0][name].round() + step[1][name].round())
    sent = sums[0].metrics()
    assert sent["links/gradient_sent_bytes/mean"].value == 10
    assert sent["links/gradient_bytes/mean"].value == 40


def test_a_state_that_was_saved_goes_on_with_the_same_bits() -> None:
    steps = drawn(6)
    whole = summed(steps, [CodedSum(Rounded()), CodedSum(Rounded())])
    before = [CodedSum(Rounded()), CodedSum(Rounded())]
    summed(steps[:3], before)
    after = [CodedSum(Rounded()), CodedSum(Rounded())]
    for old, new in zip(before, after, strict=True):
        new.load_state({name: each.clone() for name, each in old.state().items()})
    for one, other in zip(whole[3:], summed(steps[3:], after), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert set(before[0].state()) == {"link.error/a", "link.error/b"}
    with pytest.raises(TrainingError, match=r"has 2 rows of 'link\.error/a'"):
        after[0].load_state({"link.error/a": torch.zeros(2, 3, 2)})


@pytest.mark.parametrize("gradient", [2.0, math.inf], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_never_reaches_the_state(gradient: float) -> None:
    group = ThreadGroup(2, 60.0)

    def rank(index: int) -> tuple[bool, dict[str, Tensor]]:
        ranks: Ranks = ThreadRanks(group, index)
        gradients = Gradients(groups=RankGroups.whole(ranks), coded=CodedSum(Rounded()))
        module = nn.Linear(2, 2, bias=False)
        optimizer = Optimizer(module, OptimizerConfig(lr=0.1), total_steps=1, gradients=gradients)
        optimizer.masters["weight"].grad = torch.full((2, 2), gradient if index else 1.3)
        is_sound = optimizer.sum_over_ranks(learns=True, is_sound=gradient == math.inf or index == 0)
        with pytest.raises(NotFiniteError) if gradient == math.inf else nullcontext():
            optimizer.step()
        return is_sound, optimizer.state()

    with ThreadPoolExecutor(2) as pool:
        for is_sound, state in pool.map(rank, range(2)):
            assert is_sound == (gradient == math.inf)
            assert not any(name.startswith("link.") for name in state)


def test_one_rank_sends_nothing() -> None:
    tensors = {"a": torch.tensor([0.4, 1.6])}
    CodedSum(Rounded()).sum_(SingleRank(), tensors)
    assert torch.equal(tensors["a"], torch.tensor([0.0, 2.0]))
