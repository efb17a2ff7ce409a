"""Routing of training passes: the load of each expert, and the load-balancing loss.

    passes over the rows ── routers' choices ──> counts [R, E] of tokens ── summed over ranks ──> metrics

    with ``policy.balance``:
      before the passes  counts C of all rows with a gradient, N tokens   forward, unless they are known
      in each pass       L = E sum_e C_e / N x P_e / N     its share: P of the pass's own tokens [E]
    router ── weights ──┬──> experts            a share of L joins the backward pass at its router,
               share ───┘ its gradient: 1       so that it need not reach the last stage

The loss is that of Switch (arXiv 2101.03961, equations 4 to 6), averaged over routers, over the whole
minibatch (arXiv 2501.11873): C counts all rows, so shares add up to one loss and one gradient for any
division into micro-batches and ranks. A token counts once for every row that contains it.

Legend: U packed tokens, E experts, k of them taken by a token, R routers, P summed probabilities.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rillflow.models.routing import Routers
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.workers.collectives import Ranks


class Routing:
    """Counts of a mixture's routing, for this rank until ``sum_`` is called.

    Args:
        routers: routers of the whole module.
        device: device of the module.
    """

    def __init__(self, routers: Routers, device: torch.device) -> None:
        self._sizes = torch.tensor([each.experts for each in routers.all], dtype=torch.float64, device=device)
        shape = len(routers.all), routers.experts
        self.counts = torch.zeros(shape, dtype=torch.float64, device=device)
        """[R, E] tokens that took each expert."""
        self.tokens = torch.zeros(len(routers.all), dtype=torch.float64, device=device)
        """[R] routed tokens."""
        self.loss = torch.zeros(1, dtype=torch.float64, device=device)
        """Sum of the balancing loss's shares."""
        self.pull: Tensor | None = None
        """[R, E] derivative of the balancing loss by a token's probability; None without balancing."""

    def plan(self, copies: Tensor, routes: Tensor | None) -> PassRouting:
        """Return the plan of one pass; ``copies`` [U] counts each packed token's rows, see ``Reading``."""
        return PassRouting(self, copies, routes)

    def count(self, router: int, copies: Tensor, chosen: Tensor) -> None:
        """Count the choices [U, k] of one router."""
        each = copies.double()[:, None].expand_as(chosen)
        self.counts[router].index_add_(0, chosen.flatten(), each.flatten())
        self.tokens[router] += copies.double().sum()

    def count_all(self, routes: Tensor) -> None:
        """Count the choices [T, R, k] of all routers for the tokens of rows."""
        each = torch.ones(len(routes))
        for router in range(routes.shape[1]):
            chosen = routes[:, router].to(self.counts.device)
            self.count(router, each.to(chosen.device), chosen)

    def sum_(self, ranks: Ranks) -> None:
        """Sum the counts over ranks; all ranks call it, and a dense model needs no communication."""
        if self.counts.numel():
            ranks.sum_([self.counts, self.tokens, self.loss])

    def balanced(self, coefficient: float) -> Tensor:
        """Return [R, E] the ``pull`` of a loss over the present counts, which are summed over all ranks."""
        squares = self.tokens.clamp_min(1.0).square()[:, None]
        return (coefficient * self._sizes[:, None] / len(self._sizes) * self.counts / squares).float()

    def metrics(self) -> dict[str, Metric]:
        """Return metrics of the experts' load; empty if no token was routed."""
        total = self.counts.sum(1)
        if not total.numel() or not bool((total > 0).all()):
            return {}
        shares = self.counts / total[:, None]
        peaks = shares.max(1).values * self._sizes
        entropy = -torch.xlogy(shares, shares).sum(1) / self._sizes.clamp_min(2).log()
        idle = self._sizes - (self.counts > 0).sum(1)
        found: dict[str, Metric] = {
            "routing/peak_load/mean": _mean(peaks),
            "routing/peak_load/max": Max(value=float(peaks.max())),
            "routing/entropy/mean": _mean(entropy),
            "routing/idle/share": Mean(total=float(idle.sum()), count=float(self._sizes.sum())),
        }
        if self.pull is not None:
            found["routing/balance_loss/mean"] = _mean(self.loss)
        return found


class PassRouting:
    """The routing plan of one pass (see models.routing.RoutingPlan).

    Args:
        routing: counter of the choices.
        copies: [U] float32 number of rows with each packed token.
        routes: [U, R, k] prescribed experts, see ``Reading``.
    """

    def __init__(self, routing: Routing, copies: Tensor, routes: Tensor | None) -> None:
        self._routing, self._copies, self._routes = routing, copies, routes
        self._pull = routing.pull
        self._seen = set[int]()

    def padded(self, size: int) -> PassRouting:
        """Return the plan with padding tokens, up to ``size``."""
        found = copy(self)
        more = (0, size - len(self._copies))
        found._copies, found._seen = pad(self._copies, more), set()
        if self._routes is not None:
            found._routes = pad(self._routes, (0, 0, 0, 0, *more), value=-1)
        return found

    def choices(self, router: int) -> Tensor | None:
        """See RoutingPlan."""
        return None if self._routes is None else self._routes[:, router]

    def routed(self, router: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Count the choices, once even with recomputation; return weights with the loss's share attached."""
        routing, is_new = self._routing, router not in self._seen
        if is_new:
            self._seen.add(router)
            routing.count(router, self._copies, chosen)
        if self._pull is None or not torch.is_grad_enabled():
            return weights
        likely = self._copies @ logits.float().softmax(-1)
        share = likely @ self._pull[router, : likely.shape[0]]
        if is_new:
            routing.loss += share.detach()
        joined: Tensor = _Joined.apply(weights, share)  # type: ignore[no-untyped-call]
        return joined


class _Joined(torch.autograd.Function):
    """Identity of the weights; in the backward pass, a share of a loss gets gradient 1."""

    @staticmethod
    def forward(_: Any, weights: Tensor, _share: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), device=gradients[0].device)


def _mean(values: Tensor) -> Mean:
    return Mean(total=float(values.sum()), count=float(math.prod(values.shape)))
