"""Meshes: check that a recipe's grids fit its pools, and that a model can be sharded over them.

    pools, train, generate ─ impossible ─> every contradiction, with its arithmetic
    heads, layers          ─ unfit ──────> grids that cannot shard the model

Imports nothing heavy; ``rillflow check`` reports it before anything runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rillflow.errors import ClusterError, ConfigError, PlacementError, nearest
from rillflow.placement.mesh import Mesh, divisors, require_whole_beside_experts
from rillflow.workers.config import GENERATE_AXES, SAMPLER, TRAIN_AXES, MeshSizes, PlacementConfig


def impossible(placement: PlacementConfig, roles: list[str]) -> Iterator[ConfigError]:
    """Yield contradictions in the meshes of these roles; pools and roles are already checked."""
    wrong = [*_wrong_axes("rollout_parallel", placement.rollout_parallel, GENERATE_AXES)]
    for key, axes in placement.train_parallel.items():
        wrong += _wrong_key(placement, roles, key)
        wrong += _wrong_axes(f"train_parallel.{key}", axes, TRAIN_AXES)
    if placement.sequence_parallel and all(placement.mesh_of(role).tp == 1 for role in roles):
        wrong.append(
            ConfigError(
                "placement.sequence_parallel is true and no model is trained with tp above 1",
                why="sequence parallelism shards tokens over the ranks of tp",
                fix="set tp in placement.train_parallel, or remove placement.sequence_parallel",
            )
        )
    yield from wrong
    if wrong:
        return
    found = {(placement.pool_of(role), placement.grid_key(role)): role for role in reversed(roles)}
    for role in reversed(found.values()):
        yield from _filled(placement, role)
    if "policy" in roles:
        yield from _regrouped(placement)


def _wrong_key(placement: PlacementConfig, roles: Sequence[str], key: str) -> Iterator[ConfigError]:
    if key not in placement.pools and key not in roles:
        yield ConfigError(
            f"placement.train_parallel names {key!r}, which is neither a pool nor a model",
            why=f"the pools are {', '.join(placement.pools)}, the models {', '.join(roles)}",
            fix=nearest(key, (*placement.pools, *roles)),
        )


def _wrong_axes(where: str, axes: Mapping[str, int], known: Sequence[str]) -> Iterator[ConfigError]:
    for axis, size in axes.items():
        if axis not in known:
            yield ConfigError(
                f"placement.{where} has an unknown axis {axis!r}",
                why=f"the axes are {', '.join(known)}",
                fix=nearest(axis, known),
            )
        elif size < 1:
            yield ConfigError(
                f"placement.{where}.{axis} is {size}",
                why="an axis is at least 1",
                fix="set it to 1, or remove it",
            )


def _filled(placement: PlacementConfig, role: str) -> Iterator[ConfigError]:
    mesh, key = placement.mesh_of(role), placement.grid_key(role)
    size = placement.pools[placement.pool_of(role)]
    try:
        require_whole_beside_experts(
            f"placement.train_parallel.{key} is {mesh}", ep=mesh.ep, fsdp=mesh.fsdp, pp=mesh.pp, tp=mesh.tp
        )
    except PlacementError as error:
        yield ConfigError(error.what, why=error.why, fix=error.fix)
        return
    if mesh.ranks != size:
        yield ConfigError(
            f"placement.train_parallel.{key} is {mesh} = {mesh.ranks} ranks and the pool has {size}",
            why=f"every rank takes one place in the grid; {size} / ({mesh.pp} x {mesh.tp}) is "
            f"{size / (mesh.pp * mesh.tp):g}",
            fix="change the pool's size or an axis; without dp, the remaining ranks become dp",
        )
    elif placement.is_inline and not mesh.is_plain:
        yield _in_one_process(f"placement.train_parallel.{key} is {mesh}")


def _regrouped(placement: PlacementConfig) -> Iterator[ConfigError]:
    mesh, tp = placement.mesh_of("policy"), placement.generate_tp
    if placement.samples_apart:
        yield from _apart(placement)
    elif mesh.is_sharded and mesh.pp == mesh.tp == 1:
        if mesh.dp % tp:
            yield ConfigError(
                f"placement.rollout_parallel.tp is {tp} and the policy is trained with {mesh}",
                why=f"each tp group shares a copy of the weights for sampling; {mesh.dp} / {tp} leaves "
                f"{mesh.dp % tp}",
                fix=f"choose placement.rollout_parallel.tp among {', '.join(map(str, divisors(mesh.dp)))}",
            )
    elif mesh.tp % tp:
        yield ConfigError(
            f"placement.rollout_parallel.tp is {tp} and the policy is trained with tp {mesh.tp}",
            why="a rank's training shard must lie inside its sampling shard, so sampling tp must divide "
            f"training tp; {mesh.tp} / {tp} leaves {mesh.tp % tp}",
            fix=f"choose placement.rollout_parallel.tp among {', '.join(map(str, divisors(mesh.tp)))}",
        )


def require_near(role: str, pool: str, mesh: Mesh, nodes: Mapping[int, str]) -> None:
    """Refuse a tensor-parallel group that spans nodes.

    Args:
        role: the role on these ranks.
        pool: its pool.
        mesh: its grid.
        nodes: node of each rank; empty if all ranks are on one machine.

    Raises:
        ClusterError: a tensor-parallel group spans two nodes.
    """
    for group in mesh.groups("tp") if nodes and "tp" in mesh.names else ():
        on = dict.fromkeys(nodes[rank] for rank in group)
        if len(on) > 1:
            there = Counter(nodes.values())
            raise ClusterError(
                f"the tp of {role} crosses nodes: {_ranks(group)} of pool {pool!r} are on {', '.join(on)}",
                why="ranks of one tp group exchange activations in every layer; the pool has "
                + ", ".join(f"{count} on {node}" for node, count in there.items()),
                fix="choose a pool and a tp that fill nodes evenly, or set placement.tp_across_nodes = true",
            )


def _ranks(group: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, group))}"


def _apart(placement: PlacementConfig) -> Iterator[ConfigError]:
    """Yield errors about a sampler's own pool that placement.rollout_parallel.tp cannot divide."""
    pool, tp = placement.pool_of(SAMPLER), placement.generate_tp
    size = placement.pools[pool]
    if size % tp:
        yield ConfigError(
            f"placement.rollout_parallel.tp is {tp} and the sampler's pool {pool} has {size} ranks",
            why=f"each tp group shares a copy of the weights; {size} / {tp} leaves {size % tp}",
            fix=f"choose placement.rollout_parallel.tp among {', '.join(map(str, divisors(size)))}",
        )
    elif tp > 1 and placement.is_inline:
        yield _in_one_process(f"placement.rollout_parallel.tp is {tp}")


def _in_one_process(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, and the run has only one process",
        why="parameters are sharded over ranks, and every rank is a separate process",
        fix='set placement.backend = "ray" or "process"',
    )


def unfit(mesh: MeshSizes, generate_tp: int, heads: int, kv_heads: int, layers: int) -> Iterator[ConfigError]:
    """Yield errors about grids that cannot shard a model of these sizes."""
    fitting = divisors(heads, kv_heads)
    for where, tp in (("train_parallel", mesh.tp), ("rollout_parallel", generate_tp)):
        odd = [(kind, count) for kind, count in (("attention", heads), ("key/value", kv_heads)) if count % tp]
        if odd:
            kind, count = odd[0]
            yield ConfigError(
                f"tp is {tp} in placement.{where} and the model has {count} {kind} heads",
                why=f"every rank needs the same number of heads; {count} / {tp} leaves {count % tp}",
                fix=f"choose tp among {', '.join(map(str, fitting))}",
            )
    if mesh.pp > layers:
        yield ConfigError(
            f"pp is {mesh.pp} in placement.train_parallel and the model has {layers} layers",
            why="every pipeline stage needs at least one layer",
            fix=f"set pp to at most {layers}",
        )
