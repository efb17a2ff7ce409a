"""Options: list every grid that divides a model evenly over devices, and select the ones worth keeping.

devices ─ divisors ─> grids ─ seconds, bytes ─> those that fit alone ─ drop dominated ones ─> options
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.placement.grid import Grid
from rillflow_planner.model_shape import ModelShape


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def cuts_heads(shape: ModelShape, tp: int) -> bool:
    """Return whether tp devices get equal numbers of heads; with latent attention, only query heads count."""
    return shape.heads % tp == 0 and (bool(shape.latent) or shape.kv_heads % tp == 0)


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Grids that a runtime supports.

    Example:
        LAYOUTS["megatron"].any_copy
    """

    is_own: bool = False
    """Whether this is Rillflow's runtime."""
    cuts_layers: bool = True
    """Whether training may use tensor and pipeline parallelism."""
    sharded: tuple[bool, ...] = (False, True)
    """Whether parameters are whole on every data-parallel device, or sharded over them (``fsdp``)."""
    context: int = 1
    """Largest context parallelism."""
    cuts_experts: bool = True
    """Whether tensor parallelism may cut a mixture, in training and in a generation copy."""
    mixes_experts: bool = False
    """Whether expert parallelism combines with other axes than dp."""
    any_copy: bool = False
    """Whether a generation copy may lie on any devices, replicate key-value heads, and cross machines."""


LAYOUTS: Mapping[str, Layouts] = {
    "rillflow": Layouts(is_own=True, cuts_experts=False),
    "megatron": Layouts(sharded=(False,), context=8, mixes_experts=True, any_copy=True),
    "fsdp": Layouts(cuts_layers=False, sharded=(True,), context=8, any_copy=True),
}
"""Rillflow's own runtime (``rillflow/app/meshes.py``), and the training backends of published stacks."""
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "tensor parallelism splits linear layers and no experts, and expert parallelism works with dp alone": {
        "cuts_experts": True,
        "mixes_experts": True,
    },
    "a generation copy lies within a tensor-parallel group or among FSDP ranks, on at most one device per "
    "key-value head": {"any_copy": True},
    "there is no context parallelism: a device computes whole rows": {"context": 8},
}
"""Limits of Rillflow's runtime, each with the change of ``Layouts`` that would lift it."""
_LARGEST_COPY = 64


def grids(shape: ModelShape, devices: int, per_machine: int, layouts: Layouts) -> Iterator[Grid]:
    """Yield grids to train or score on exactly these devices.

    tp and cp together lie within a machine; pp is at most one per layer.
    """
    for tp, cp in product(divisors(devices), repeat=2):
        if tp * cp > per_machine or per_machine % (tp * cp) or devices % (tp * cp) or cp > layouts.context:
            continue
        if not cuts_heads(shape, tp) or (tp > 1 and not (layouts.cuts_layers and cuts_model(shape, layouts))):
            continue
        for pp in divisors(devices // (tp * cp)):
            if pp > (shape.layers if layouts.cuts_layers else 1):
                break
            dp = devices // tp // cp // pp
            experts = expert_sizes(shape, dp * cp * tp, tp) if layouts.mixes_experts or pp * tp == 1 else [1]
            for ep, is_sharded in product(experts, layouts.sharded if dp * cp > 1 else (False,)):
                if is_sharded and ep > 1 and not layouts.mixes_experts:
                    continue
                yield Grid(dp=dp, pp=pp, tp=tp, cp=cp, ep=ep, is_sharded=is_sharded)


def cuts_model(shape: ModelShape, layouts: Layouts) -> bool:
    """Return whether tensor parallelism may cut this model."""
    return layouts.cuts_experts or not shape.is_mixture


def expert_sizes(shape: ModelShape, devices: int, tp: int) -> list[int]:
    """Return sizes of ep: 1, and divisors of the experts and of a stage's devices that are at least tp."""
    if not shape.is_mixture:
        return [1]
    return [1, *(ep for ep in divisors(devices) if ep > 1 and ep >= tp and shape.experts % ep == 0)]


def copy_sizes(shape: ModelShape, devices: int, layouts: Layouts) -> list[int]:
    """Return possible sizes of a generation copy on these devices: divisors that divide the heads."""
    if not cuts_model(shape, layouts):
        return [1]
    if layouts.any_copy:
        return [tp for tp in divisors(devices) if shape.heads % tp == 0 and tp <= _LARGEST_COPY]
    return [tp for tp in divisors(devices) if cuts_heads(shape, tp)]


def copy_sizes_of(shape: ModelShape, grid: Grid, layouts: Layouts) -> list[int]:
    """Return possible sizes of a generation copy on the devices of a training grid.

    Rillflow's copy lies within a tensor-parallel group, or on any ranks of a model that only FSDP shards.
    """
    if layouts.any_copy:
        return copy_sizes(shape, grid.devices, layouts)
    within = grid.dp if grid.is_sharded and grid.pp == grid.tp == 1 else grid.tp
    return copy_sizes(shape, within, layouts)


def undominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of Pareto-optimal rows of [points, costs]; of equal rows, the first."""
    rows, first = np.unique(costs, axis=0, return_index=True)
    no_worse = (rows[:, None] >= rows).all(axis=2).sum(axis=1)
    return np.sort(first[no_worse == 1])  # rows for which only the row itself is no worse
