"""Transport: match the units of one model to those of another by optimal transport.

    units of 0: features [n0, f] ─┐ squared distances     POT           columns sum to 1 ─> weights that write
    units of 1: features [n1, f] ─┴─ [n0, n1] ─────────> plan [n0, n1] ─ rows sum to 1 ───> weights that read

Exact transport between equal numbers of units is a permutation. Between n0 and n1 units it is rectangular: a
unit of model 1 is the average of the units that are moved to it, and the weights that read a unit of model 0
are divided among the units that it is moved to. Source: arXiv 1910.05653; for equal widths the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import ConfigError, ModelError

_ITERATIONS = 300


@dataclass(frozen=True, kw_only=True, eq=False)
class Matching:
    """A matching of the units of one model to another's: exactly one of ``order`` and ``plan`` is set.

    Example:
        Matching(order=torch.tensor([1, 0]))
    """

    order: Tensor | None = None
    """[n1] int64: the unit of model 0 for each unit of model 1, if the matching is a permutation."""
    plan: Tensor | None = None
    """[n0, n1] float64: the mass of each unit that moves to each other unit."""

    def averaged(self, values: Tensor, dim: int) -> Tensor:
        """Move units in weights that write them, such as outputs: each new unit averages old ones."""
        if self.order is not None:
            return values.index_select(dim, self.order)
        assert self.plan is not None
        return _along(values, dim, self.plan / self.plan.sum(0, keepdim=True).clamp_min(1e-300))

    def shared(self, values: Tensor, dim: int) -> Tensor:
        """Move units in weights that read them, such as inputs: old units are divided among new ones."""
        if self.order is not None:
            return values.index_select(dim, self.order)
        assert self.plan is not None
        return _along(values, dim, self.plan / self.plan.sum(1, keepdim=True).clamp_min(1e-300))

    def dense(self) -> Tensor:
        """Return the plan [n0, n1] float64, whose sum is 1."""
        if self.plan is not None:
            return self.plan
        assert self.order is not None
        count = len(self.order)
        found = torch.zeros(count, count, dtype=torch.float64)
        found[self.order, torch.arange(count)] = 1 / count
        return found


def transport(cost: Tensor, reg: float | None = None) -> Matching:
    """Return the cheapest transport between units of equal mass.

    Args:
        cost: [n0, n1] float64.
        reg: None for exact transport; else Sinkhorn's regularisation, in units of the mean cost.

    Raises:
        ConfigError: POT is not installed, or ``reg`` is not positive.
    """
    if reg is not None and not reg > 0:
        raise ConfigError(f"reg is {reg:g}", why="the regularisation must be above 0", fix="try 0.01")
    ot = _pot()
    left, right = (torch.full((count,), 1 / count, dtype=torch.float64).numpy() for count in cost.shape)
    if reg is None:
        found = torch.from_numpy(ot.emd(left, right, cost.numpy(), numItermax=10_000_000))
        return _permutation(found) or Matching(plan=found)
    scaled = (cost / cost.mean().clamp_min(1e-300)).numpy()
    how = {"method": "sinkhorn_log", "numItermax": _ITERATIONS, "stopThr": 1e-7, "warn": False}
    return Matching(plan=torch.from_numpy(ot.sinkhorn(left, right, scaled, reg, **how)))


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return squared distances [n0, n1] float64 between the rows of [n0, f] and of [n1, f]."""
    one, other = one.double(), other.double()
    lengths = one.square().sum(1)[:, None] + other.square().sum(1)[None]
    return (lengths - 2 * one @ other.T).clamp_min_(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dense:
    """A linear layer of a network: outputs = weight inputs + bias."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None = None
    """[out]."""


Network = Sequence[Dense]
"""A network of linear layers with one activation between them."""


def fuse(
    networks: Sequence[Network],
    *,
    weights: Sequence[float] | None = None,
    inputs: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    reg: float | None = None,
) -> list[Dense]:
    """Fuse several networks: align all hidden units to the last network's, then average.

    Args:
        networks: networks of equal depth, with the same inputs and outputs; inner widths may differ.
        weights: one per network, divided by their sum; equal ones if None.
        inputs: [N, in] to compare units by their activations; None compares incoming weights.
        activation: between the layers.
        reg: see ``transport``.

    Raises:
        ModelError: the networks differ in the number of layers, inputs or outputs.
        ConfigError: weights or ``reg`` are invalid; POT is not installed.
    """
    from rillflow_merging.methods import normalised

    shares = normalised(weights, len(networks))
    for each in networks:
        _require_same_ends(networks[-1], each)
    moved = [*(align(each, networks[-1], inputs, activation, reg) for each in networks[:-1]), networks[-1]]
    return [_mean(shares, layers) for layers in zip(*moved, strict=True)]


def _mean(shares: Sequence[float], layers: Sequence[Dense]) -> Dense:
    weight = torch.stack([each.weight.double() for each in layers])
    share = torch.tensor(shares, dtype=torch.float64)
    bias = None
    if layers[-1].bias is not None:
        bias = share @ torch.stack([_bias(each).double() for each in layers])
    return Dense(weight=torch.tensordot(share, weight, dims=1), bias=bias)


def align(
    one: Network,
    other: Network,
    inputs: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    reg: float | None = None,
) -> list[Dense]:
    """Return ``one`` with its hidden units in the order of ``other``; see ``fuse``."""
    found, before = list[Dense](), Matching(order=torch.arange(one[0].weight.shape[1]))
    said = [None, None] if inputs is None else [inputs.double(), inputs.double()]
    for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        weight = before.shared(mine.weight.double(), 1)
        if place == len(one) - 1:
            found.append(Dense(weight=weight, bias=mine.bias))
            break
        if said[0] is None or said[1] is None:
            features = [_incoming(weight, mine.bias), _incoming(theirs.weight, theirs.bias)]
        else:
            said = [_said(layer, states) for layer, states in zip((mine, theirs), said, strict=True)]
            features = [states.T for states in said if states is not None]
            said = [activation(states) for states in said if states is not None]
        before = transport(distances(*features), reg)
        bias = None if mine.bias is None else before.averaged(mine.bias.double(), 0)
        found.append(Dense(weight=before.averaged(weight, 0), bias=bias))
    return found


def _incoming(weight: Tensor, bias: Tensor | None) -> Tensor:
    return weight.double() if bias is None else torch.cat([weight.double(), bias.double()[:, None]], 1)


def _said(layer: Dense, states: Tensor | None) -> Tensor:
    assert states is not None
    bias = None if layer.bias is None else layer.bias.double()
    return torch.nn.functional.linear(states, layer.weight.double(), bias)


def _bias(layer: Dense) -> Tensor:
    return torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias


def _require_same_ends(one: Network, other: Network) -> None:
    shapes = [(len(each), each[0].weight.shape[1], len(each[-1].weight)) for each in (one, other)]
    if shapes[0] != shapes[1]:
        found = [f"{depth} layers from {first} to {last}" for depth, first, last in reversed(shapes)]
        raise ModelError(
            f"the networks have {' and '.join(found)}",
            why="layers are aligned one to one, and inputs and outputs are not reordered",
            fix="fuse networks with the same number of layers, inputs and outputs",
        )


def _permutation(plan: Tensor) -> Matching | None:
    """Return the plan as a permutation if each unit moves as a whole to one place, else None."""
    count = len(plan)
    if plan.shape != (count, count) or not bool((plan.amax(0) * count > 0.999).all()):
        return None
    order = plan.argmax(0)
    return Matching(order=order) if len(set(order.tolist())) == count else None


def _along(values: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """Mix the units along a dim by a matrix [n0, n1]."""
    found: Tensor = torch.tensordot(values.double().movedim(dim, -1), matrix, dims=1)
    return found.movedim(-1, dim)


def _pot() -> Any:
    try:
        import ot
    except ModuleNotFoundError:
        raise ConfigError(
            "POT is not installed",
            why="optimal transport needs it",
            fix="pip install POT",
        ) from None
    return ot
