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

from rillflow.placement.grid import Grid, Numbers
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
    pipelines: bool = True
    """Whether training may use pipeline parallelism beside tensor parallelism."""
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
    short_ends: bool = False
    """Whether only the first and the last pipeline stage may have fewer layers than the others; otherwise the
    layers of stages differ by at most one, and earlier stages have more.
    """
    equal_rows: bool = False
    """Whether all data-parallel devices need the same number of rows in an optimiser step."""
    splits_own_attention: bool = True
    """Whether a model whose attention cannot be replaced may be split; otherwise only dp is possible."""


LAYOUTS: Mapping[str, Layouts] = {
    "rillflow": Layouts(is_own=True, cuts_experts=False, splits_own_attention=False),
    "megatron": Layouts(
        sharded=(False,), context=8, mixes_experts=True, any_copy=True, short_ends=True, equal_rows=True
    ),
    "dtensor": Layouts(pipelines=False, sharded=(True,), context=8, any_copy=True, equal_rows=True),
    "fsdp": Layouts(cuts_layers=False, sharded=(True,), context=8, any_copy=True, equal_rows=True),
}
"""Rillflow's own runtime (``rillflow/app/meshes.py``, ``rillflow/sharding/pipeline.py``), and the training
backends of published stacks: Megatron's ``num_layers_in_first_pipeline_stage`` and ``..._last_...``.
"""
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "tensor parallelism splits linear layers and no experts, and expert parallelism works with dp alone": {
        "cuts_experts": True,
        "mixes_experts": True,
    },
    "a generation copy lies in a machine, within a tensor-parallel group or among FSDP ranks, on at most one "
    "device per key-value head": {"any_copy": True},
    "there is no context parallelism: a device computes whole rows": {"context": 8},
    "a model with linear or chunked attention is whole on every device": {"splits_own_attention": True},
}
"""Limits of Rillflow's runtime, each with the change of ``Layouts`` that would lift it."""
_LARGEST_COPY = 64


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers of the stages of a pipeline, [grids]."""

    most: Numbers
    """Layers of the fullest stage."""
    first: Numbers
    """Layers of the first stage, which has the embedding too."""
    last: Numbers
    """Layers of the last stage, which has the head too; below 1 if the runtime has no such pipeline."""


def stage_layers(layers: int, pp: Numbers, layouts: Layouts) -> StageLayers:
    """Return how a runtime spreads the layers of a model over ``pp`` stages."""
    most = np.ceil(np.divide(layers, pp))
    if not layouts.short_ends:
        return StageLayers(most=most, first=most, last=np.floor(np.divide(layers, pp)))
    ends = layers - most * (np.asarray(pp) - 2)
    return StageLayers(most=most, first=np.ceil(ends / 2), last=np.floor(ends / 2))


def grids(shape: ModelShape, devices: int, per_machine: int, layouts: Layouts) -> Iterator[Grid]:
    """Yield grids to train or score on exactly these devices.

    tp and cp together lie within a machine, and cut heads evenly; every pipeline stage has a layer.
    """
    if shape.keeps_attention and not layouts.splits_own_attention:
        yield Grid(dp=devices)
        return
    for tp, cp in product(divisors(devices), repeat=2):
        if tp * cp > per_machine or per_machine % (tp * cp) or devices % (tp * cp) or cp > layouts.context:
            continue
        if not layouts.cuts_layers and shape.heads % cp:  # Ulysses: heads instead of tokens during attention
            continue
        if not cuts_heads(shape, tp) or (tp > 1 and not (layouts.cuts_layers and cuts_model(shape, layouts))):
            continue
        for pp in divisors(devices // (tp * cp)):
            can_cut = layouts.cuts_layers and layouts.pipelines
            if pp > 1 and not (can_cut and stage_layers(shape.layers, pp, layouts).last >= 1):
                continue
            dp = devices // tp // cp // pp
            experts = expert_sizes(shape, dp * cp * tp, tp) if layouts.mixes_experts or pp * tp == 1 else [1]
            for ep, is_sharded in product(experts, layouts.sharded if dp * cp > 1 else (False,)):
                if is_sharded and ep > 1 and not layouts.mixes_experts:
                    continue
                yield Grid(dp=dp, pp=pp, tp=tp, cp=cp, ep=ep, is_sharded=is_sharded)


def cuts_model(shape: ModelShape, layouts: Layouts) -> bool:
    """Return whether tensor parallelism may cut this model."""
    is_whole = shape.keeps_attention and not layouts.splits_own_attention
    return not is_whole and (layouts.cuts_experts or not shape.is_mixture)


def expert_sizes(shape: ModelShape, devices: int, tp: int) -> list[int]:
    """Return sizes of ep: 1, and divisors of the experts and of a stage's devices that are at least tp."""
    if not shape.is_mixture:
        return [1]
    return [1, *(ep for ep in divisors(devices) if ep > 1 and ep >= tp and shape.experts % ep == 0)]


