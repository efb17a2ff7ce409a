"""Networks fused by optimal transport: permutations undone, widths made one, what is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ot", reason="optimal transport is the extra `merge`")

import itertools

from rillflow.errors import ConfigError, ModelError
from rillflow_merging.transport import Dense, align, distances, fuse, transport


def network(seed: int, *widths: int) -> list[Dense]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Dense(
            weight=torch.randn(two, one, generator=generator).double(),
            bias=torch.randn(two, generator=generator).double(),
        )
        for one, two in itertools.pairwise(widths)
    ]


def said(layers: list[Dense], inputs: torch.Tensor) -> torch.Tensor:
    for place, layer in enumerate(layers):
        assert layer.bias is not None
        inputs = inputs @ layer.weight.T + layer.bias
        inputs = inputs.relu() if place + 1 < len(layers) else inputs
    return inputs


def permuted(layers: list[Dense], seed: int) -> list[Dense]:
    """The same function with its hidden units in another order."""
    generator, found = torch.Generator().manual_seed(seed), []
    before = torch.arange(layers[0].weight.shape[1])
    for place, layer in enumerate(layers):
        weight, bias, count = layer.weight[:, before], layer.bias, len(layer.weight)
        last = place + 1 == len(layers)
        before = torch.arange(count) if last else torch.randperm(count, generator=generator)
        assert bias is not None
        found.append(Dense(weight=weight[before], bias=bias[before]))
    return found


def doubled(layers: list[Dense]) -> list[Dense]:
    """The same function with every hidden unit twice, read with half the weight."""
    found = []
    for place, layer in enumerate(layers):
        weight, bias = layer.weight, layer.bias
        assert bias is not None
        weight = weight if place == 0 else weight.repeat_interleave(2, 1) / 2
        if place + 1 < len(layers):
            weight, bias = weight.repeat_interleave(2, 0), bias.repeat_interleave(2)
        found.append(Dense(weight=weight, bias=bias))
    return found


INPUTS = torch.randn(50, 5, generator=torch.Generator().manual_seed(9)).double()


@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["weights", "activations"])
@pytest.mark.parametrize("reg", [None, 0.1], ids=["exact", "sinkhorn"])
def test_the_order_of_a_parents_units_changes_nothing(inputs: torch.Tensor | None, reg: float | None) -> None:
    one, two = network(1, 5, 12, 7, 3), network(2, 5, 12, 7, 3)
    expected = fuse([one, two], inputs=inputs, reg=reg)
    found = fuse([permuted(one, 3), two], inputs=inputs, reg=reg)
    for layer, other in zip(found, expected, strict=True):
        torch.testing.assert_close(layer.weight, other.weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(layer.bias, other.bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["weights", "activations"])
def test_a_network_fused_with_its_own_permutation_is_itself(inputs: torch.Tensor | None) -> None:
    one = network(1, 5, 12, 7, 3)
    found = fuse([permuted(one, 4), permuted(one, 5), one], weights=[1, 2, 1], inputs=inputs)
    for layer, other in zip(found, one, strict=True):
        torch.testing.assert_close(layer.weight, other.weight)


@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["weights", "activations"])
def test_a_network_keeps_its_function_in_twice_and_in_half_its_width(inputs: torch.Tensor | None) -> None:
    """By weights, the wide one's second layer is compared with inputs that are shared out."""
    narrow = network(1, 5, 6, 4, 3)
    wide = doubled(narrow)
    for one, other in ((narrow, wide), (wide, narrow)):
        found = align(one, other, inputs)
        assert [layer.weight.shape for layer in found] == [layer.weight.shape for layer in other]
        torch.testing.assert_close(said(found, INPUTS), said(one, INPUTS))


def test_transport_moves_every_unit_whole_or_in_parts() -> None:
    one, two = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.randn(4, 4)
    exact = transport(distances(one, one[[2, 0, 1, 5, 4, 3]]))
    assert exact.order is not None and exact.order.tolist() == [2, 0, 1, 5, 4, 3]
    for found in (transport(distances(one, two)), transport(distances(one, two), 0.5)):
        assert found.plan is not None
        torch.testing.assert_close(found.plan.sum(0), torch.full((4,), 0.25).double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found.averaged(torch.ones(6), 0), torch.ones(4).double())
        assert float(found.shared(torch.ones(6), 0).sum()) == pytest.approx(6)


def test_networks_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ModelError, match="2 layers from 5 to 3"):
        fuse([network(1, 5, 6, 3), network(1, 5, 6, 6, 3)])
    with pytest.raises(ConfigError, match="--weights has 1 numbers for 2"):
        fuse([network(1, 5, 6, 3)] * 2, weights=[1])
    with pytest.raises(ConfigError, match="reg is 0"):
        transport(torch.ones(2, 2, dtype=torch.float64), 0)
