"""Settings of placement: which roles are on which devices, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rillflow.config.section import Section
from rillflow.placement.mesh import Mesh

TRAIN_AXES = ("dp", "fsdp", "ep", "pp", "tp")
"""How ranks may share a model in training; ``fsdp``, ``ep``: over these parameters, or experts, are cut."""
GENERATE_AXES = ("tp",)
"""How they may share it while they generate."""
SAMPLER = "sampler"
"""The half of the policy that answers prompts."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The grid in which the ranks of a pool run a model.

    Example:
        MeshSizes(dp=2, pp=1, tp=2).ranks == 4
    """

    dp: int = 1
    """Ranks that have other rows."""
    pp: int = 1
    """Ranks that have other layers."""
    tp: int = 1
    """Ranks that have other parts of every layer."""
    fsdp: int = 1
    """How many ranks of dp that follow one another share one copy of the parameters, cut over them."""
    ep: int = 1
    """How many ranks of dp that follow one another share one copy of a mixture's experts."""
    sequence: bool = False
    """Whether ranks of tp keep a share of the tokens each where a layer is whole (``parallel.sequence``)."""

    @property
    def mesh(self) -> Mesh:
        """Its ranks by dp, pp and tp."""
        return Mesh.of(dp=self.dp, pp=self.pp, tp=self.tp)

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.dp * self.pp * self.tp

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.pp * self.tp * self.fsdp * self.ep == 1

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of dp hold other slices of some parameters."""
        return self.fsdp * self.ep > 1

    def __str__(self) -> str:
        cut = [f"{name} {size}" for name, size in (("fsdp", self.fsdp), ("ep", self.ep)) if size > 1]
        copies = self.dp // (self.fsdp * self.ep)
        rows = [f"dp {copies}"] if copies > 1 or not cut else []
        return " x ".join([*rows, *cut, f"pp {self.pp}", f"tp {self.tp}"])


class PlacementConfig(Section):
    """Pools of ranks, and the roles on them. Roles of one pool take turns; pools run side by side."""

    backend: Literal["auto", "inline", "ray"] = Field(
        "auto",
        description="inline: one process; ray: one process per rank; auto: ray if there are several ranks.",
    )
    address: str | None = Field(
        None,
        description="Running Ray cluster to join: host:port or auto. Left out, RAY_ADDRESS if it is set, "
        "else a new cluster.",
    )
    pools: dict[str, int] = Field(
        {"main": 1}, min_length=1, description="Number of ranks of each pool, by name."
    )
    roles: dict[str, str] = Field(
        {},
        description="Pool of each role; left out, the first pool. sampler is the pool where the policy "
        "generates.",
    )
    train: dict[str, dict[str, int]] = Field(
        {},
        description="Training mesh by pool or role: sizes of dp, fsdp, ep, pp, tp; dp takes the remaining "
        "ranks.",
    )
    generate: dict[str, int] = Field({}, description="Generation mesh of the policy: tp; 1 if left out.")
    sequence_parallel: bool = Field(
        False,
        description="Sequence parallelism: tp ranks also split tokens in layers that are not sharded. "
        "Less memory, more communication.",
    )
    tp_across_nodes: bool = Field(
        False,
        description="Whether tensor-parallel ranks may span nodes, over slower links.",
    )
    deadline_s: float = Field(
        3600.0, gt=0, description="Longest wait for any rank in seconds; then the run stops."
    )

    @property
    def is_inline(self) -> bool:
        """Whether everything runs in one process."""
        alone = sum(self.pools.values()) == 1 and self.address is None
        return self.backend == "inline" or (self.backend == "auto" and alone)

    def pool_of(self, role: str) -> str:
        """The pool a role is on; the sampler's, where nothing is said, is the policy's."""
        first = next(iter(self.pools))
        return self.roles.get(role, self.roles.get("policy", first) if role == SAMPLER else first)

    @property
    def samples_apart(self) -> bool:
        """Whether the policy answers on ranks of their own, and not on those that train it."""
        return self.pool_of(SAMPLER) != self.pool_of("policy")

    def grid_key(self, role: str) -> str:
        """Where ``train`` says a role's grid: under its name or its pool's; a pool's name comes first."""
        return role if role in self.train and role not in self.pools else self.pool_of(role)

    def mesh_of(self, role: str) -> MeshSizes:
        """The grid of a role's ranks while they train or score; it fills the pool if the recipe is sound."""
        key = self.grid_key(role)
        axes = dict(self.train[key]) if key in self.train else {}
        fsdp, ep, pp, tp = (axes.pop(axis, 1) for axis in TRAIN_AXES[1:])
        left = max(1, self.pools[self.pool_of(role)] // max(1, fsdp * ep * pp * tp))
        dp = axes.pop("dp", left) * fsdp * ep
        return MeshSizes(dp=dp, fsdp=fsdp, ep=ep, pp=pp, tp=tp, sequence=self.sequence_parallel and tp > 1)

    @property
    def generate_tp(self) -> int:
        """Ranks that share one copy of the policy while they generate."""
        return ({"tp": 1} | self.generate)["tp"]
