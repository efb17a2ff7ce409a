"""Settings of placement: which roles are on which devices, and what runs them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.section import Section


class PlacementConfig(Section):
    """Pools of ranks, and the roles on them. Roles of one pool take turns; pools run side by side."""

    backend: Literal["auto", "inline", "ray"] = Field(
        "auto", description="inline: all in one process; ray: a process a rank; auto: ray for several ranks."
    )
    address: str | None = Field(
        None, description="A running Ray cluster to join; left out, one is started on this machine."
    )
    pools: dict[str, int] = Field({"main": 1}, min_length=1, description="Ranks of each pool, by its name.")
    roles: dict[str, str] = Field({}, description="The pool of each role; the first pool where not said.")
    deadline_s: float = Field(3600.0, gt=0, description="Longest wait for any rank before the run stops.")

    @property
    def is_inline(self) -> bool:
        """Whether everything runs in one process."""
        return self.backend == "inline" or (self.backend == "auto" and sum(self.pools.values()) == 1)

    def pool_of(self, role: str) -> str:
        """The pool a role is on."""
        return self.roles.get(role, next(iter(self.pools)))
