"""Pools: the default ranks of a sampler that works while the trainer does, and notes on them."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.config.toml_text import inline_text
from rillflow.workers.config import SAMPLER, PlacementConfig

TRAINED, ANSWERS, SCORES = "main", "answers", "scores"
"""Names of the pools: training, generation, reward and cost functions."""


def pools_for(devices: int, *, scorers: Sequence[str] = ()) -> PlacementConfig:
    """Return pools for a sampler that runs ahead.

    Args:
        devices: number of devices that trainer and sampler share; with fewer than 2, each has one rank.
        scorers: roles that take no device and get a third pool.
    """
    pools = {TRAINED: max(1, devices - devices // 2), ANSWERS: max(1, devices // 2)}
    roles = {SAMPLER: ANSWERS, **dict.fromkeys(scorers, SCORES)}
    return PlacementConfig(pools={**pools, **({SCORES: 1} if scorers else {})}, roles=roles)


def own_pool_note(said: str, placement: PlacementConfig) -> str:
    """Return a note on the sampler's own pool; ``said`` is the setting that chose it."""
    ranks = {name: size for name, size in placement.pools.items() if name != SCORES}
    devices = sum(ranks.values())
    shared = f"; trainer and sampler share {devices} devices" if devices > len(ranks) else ""
    return (
        f"{said}, so the sampler has a pool of its own: "
        f"placement.pools = {inline_text(placement.pools)}, placement.roles = "
        f"{inline_text(placement.roles)}{shared}. Set both to choose other pools"
    )


def scores_note(said: str, placement: PlacementConfig) -> str:
    """Return a note on the pool of functions; ``said`` is the setting that chose it."""
    ranks = {name: size for name, size in placement.pools.items() if name != SCORES}
    scored = " and ".join(role for role, pool in placement.roles.items() if pool == SCORES)
    return (
        f"{said}, so the functions of {scored} have the pool {SCORES}: "
        "scores do not wait for updates. To score on the trainer's ranks, set placement.pools = "
        f"{inline_text(ranks)}, placement.roles = {inline_text({SAMPLER: placement.pool_of(SAMPLER)})}"
    )
