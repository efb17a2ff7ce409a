"""Transfers: send fields of rows between pools, and weights from training to generation.

colocated  tp x pp ─ all-gather in each micro-dp group ─> generate_tp     only missing shards
separate   training pool ─ broadcast ─> every replica of the sampler
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rillflow.placement.grid import Grid, Numbers
from rillflow.placement.plan import PlannedPool
from rillflow_planner.cost_model.compute import Setting
from rillflow_planner.cost_model.generation import Decoder
from rillflow_planner.cost_model.links import Links, all_gather_s
from rillflow_planner.cost_model.options import Option, dense_cuts
from rillflow_planner.problem import Unit
from rillflow_planner.workload import Workload

TOKEN_BYTES = 8
"""Bytes of a token id."""
NUMBER_BYTES = 4
"""Bytes of a number per token or row."""
ROW_FIELDS = frozenset({"rewards", "costs", "valid", "outcome", "finish", "limits", "versions", "varied"})
"""Fields with one number per row."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A unit placed on its pool."""

    unit: Unit
    """The model and its stages."""
    pool: PlannedPool
    """Pool of the unit."""
    option: Option
    """Grid of the unit and its cost."""
    decoder: Decoder | None = None
    """A replica of the unit; None for a unit that does not generate."""


def field_bytes(workload: Workload, field: str) -> float:
    """Return the bytes of one field of one row; rows are ragged, without padding."""
    if field in ROW_FIELDS:
        return NUMBER_BYTES
    return (TOKEN_BYTES if field == "tokens" else NUMBER_BYTES) * workload.row_tokens


def rows_s(
    workload: Workload, fields: tuple[str, ...], source: Seat, destination: Seat, rate: float
) -> float:
    """Return the seconds to send rows from the dp ranks of one pool to those of another.

    ``T / (min(dp, dp') rate)``: the smaller side's number of ranks sends in parallel. Copies within a replica
    are made inside the pool and are not counted. Source: OneFlow's split to split, arXiv 2110.15032.
    """
    total = workload.rows * sum(field_bytes(workload, field) for field in fields)
    ranks: int = min(source.option.grid.dp, destination.option.grid.dp)
    return total / (ranks * rate)


def received_in_place(total_bytes: Numbers, grids: Grid, generate_tp: Numbers) -> Numbers:
    """Return the bytes each rank receives for colocated generation, (t p - t_g p_g) / (t_g p_g t p) M.

    HybridFlow, arXiv 2409.19256, table 2, with p_g = 1: a rank's training shard lies within its generation
    shard, so only the rest is sent. With parameters also sharded over dp: ``M / t_g - M / (t p d)``.
    """
    held = total_bytes / (grids.pp * dense_cuts(grids))
    return np.maximum(np.divide(total_bytes, generate_tp) - held, 0.0)


def in_place_s(setting: Setting, grids: Grid, generate_tp: Numbers) -> Numbers:
    """Return the seconds from the training grid to the generation grid on the same devices, [grids].

    One all-gather among the t p / t_g ranks of a micro-dp group, and over dp if parameters are sharded there.
    """
    total = setting.shape.parameters * setting.item_bytes
    if setting.problem.refits and setting.factors.refit:
        return total / setting.factors.refit
    ways = np.maximum(grids.pp * dense_cuts(grids) / generate_tp, 1.0)
    missing = received_in_place(total, grids, generate_tp)
    gathered = np.where(ways > 1, missing * ways / np.maximum(ways - 1, 1e-9), 0.0)
    return all_gather_s(setting.links, gathered, ways)


def apart_s(setting: Setting, links: Links, source: Seat, destination: Seat) -> float:
    """Return the seconds to send the weights from a training pool to a sampler's devices.

    Every sampling device receives ``M / t_g``. Every shard leaves the training pool once, and replicas
    forward it (a pipelined broadcast). As many devices send as hold different shards. The slower side
    determines the time.
    """
    total = setting.shape.parameters * setting.item_bytes
    if setting.problem.refits and setting.factors.refit_separate:
        return total / setting.factors.refit_separate
    grid, pools = source.option.grid, (source.pool, destination.pool)
    senders: int = grid.pp * grid.tp * grid.dp if grid.is_sharded else grid.pp * grid.tp
    is_near = sum(pool.devices for pool in pools) <= links.per_machine
    rate = links.inside if is_near and pools[0].machine_type == pools[1].machine_type else links.between
    taken_s = total / max(destination.option.generate_tp, 1) / rate
    sent_s = total / min(senders, source.pool.devices) / rate
    return max(taken_s, sent_s) + links.between_s
