"""Settings of placement: pools of devices, the roles on them, and the backend that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from rillflow.config.schema import Section
from rillflow.placement.grid import Grid
from rillflow.placement.mesh import Mesh

TRAIN_AXES = ("dp", "fsdp", "ep", "pp", "tp")
"""Parallel axes of a model in training; ``fsdp`` and ``ep`` shard parameters and experts over dp ranks."""
GENERATE_AXES = ("tp",)
"""Parallel axes of a model in generation."""
SAMPLER = "sampler"
"""The part of the policy that answers prompts."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The mesh sizes with which the ranks of a pool run a model.

    Example:
        MeshSizes(dp=2, pp=1, tp=2).ranks == 4
    """

    dp: int = 1
    """Data-parallel ranks."""
    pp: int = 1
    """Pipeline-parallel ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    fsdp: int = 1
    """Consecutive dp ranks that shard one copy of the parameters."""
    ep: int = 1
    """Consecutive dp ranks that shard one copy of a mixture's experts."""
    sequence: bool = False
    """Whether tp ranks also shard the tokens in layers that are not sharded (``sharding.tensor``)."""
    is_descending: bool = False
    """Whether the first pipeline stage is on the last rank of a replica."""

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks by dp, pp and tp."""
        mesh = Mesh.of(dp=self.dp, pp=self.pp, tp=self.tp)
        return mesh.turned("pp") if self.is_descending else mesh

    @property
    def grid(self) -> Grid:
        """The grid of a plan; sharding over some ranks of dp counts as sharding over all."""
        return Grid(dp=self.dp, pp=self.pp, tp=self.tp, ep=self.ep, is_sharded=self.fsdp > 1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def replica(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return self.fsdp * self.ep * self.pp * self.tp

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.replica == 1

    @property
    def is_sharded(self) -> bool:
        """Whether dp ranks hold different shards of some parameters."""
        return self.fsdp * self.ep > 1

    def __str__(self) -> str:
        cut = [f"{name} {size}" for name, size in (("fsdp", self.fsdp), ("ep", self.ep)) if size > 1]
        copies = self.dp // (self.fsdp * self.ep)
        rows = [f"dp {copies}"] if copies > 1 or not cut else []
        return " x ".join([*rows, *cut, f"pp {self.pp}", f"tp {self.tp}"])


class PlacementConfig(Section):
    """Pools of ranks, and the roles on them. Roles of one pool take turns; pools run in parallel."""

    renamed: ClassVar[Mapping[str, str]] = {"train": "train_parallel", "generate": "rollout_parallel"}

    backend: Literal["auto", "inline", "process", "ray"] = Field(
        "auto",
        description="inline: one process; process: one process of this machine per rank, without Ray; ray: "
        "one process per rank, on any machine; auto: ray if there are several ranks.",
    )
    address: str | None = Field(
        None,
        description="Running Ray cluster to join: host:port or auto. Left out, RAY_ADDRESS if it is set, "
        "else a new cluster.",
    )
    env: tuple[str, ...] = Field(
        (),
        description='Environment variables that ranks on Ray get from the shell of the command: ["HF_HOME"]. '
        "Other variables on a running cluster are those of ray start. Values are not recorded.",
    )
    pools: dict[str, int] = Field(
        {"main": 1}, min_length=1, description="Number of ranks of each pool, by name."
    )
    roles: dict[str, str] = Field(
        {},
        description="Pool of each role; left out, the first pool. sampler is the pool where the policy "
        "generates.",
    )
    train_parallel: dict[str, dict[str, int]] = Field(
        {},
        description="Training mesh by pool or role: sizes of dp, fsdp, ep, pp, tp; dp takes the remaining "
        "ranks.",
    )
    rollout_parallel: dict[str, int] = Field(
        {}, description="Generation mesh of the policy: tp; 1 if left out."
    )
    sequence_parallel: bool = Field(
        False,
        description="Sequence parallelism: tp ranks also split tokens in layers that are not sharded. "
        "Less memory, more communication.",
    )
    tp_across_nodes: bool = Field(
        False,
        description="Whether tensor-parallel ranks may span nodes, over slower links.",
    )
    start_s: float = Field(
        60.0,
        gt=0,
        description="Longest start of the rank processes in seconds; each rank adds 15 s.",
    )
    load_s: float = Field(
        3600.0, gt=0, description="Longest time in seconds to make a role on its ranks: to load its model."
    )
    deadline_s: float = Field(
        3600.0, gt=0, description="Longest wait for a call of any rank in seconds; then the run stops."
    )
    heartbeat_s: float = Field(
        5.0,
        ge=0,
        description="Silence in seconds after which a rank's process counts as lost: stopped or unreachable. "
        "0 turns heartbeats off.",
    )

    @property
    def is_inline(self) -> bool:
        """Whether everything runs in one process."""
        alone = sum(self.pools.values()) == 1 and self.address is None
        return self.backend == "inline" or (self.backend == "auto" and alone)

    def pool_of(self, role: str) -> str:
        """Return the pool of a role; the sampler defaults to the policy's pool."""
        first = next(iter(self.pools))
        return self.roles.get(role, self.roles.get("policy", first) if role == SAMPLER else first)

    @property
    def samples_apart(self) -> bool:
        """Whether the policy samples on other ranks than it trains on."""
        return self.pool_of(SAMPLER) != self.pool_of("policy")

    def grid_key(self, role: str) -> str:
        """Return the key of ``train`` with a role's mesh: the role's name, or the name of its pool.

        A key that is both a role and a pool means the pool.
        """
        return role if role in self.train_parallel and role not in self.pools else self.pool_of(role)

    def mesh_of(self, role: str) -> MeshSizes:
        """Return the mesh of a role in training and scoring; it fills the pool if the recipe is valid."""
        key = self.grid_key(role)
        axes = dict(self.train_parallel[key]) if key in self.train_parallel else {}
        fsdp, ep, pp, tp = (axes.pop(axis, 1) for axis in TRAIN_AXES[1:])
        left = max(1, self.pools[self.pool_of(role)] // max(1, fsdp * ep * pp * tp))
        dp = axes.pop("dp", left) * fsdp * ep
        return MeshSizes(dp=dp, fsdp=fsdp, ep=ep, pp=pp, tp=tp, sequence=self.sequence_parallel and tp > 1)

    @property
    def generate_tp(self) -> int:
        """Number of ranks that share one copy of the policy in generation."""
        return ({"tp": 1} | self.rollout_parallel)["tp"]
