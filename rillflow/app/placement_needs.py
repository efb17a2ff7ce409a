"""Placement needs: contradictions between pools, grids and devices.

    Resolved ─┬─ pool_needs ─────────> pools without ranks or roles, roles that are not there
              ├─ mesh_needs ─────────> grids that do not fill their pools, or cannot shard a new model
              └─ device_needs ───────> a device that ranks on Ray cannot have

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator

from rillflow.app.contradictions import Contradiction
from rillflow.app.meshes import impossible, unfit
from rillflow.app.resolved import Resolved
from rillflow.app.role_table import Start
from rillflow.app.schedule_needs import devices_for
from rillflow.errors import ConfigError, nearest


def device_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield a contradiction of a numbered device and ranks that are processes."""
    placement, device = resolved.recipe.placement, resolved.recipe.run.device
    if ":" in device and not placement.is_inline:
        yield Contradiction(
            f"run.device is {device}, and the pools have {sum(placement.pools.values())} ranks on Ray",
            why="Ray assigns every rank its own device and hides the others",
            fix='set run.device = "cuda"; CUDA_VISIBLE_DEVICES selects the devices that Ray may assign',
        )


def pool_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of empty or unused pools, and of roles that are unknown or on unknown pools."""
    placement, there, known = resolved.recipe.placement, [*resolved.roles], True
    for name, size in placement.pools.items():
        if size < 1:
            yield Contradiction(
                f"placement.pools.{name} is {size}",
                why="a pool needs at least one rank",
                fix="set it to 1",
            )
    for role, pool in placement.roles.items():
        if pool not in placement.pools:
            known = False
            yield Contradiction(
                f"placement.roles.{role} is {pool!r}",
                why=f"the pools are {', '.join(placement.pools)}",
                fix=nearest(pool, placement.pools),
            )
        if role not in there:
            known = False
            yield Contradiction(
                f"placement.roles has {role!r}, and the run has no such role",
                why=f"{resolved.recipe.algorithm.name} with these settings has {', '.join(there)}",
                fix=nearest(role, there),
            )
    used = {placement.pool_of(role) for role in there}
    for name in placement.pools if known else ():
        if name not in used:
            yield Contradiction(
                f"placement.pools.{name} has no role",
                why=f"the roles {', '.join(there)} are on {', '.join(sorted(used))}; "
                "roles without an entry are on the first pool",
                fix=f'write placement.roles = {{ ROLE = "{name}" }}, or remove the pool',
            )


def mesh_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of grids that do not fit their pools, or that cannot shard a new model."""
    placement, new = resolved.recipe.placement, resolved.recipe.policy.model.new
    problems = [*impossible(placement, resolved.models())]
    if new is not None and not problems:
        mesh = placement.mesh_of(resolved.trained_role)
        problems += unfit(mesh, placement.generate_tp, new.heads, new.kv_heads, new.layers)
    yield from map(Contradiction.of, problems)


def require_devices(resolved: Resolved) -> None:
    """Refuse pools with more ranks than this machine has CUDA devices; functions that score take none.

    Raises:
        ConfigError: the message has both numbers.
    """
    placement, there = resolved.recipe.placement, devices_for(resolved.recipe)
    taking = {
        placement.pool_of(role) for role, spec in resolved.roles.items() if spec.start is not Start.FUNCTIONS
    }
    wanted = sum(size for name, size in placement.pools.items() if name in taking)
    if there and wanted > there and not placement.is_inline:
        raise ConfigError(
            f"the pools {', '.join(sorted(taking))} have {wanted} ranks, and this machine has {there} CUDA "
            f"device{'s' if there > 1 else ''}",
            why="every rank that is a process takes a device of its own",
            fix='set placement.backend = "inline", where all ranks share one device, or run.device = "cpu"; '
            'or use fewer ranks (schedule.mode = "in_order" needs one)',
        )
