"""Transfers: fields of rows between pools, weights from training to generation.

in place   tp x pp ─ all-gather in each micro-dp group ─> generate_tp     only what is missing
apart      training pool ─ broadcast ─> every replica of the sampler
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rillflow.planner.cost_model.compute import Setting
from rillflow.planner.cost_model.generation import Decoder
from rillflow.planner.cost_model.links import Links, all_gather_s
from rillflow.planner.grid import Grid, Numbers, Option
from rillflow.planner.plan import PlannedPool
from rillflow.planner.problem import Unit
from rillflow.planner.workload import Workload

TOKEN_BYTES = 8
"""Of a token's id."""
NUMBER_BYTES = 4
"""Of a number per token or row."""
ROW_FIELDS = frozenset({"rewards", "costs", "valid", "outcome", "finish", "limits", "versions", "varied"})
"""Fields with one number a row."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A unit on its pool."""

    unit: Unit
    """The model and its stages."""
    pool: PlannedPool
    """Where it lies."""
    option: Option
    """How, and what it costs there."""
    decoder: Decoder | None = None
    """A replica of it; none of a unit that does not generate."""


def field_bytes(workload: Workload, field: str) -> float:
    """Bytes of one field of one row, ragged: nothing is padded on the way."""
    if field in ROW_FIELDS:
        return NUMBER_BYTES
    return (TOKEN_BYTES if field == "tokens" else NUMBER_BYTES) * workload.row_tokens


def rows_s(
    workload: Workload, fields: tuple[str, ...], source: Seat, destination: Seat, rate: float
) -> float:
    """Seconds of rows from each dp rank of one pool to those of another.

    ``T / (min(dp, dp') rate)``: as many pairs as the smaller side has ranks send at once; the copies within
    a replica follow inside the pool and are not counted.
    """
    total = workload.rows * sum(field_bytes(workload, field) for field in fields)
    ranks: int = min(source.option.grid.dp, destination.option.grid.dp)
    return total / (ranks * rate)


def received_in_place(total_bytes: Numbers, grids: Grid, generate_tp: Numbers) -> Numbers:
    """Bytes each rank receives to generate on the devices it trains on, (t p - t_g p_g) / (t_g p_g t p) M.

    HybridFlow, arXiv 2409.19256, table 2, with p_g = 1: what it trains lies in what it generates with, so
    that only the rest comes. Parameters cut over dp as well: ``M / t_g - M / (t p d)``.
    """
    return np.maximum(np.divide(total_bytes, generate_tp) - total_bytes / grids.dense_cuts, 0.0)


def in_place_s(setting: Setting, grids: Grid, generate_tp: Numbers) -> Numbers:
    """Seconds from the training grid to the generation grid on the same devices, [grids].

    One all-gather among the t p / t_g ranks of a micro-dp group, and over dp where parameters are cut there.
    """
    total = setting.shape.parameters * setting.item_bytes
    if setting.factors.refit:
        return total / setting.factors.refit
    ways = np.maximum(grids.dense_cuts / generate_tp, 1.0)
    missing = received_in_place(total, grids, generate_tp)
    gathered = np.where(ways > 1, missing * ways / np.maximum(ways - 1, 1e-9), 0.0)
    return all_gather_s(setting.links, gathered, ways)


def apart_s(setting: Setting, links: Links, source: Seat, destination: Seat) -> float:
    """Seconds of the weights from a training pool to a sampler's devices.

    Every sampling device takes ``M / t_g``; every part leaves the training pool once and replicas hand it on
    (a pipelined broadcast), from as many devices as hold different parts: the slower side counts.
    """
    total = setting.shape.parameters * setting.item_bytes
    if setting.factors.refit_apart:
        return total / setting.factors.refit_apart
    grid, pools = source.option.grid, (source.pool, destination.pool)
    senders: int = grid.pp * grid.tp * grid.dp if grid.is_sharded else grid.pp * grid.tp
    is_near = sum(pool.devices for pool in pools) <= links.per_machine
    rate = links.inside if is_near and pools[0].fleet == pools[1].fleet else links.between
    taken_s = total / max(destination.option.generate_tp, 1) / rate
    sent_s = total / min(senders, source.pool.devices) / rate
    return max(taken_s, sent_s) + links.between_s
