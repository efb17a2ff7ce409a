"""Default pools: give the sampler ranks of its own if it works beside the trainer and no pools are named.

    a recipe that names placement.pools or placement.roles ─> its own
    freshness above 0, or ready first ──────────────────────> main, answers: the sampler is on answers
    ready first ────────────────────────────────────────────> and scores: reward and cost functions
    a resumed run ──────────────────────────────────────────> the pools it began with (``resume``)

Trainer and sampler share this machine's CUDA devices evenly. Without a device, in one process and on a
cluster that is joined, each has one rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rillflow.algorithms.config import AlgorithmConfig, SampledConfig, is_ready_first
from rillflow.app.role_table import Start, roles_of
from rillflow.config.toml_text import inline_text
from rillflow.errors import ConfigError
from rillflow.workers.config import SAMPLER, PlacementConfig

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe

TRAINED, ANSWERS, SCORES = "main", "answers", "scores"
"""Names of the pools: training, generation, reward and cost functions."""
_SCORERS = ("reward", "cost")


def with_pools(recipe: Recipe) -> Recipe:
    """Return the recipe with pools for a sampler that runs ahead, if it names none itself."""
    config, placement = recipe.algorithm, recipe.placement
    if not (_is_beside(config) and recipe.has_policy) or not has_default_pools(placement):
        return recipe
    specs = roles_of(recipe)
    scorers = [role for role in _SCORERS if role in specs and specs[role].start is Start.FUNCTIONS]
    pools = pools_for(_devices(recipe), scorers=scorers if is_ready_first(config) else ())
    return on_pools(recipe, pools)


def pools_for(devices: int, *, scorers: Sequence[str] = ()) -> PlacementConfig:
    """Return pools for a sampler that runs ahead.

    Args:
        devices: number of devices that trainer and sampler share; with fewer than 2, each has one rank.
        scorers: roles that take no device and get a third pool.
    """
    pools = {TRAINED: max(1, devices - devices // 2), ANSWERS: max(1, devices // 2)}
    roles = {SAMPLER: ANSWERS, **dict.fromkeys(scorers, SCORES)}
    return PlacementConfig(pools={**pools, **({SCORES: 1} if scorers else {})}, roles=roles)


def pool_notes(recipe: Recipe) -> list[str]:
    """Return a note on each choice of pools that the recipe leaves open, and how to override it."""
    placement, config = recipe.placement, recipe.algorithm
    if not has_default_pools(placement) or not isinstance(config, SampledConfig) or not _is_beside(config):
        return []
    ranks = {name: size for name, size in placement.pools.items() if name != SCORES}
    devices = sum(ranks.values())
    shared = f"; trainer and sampler share {devices} devices" if devices > len(ranks) else ""
    said = f"algorithm.freshness is {config.freshness}"
    if not config.freshness:
        said = 'algorithm.async_mode is "ready_first"'
    notes = [
        f"{said}, so the sampler has a pool of its own: "
        f"placement.pools = {inline_text(placement.pools)}, placement.roles = "
        f"{inline_text(placement.roles)}{shared}. Set both to choose other pools"
    ]
    if SCORES in placement.pools:
        scored = " and ".join(role for role, pool in placement.roles.items() if pool == SCORES)
        notes.append(
            f'algorithm.async_mode is "ready_first", so the functions of {scored} have the pool {SCORES}: '
            "scores do not wait for updates. To score on the trainer's ranks, set placement.pools = "
            f"{inline_text(ranks)}, placement.roles = {inline_text({SAMPLER: placement.pool_of(SAMPLER)})}"
        )
    return notes


def _is_beside(config: AlgorithmConfig) -> bool:
    """Return whether the sampler works while the trainer does."""
    return isinstance(config, SampledConfig) and (config.freshness > 0 or is_ready_first(config))


def has_default_pools(placement: PlacementConfig) -> bool:
    """Return whether the recipe names neither pools nor roles; a choice made here does not count as named."""
    return not placement.model_fields_set & {"pools", "roles"}


def on_pools(recipe: Recipe, chosen: PlacementConfig) -> Recipe:
    """Return the recipe on these pools; they still count as a default."""
    own = recipe.placement
    values = {**dict(own), "pools": chosen.pools, "roles": chosen.roles}
    placement = PlacementConfig.model_construct(_fields_set=set(own.model_fields_set), **values)
    return recipe.model_copy(update={"placement": placement})


def require_devices(recipe: Recipe) -> None:
    """Refuse pools with more ranks than this machine has CUDA devices; functions that score take none.

    Raises:
        ConfigError: the message has both numbers.
    """
    placement, there = recipe.placement, _devices(recipe)
    taking = {
        placement.pool_of(role)
        for role, spec in roles_of(recipe).items()
        if spec.start is not Start.FUNCTIONS
    }
    wanted = sum(size for name, size in placement.pools.items() if name in taking)
    if there and wanted > there and not placement.is_inline:
        raise ConfigError(
            f"the pools {', '.join(sorted(taking))} have {wanted} ranks, and this machine has {there} CUDA "
            f"device{'s' if there > 1 else ''}",
            why="every rank that is a process takes a device of its own",
            fix='set placement.backend = "inline", where all ranks share one device, or run.device = "cpu"; '
            "or use fewer ranks (algorithm.freshness = 0 needs one)",
        )


def _devices(recipe: Recipe) -> int:
    """Return the number of CUDA devices for Ray ranks on this machine; 0 if ranks take none of them."""
    from rillflow.app.doctor import cuda_devices

    placement = recipe.placement
    joined = placement.address or os.environ.get("RAY_ADDRESS") or "local"
    joined = "local" if placement.backend == "process" else joined
    takes = placement.backend != "inline" and joined == "local" and recipe.run.device in ("auto", "cuda")
    return (cuda_devices() or 0) if takes else 0
