"""Ray's resources: whether the pools fit into the cluster, and the wait for room in a full one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rillflow.errors import ClusterError
from rillflow.workers.backend import Pool

logger = logging.getLogger(__name__)

WAITING_S = 5.0
"""Seconds between two messages about a pool that waits for room."""
_KINDS = ("CPU", "GPU")


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the nodes that are up."""
    return [node for node in ray.nodes() if node["Alive"]]


def require_fit(pools: Sequence[Pool], devices: Mapping[str, str]) -> None:
    """Refuse pools that need more than all nodes together have.

    Args:
        pools: the pools.
        devices: device type of each pool, by name.

    Raises:
        ClusterError: CPUs or accelerators are missing; the message lists those of every node.
    """
    there = alive_nodes()
    for kind in _KINDS:
        taking = [pool for pool in pools if kind == "CPU" or devices[pool.name] != "cpu"]
        wanted = sum(pool.size for pool in taking)
        has = sum(node["Resources"].get(kind, 0) for node in there)
        if wanted <= has:
            continue
        pool_list = ", ".join(f"{pool.name} {pool.size}" for pool in taking)
        up = {node["NodeManagerAddress"] for node in there}
        left = sorted({node["NodeManagerAddress"] for node in ray.nodes()} - up)
        gone = f"; nodes that have left: {', '.join(left)}" if left else ""
        again = "start Ray again on the nodes that have left, " if left else ""
        raise ClusterError(
            f"the pools ({pool_list}) need {wanted} {kind}s, but the cluster has {has:g}",
            why=f"{wanted - has:g} are missing, because every rank takes 1; {_listed(there)}{gone}",
            fix=f"{again}make a pool smaller, let roles share one, or add machines to the cluster",
        )


def await_room(
    group: Any, pool: Pool, pools: Sequence[Pool], devices: Mapping[str, str], start_s: float
) -> None:
    """Wait until Ray has scheduled a pool, and log what it waits for.

    Args:
        group: Ray's placement group of the pool.
        pool: the pool.
        pools: all pools of the run.
        devices: device type of each pool, by name.
        start_s: longest wait in seconds.

    Raises:
        ClusterError: there is no room in time, or nodes have left.
    """
    until, kind = time.monotonic() + start_s, "CPU" if devices[pool.name] == "cpu" else "GPU"
    wants = f"{pool.size} free {kind}{'s' if pool.size > 1 else ''}"
    while not group.wait(max(0.0, min(WAITING_S, until - time.monotonic()))):
        require_fit(pools, devices)
        left_s, free = until - time.monotonic(), _free()
        if left_s <= 0:
            raise ClusterError(
                f"pool {pool.name!r} has waited {start_s:g} s for {wants} in the cluster",
                why=f"free now: {free}; other programs have the rest, or a node that was lost less than a "
                "minute ago",
                fix="wait for the other programs, or stop them; make the pool smaller, or raise "
                "placement.start_s; ray status on a node shows what is taken",
            )
        logger.warning(
            "pool %r waits for %s in the cluster, at most %.0f s more; free now: %s",
            *(pool.name, wants, left_s, free),
        )


def _free() -> str:
    """Return the free resources of every node as text."""
    free = ray._private.state.available_resources_per_node()
    return _listed([{**node, "Resources": free.get(node["NodeID"], {})} for node in alive_nodes()])


def _listed(there: Sequence[Mapping[str, Any]]) -> str:
    """Return the resources of nodes as text."""
    return "; ".join(
        f"node {node['NodeManagerAddress']}: "
        + ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}s" for kind in _KINDS)
        for node in sorted(there, key=lambda node: str(node["NodeManagerAddress"]))
    )
