"""Routes: which experts the tokens of running rows took, kept as one more layer of the cache.

    a pass ── chosen [T, k] by each router ──> keys of the layer ROUTES [rows, R, length, k]
    a row ends ── its places of these ──> rollout.routes [T, R, k] int16

So what is shared, copied, moved or read again with keys and values goes along with them: the routes of a row
are those of the passes that made the keys and values that its later tokens saw. The numbers of experts are
kept in the cache's type, which is exact for whole numbers up to 256 where it is narrow.

Legend: T tokens, R routers, k experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rillflow.errors import ModelError
from rillflow.models.architecture import trial
from rillflow.models.routing import Routers
from rillflow.rollout.native.cache import LayerShape

ROUTES = -1
"""The layer of the cache that keeps routes."""
_EXACT = 257
"""Whole numbers that a cache in bfloat16 can tell apart, from 0 on."""


class RoutePlan:
    """A routing plan that lets routers choose, and remembers."""

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []

    @property
    def routes(self) -> Tensor:
        """[T, R, k] what they chose."""
        return torch.stack(self._chosen, 1)

    def choices(self, router: int) -> Tensor | None:
        """See RoutingPlan."""
        del router  # each chooses
        return None

    def routed(self, router: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See RoutingPlan."""
        del router, logits
        self._chosen.append(chosen)
        return weights


def route_shape(module: nn.Module, routers: Routers, dtype: torch.dtype) -> LayerShape:
    """What the cache keeps of a token's routes, found out by a pass over a few tokens.

    Args:
        module: a mixture of experts, whose routers are watched.
        routers: its routers.
        dtype: of the cache.

    Raises:
        ModelError: the model is dense, or has more experts than the cache tells apart.
    """
    routers.require("rollout.replay_routing is true")
    if dtype.itemsize < 4 and routers.experts >= _EXACT:
        raise ModelError(
            f"rollout.replay_routing is true, and a router chooses among {routers.experts} experts",
            why=f"routes lie in the cache, and in {dtype} it tells {_EXACT - 1} apart",
            fix='policy.model.dtype = "float32", or leave rollout.replay_routing out',
        )
    plan = RoutePlan()
    trial(module, routing_plan=plan)
    _, heads, size = plan.routes.shape
    return LayerShape(heads=heads, key_size=size, value_size=0)


def read_routes(keys: Tensor, row: int, tokens: int) -> Tensor:
    """[T, R, k] int16 the routes of a row of so many tokens; the last of them went through no pass.

    Args:
        keys: [rows, R, length, k] of the layer ROUTES, in the row's band.
        row: which of the band's.
        tokens: T.
    """
    found = keys[row, :, : tokens - 1].transpose(0, 1).to(torch.int16).cpu()
    return pad(found, (0, 0, 0, 0, 0, 1), value=-1)
