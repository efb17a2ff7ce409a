"""Small or offloaded moments and masters take the same steps, and resume bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rillflow.errors import TrainingError
from rillflow.sharding.mesh import Gradients, RankGroups
from rillflow.training.adamw import AdamW, rounded
from rillflow.training.config import OptimizerConfig
from rillflow.training.offload import OnHost
from rillflow.training.optimizer import Optimizer
from rillflow.workers.collectives import SingleRank

MakeModule = Callable[..., PreTrainedModel]
ALONE = Gradients(groups=RankGroups.whole(SingleRank()))


def made(module: PreTrainedModel, **settings: Any) -> Optimizer:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, **settings)
    return Optimizer(module, config, total_steps=9, gradients=ALONE)


def stepped(optimizer: Optimizer, module: PreTrainedModel, *seeds: int) -> dict[str, Tensor]:
    """Take a step along a random gradient of each seed; return weights and state."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for weight in module.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.collect()
        optimizer.step()
        optimizer.discard()
    return copied({**optimizer.state(), **module.state_dict()})


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_eps_is_that_of_the_caller() -> None:
    gradient = torch.tensor([[1e-3, -2e-5]])
    own, expected = (nn.Parameter(torch.ones(1, 2)) for _ in range(2))
    adamw = AdamW({"w": own}, (), OptimizerConfig(beta1=0.8, beta2=0.9), eps=1e-3)
    reference = torch.optim.AdamW(
        [expected], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0, fused=True
    )
    for steps in range(2):
        own.grad, expected.grad = gradient.clone(), gradient.clone()
        adamw.step(steps, 0.1, lambda _: None)
        reference.step()
    assert torch.equal(own, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [None, "bfloat16"])
def test_offloaded_steps_are_those_of_a_state_that_stays(
    make_module: MakeModule, dtype: torch.dtype, moments: str | None
) -> None:
    module = make_module(dtype=dtype)
    expected = stepped(made(module, optimizer_dtype=moments), module, 1, 2)
    module = make_module(dtype=dtype)
    optimizer = made(module, optimizer_dtype=moments, offload="optimizer")
    assert_same(stepped(optimizer, module, 1, 2), expected)
    numbers = sum(weight.numel() for weight in module.parameters())
    master, moment = (4, 0)[dtype == torch.float32], (4, 2)[moments is not None]
    assert optimizer.moved_bytes == 2 * numbers * (master + 2 * moment), "there and back"


def test_masters_have_no_memory_on_the_device_between_steps(make_module: MakeModule) -> None:
    module = make_module(dtype=torch.bfloat16)
    optimizer = made(module, offload="all")
    masters = optimizer.masters.values()
    assert {master.untyped_storage().nbytes() for master in masters} == {0}
    stepped(optimizer, module, 1)
    assert {master.untyped_storage().nbytes() for master in masters} == {0}


@pytest.mark.parametrize("offload", [None, "optimizer"])
@pytest.mark.parametrize("moments", [None, "bfloat16"])
def test_an_optimizer_goes_on_bit_for_bit(
    make_module: MakeModule, moments: str | None, offload: str | None
) -> None:
    module = make_module(dtype=torch.bfloat16)
    whole = stepped(made(module, optimizer_dtype=moments, offload=offload), module, 1, 2, 3)
    module = make_module(dtype=torch.bfloat16)
    first = made(module, optimizer_dtype=moments, offload=offload)
    stepped(first, module, 1, 2)
    kept = copied(first.state())
    again = made(module, optimizer_dtype=moments, offload=offload)
    again.load_state(kept)
    assert_same(stepped(again, module, 3), whole)


def test_a_state_keeps_moments_of_half_the_bytes(make_module: MakeModule) -> None:
    sizes = []
    for moments in (None, "bfloat16"):
        module = make_module()
        optimizer = made(module, optimizer_dtype=moments)
        stepped(optimizer, module, 1)
        sizes.append(sum(each.nbytes for name, each in optimizer.state().items() if "exp_avg" in name))
    assert sizes[0] == 2 * sizes[1] == 8 * sum(weight.numel() for weight in make_module().parameters())


def test_moments_of_another_type_are_taken_over(make_module: MakeModule) -> None:
    module = make_module()
    wide = made(module)
    stepped(wide, module, 1)
    narrow = made(module, optimizer_dtype="bfloat16")
    narrow.load_state(copied(wide.state()))
    for name, tensor in wide.state().items():
        torch.testing.assert_close(narrow.state()[name].to(tensor.dtype), tensor, rtol=2**-8, atol=0)


def test_rounding_is_up_or_down_and_right_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(999, generator=generator) * torch.logspace(-30, 6, 999)
    draws = torch.stack([rounded(numbers, (7, 0, step)) for step in range(2000)]).double()
    exact = numbers.double()
    gap = torch.where(draws != exact, (draws - exact).abs(), 0.0).amax(0)
    assert bool((gap < exact.abs() * 2**-7).all()), "a neighbour, never further"
    error = (draws.mean(0) - exact) / (exact.abs() * 2**-7)
    assert float(error.abs().max()) < 5 * 0.5 / 2000**0.5
    assert float(error.mean().abs()) < 5 * 0.5 / (2000 * 999) ** 0.5
    steps = draws[:2]
    assert not torch.equal(*steps) and torch.equal(rounded(numbers, (7, 0, 1)).double(), steps[1])
    assert not torch.equal(rounded(numbers, (7, 1, 1)).double(), steps[1])


def test_what_bfloat16_holds_stays_as_it_is() -> None:
    numbers = torch.cat([torch.zeros(3), torch.randn(300).bfloat16().float()])
    assert torch.equal(rounded(numbers, (1, 1, 1)).float(), numbers)


def test_a_second_moment_does_not_stand_still() -> None:
    """Nearest rounding keeps 0.999 v + 0.001 at v = 0.9, because half of its last bit is more."""
    value = torch.full((1024,), 0.9)
    for step in range(700):
        value = rounded(0.999 * value.float() + 0.001, (3, 1, step)).float()
    assert float(value.mean()) == pytest.approx(1 - 0.1 * 0.999**700, rel=5e-3)
    assert float((0.999 * torch.tensor(0.9) + 0.001).bfloat16()) == float(torch.tensor(0.9).bfloat16())


def test_memory_that_is_another_s_is_refused_and_all_stays_as_it_was() -> None:
    for lent in (torch.from_numpy(np.arange(3, dtype=np.float32)), torch.arange(3.0).share_memory_()):
        own = torch.ones(2)
        with pytest.raises(TrainingError, match=r"1 of 2 tensor storages, the first of 12 bytes") as error:
            OnHost([own, lent])
        assert "numpy" in str(error.value) and "policy.offload" in str(error.value)
        assert [own.tolist(), lent.tolist()] == [[1, 1], [0, 1, 2]]
        assert OnHost([own, lent.clone()]).num_bytes == 20


def test_tensors_come_and_go_with_all_their_views(make_module: MakeModule) -> None:
    module = make_module(tie_word_embeddings=True)
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        expected, view = module(input_ids=tokens).logits, module.lm_head.weight[3]
        numbers = view.clone()
        away = OnHost(module.parameters())
        assert away.num_bytes == sum(weight.nbytes for weight in module.parameters()), "tied ones once"
        assert {weight.untyped_storage().nbytes() for weight in module.parameters()} == {0}
        for _ in range(2):
            with away:
                assert torch.equal(module(input_ids=tokens).logits, expected)
                assert torch.equal(view, numbers)
        assert {weight.untyped_storage().nbytes() for weight in module.parameters()} == {0}