def copy_sizes(shape: ModelShape, devices: int, per_machine: int, layouts: Layouts) -> list[int]:
    """Return possible sizes of a generation copy on these devices: divisors that divide the heads.

    Devices divide the key-value heads, or hold copies of one each. A copy is an equal part of a machine; with
    ``any_copy`` it may have several whole machines.
    """
    if not cuts_model(shape, layouts):
        return [1]
    if not layouts.any_copy:
        return [tp for tp in divisors(devices) if cuts_heads(shape, tp) and per_machine % tp == 0]
    return [
        tp
        for tp in divisors(devices)
        if shape.heads % tp == 0
        and tp <= _LARGEST_COPY
        and (bool(shape.latent) or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
        and (per_machine % tp == 0 or tp % per_machine == 0)
    ]


def copy_sizes_of(shape: ModelShape, grid: Grid, per_machine: int, layouts: Layouts) -> list[int]:
    """Return possible sizes of a generation copy on the devices of a training grid.

    Rillflow's copy lies within a tensor-parallel group, or on any ranks of a model that only FSDP shards.
    """
    if layouts.any_copy:
        return copy_sizes(shape, grid.devices, per_machine, layouts)
    within = grid.dp if grid.is_sharded and grid.pp == grid.tp == 1 else grid.tp
    return copy_sizes(shape, within, per_machine, layouts)


def undominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of Pareto-optimal rows of [points, costs]; of equal rows, the first."""
    rows, first = np.unique(costs, axis=0, return_index=True)
    no_worse = (rows[:, None] >= rows).all(axis=2).sum(axis=1)
    return np.sort(first[no_worse == 1])  # rows for which only the row itself is no worse


def copies_of(grid: Grid) -> Numbers:
    """Return the number of devices that compute gradients of the same parameters: dp x cp."""
    return grid.dp * grid.cp


def dense_cuts(grid: Grid) -> Numbers:
    """Return the number of shards of a stage's parameters outside experts."""
    return grid.tp * np.where(grid.is_sharded, copies_of(grid), 1.0)


def expert_ways(grid: Grid) -> Numbers:
    """Return how many devices of a stage have different slices of the experts: ep, or tp without ep."""
    return np.where(np.greater(grid.ep, 1), grid.ep, grid.tp)


def expert_cuts(grid: Grid) -> Numbers:
    """Return the number of shards of the experts' parameters of a stage."""
    return np.where(grid.is_sharded, copies_of(grid) * grid.tp, expert_ways(grid))


def dp_stride(grid: Grid) -> Numbers:
    """Return the distance between ranks that differ only in dp.

    For mixtures of experts, pp is the outermost axis.
    """
    return np.where(np.greater(grid.ep, 1), grid.tp, grid.tp * grid.pp)


def grids_of(*grids: Grid) -> Grid:
    """Combine several grids into one grid of arrays."""
    return Grid(**{axis: np.array([vars(one)[axis] for one in grids]) for axis in vars(Grid())})


@dataclass(frozen=True, kw_only=True)
class Option:
    """A grid for one unit with its cost, in bytes of the fullest device; arrays for several grids at once."""

    grid: Grid
    """Grid of the devices that share the model in training and scoring."""
    generate_tp: int
    """Devices that share one copy during generation; 0 for a unit that does not generate."""
    seconds: Mapping[int, float]
    """Seconds by stage, except for stages that generate."""
    resident_bytes: float
    """Bytes of weights, gradients and optimiser state, kept from step to step."""
    working_bytes: float
    """Largest additional bytes of a stage, without the KV cache."""
    sampling_bytes: float
    """Additional bytes of the copy for generation."""

    @property
    def bytes(self) -> float:
        """Sum of all bytes."""
        return self.resident_bytes + self.working_bytes + self.sampling_bytes
