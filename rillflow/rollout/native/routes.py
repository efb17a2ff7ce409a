"""Routes: the experts that the tokens of running rows took, stored as one more layer of the cache.

    a pass ── chosen [T, k] by each router ──> keys of the layer ROUTES [rows, R, length, k]
    a row ends ── its part of that layer ──> rollout.routes [T, R, k] int16

So routes are shared, copied, moved and recomputed together with keys and values: a row's routes come from
the passes that computed the keys and values its later tokens attended to. Expert numbers are stored in the
cache's dtype; a narrow one represents integers up to 256 exactly.

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
"""Index of the cache layer that stores routes."""
_EXACT = 257
"""Number of integers from 0 on that bfloat16 represents exactly."""


class RoutePlan:
    """A routing plan that lets routers choose, and records their choices."""

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []

    @property
    def routes(self) -> Tensor:
        """[T, R, k] chosen experts."""
        return torch.stack(self._chosen, 1)

    def choices(self, router: int) -> Tensor | None:
        """See RoutingPlan."""
        del router  # every router chooses itself
        return None

    def routed(self, router: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See RoutingPlan."""
        del router, logits
        self._chosen.append(chosen)
        return weights


def route_shape(module: nn.Module, routers: Routers, dtype: torch.dtype) -> LayerShape:
    """Return the cache shape of a token's routes, found by a trial pass over a few tokens.

    Args:
        module: a mixture of experts, whose routers are watched.
        routers: its routers.
        dtype: dtype of the cache.

    Raises:
        ModelError: the model is dense, or has more experts than the cache's dtype can represent.
    """
    routers.require("rollout.replay_routing is true")
    if dtype.itemsize < 4 and routers.experts >= _EXACT:
        raise ModelError(
            f"rollout.replay_routing is true, and a router chooses among {routers.experts} experts",
            why=f"the cache stores routes as {dtype}, which distinguishes at most {_EXACT - 1} experts",
            fix='set policy.model.dtype = "float32", or leave rollout.replay_routing out',
        )
    plan = RoutePlan()
    trial(module, routing_plan=plan)
    _, heads, size = plan.routes.shape
    return LayerShape(heads=heads, key_size=size, value_size=0)


def read_routes(keys: Tensor, row: int, tokens: int) -> Tensor:
    """Return [T, R, k] int16, a row's routes; the last token was not fed to a pass, so its routes are -1.

    Args:
        keys: [rows, R, length, k] of the layer ROUTES, in the row's band.
        row: index of the row in the band.
        tokens: T.
    """
    found = keys[row, :, : tokens - 1].transpose(0, 1).to(torch.int16).cpu()
    return pad(found, (0, 0, 0, 0, 0, 1), value=-1)
