"""Routing: observe which experts the tokens of a mixture take, or prescribe them.

    decoder layer ── routing_plan among its arguments, in every pass and in its recomputation
      router ── logits [U, E], weights [U, k], chosen [U, k] ── plan.routed ──> weights
        └ its last topk of k among E scores ── plan.choices ──> the prescribed experts

A module stays unmodified: its layers and routers get hooks while it is watched. Routers are the modules for
which transformers records ``router_logits``. For prescribed experts, the module's own code computes the
weights from its scores.

In training, ``Routing`` counts the load of each expert and adds the load-balancing loss:

    passes over the rows ── routers' choices ──> counts [R, E] of tokens ── summed over ranks ──> metrics

    with ``policy.balance``:
      before the passes  counts C of all rows with a gradient, N tokens   forward, unless they are known
      in each pass       L = E sum_e C_e / N x P_e / N     its share: P of the pass's own tokens [E]
    router ── weights ──┬──> experts            a share of L joins the backward pass at its router,
               share ───┘ its gradient: 1       so that it need not reach the last stage

The loss is that of Switch (arXiv 2101.03961, equations 4 to 6), averaged over routers, over the whole
minibatch (arXiv 2501.11873): C counts all rows, so shares add up to one loss and one gradient for any
division into micro-batches and ranks. A token counts once for every row that contains it.

Legend: U tokens of a pass, E experts, k of them taken by a token, R routers, P summed probabilities.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from rillflow.errors import ModelError
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.workers.collectives import Ranks

PLAN = "routing_plan"
"""Keyword of ``module(...)`` for a plan."""


class RoutingPlan(Protocol):
    """An engine's view of the routing in one pass."""

    def choices(self, router: int) -> Tensor | None:
        """Return [U, k] prescribed experts, below 0 where the router chooses; None if it always does.

        Routers are counted from 0 over the whole module.
        """

    def routed(self, router: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Receive a router's outputs; return the weights [U, k] to continue with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Router:
    """One router of a module."""

    name: str
    """Name of the router."""
    layer: str
    """Name of its decoder layer."""
    experts: int
    """E."""


class Routers:
    """The routers of a module.

    Args:
        module: a decoder; it may be on the meta device, and dense.
    """

    def __init__(self, module: Any) -> None:
        recorded = module.base_model.can_record_outputs.get("router_logits")
        first = recorded[0] if isinstance(recorded, list) else recorded
        kind = first if isinstance(first, type) or first is None else first.target_class
        self.all: list[Router] = []
        """The routers, in the order of layers."""
        parts: dict[str, nn.Module] = dict(module.named_modules()) if kind is not None else {}
        for name, part in parts.items():
            layer = re.match(r".+?\.\d+(?=\.)", name)
            if layer is not None and type(part) is kind:
                experts = next(each.shape[0] for each in part.parameters() if each.dim() == 2)
                self.all.append(Router(name=name, layer=layer[0], experts=experts))
        self._module, self._known = module, set[int]()
        self._current = threading.local()  # each worker of a process runs its own pass through the one module

    @property
    def experts(self) -> int:
        """Largest number of experts of a router; 0 for a dense model."""
        return max((each.experts for each in self.all), default=0)

    def require(self, asked: str) -> None:
        """Check that the model has routers.

        Raises:
            ModelError: the model is dense; the message names the setting that needs routers.
        """
        if not self.all:
            raise ModelError(
                f"{asked}, and {type(self._module).__name__} has no experts whose choices "
                "transformers records",
                why="a dense model sends every token through all its weights",
                fix="leave the setting out",
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Apply the plans among the module's arguments inside the context."""
        parts = dict(self._module.named_modules())
        with ExitStack() as hooks:
            for number, router in enumerate(self.all):
                if router.name in parts:  # otherwise another pipeline stage has it
                    layer, part = parts[router.layer], parts[router.name]
                    hooks.callback(layer.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    hooks.callback(part.register_forward_pre_hook(partial(self._before, number)).remove)
                    after = part.register_forward_hook(partial(self._after, number), always_call=True)
                    hooks.callback(after.remove)
            yield

    def _enter(self, _layer: nn.Module, _args: Any, named: Mapping[str, Any]) -> None:
        self._current.plan = named.get(PLAN)

    def _before(self, number: int, *_: Any) -> None:
        plan: RoutingPlan | None = self._current.plan
        said = None if plan is None else plan.choices(number)
        self._current.saying = None
        if said is not None:
            self._current.saying = _Saying(said, self.all[number])
            self._current.saying.__enter__()

    def _after(self, number: int, router: nn.Module, _args: Any, output: Any) -> Any:
        plan, saying, self._current.saying = self._current.plan, self._current.saying, None
        if saying is not None:
            saying.__exit__(None, None, None)
        if plan is None or output is None:  # None: the router raised
            return output
        if number not in self._known:  # in a recorded pass, shapes must not be read
            _check_said(router, output, self.all[number])
            self._known.add(number)
        logits, weights, chosen = output
        if saying is not None and not saying.was_asked:
            raise _not_watched(router, "it does not choose experts by one topk over all scores")
        seen = logits.view(-1, self.all[number].experts)
        return (logits, plan.routed(number, seen, weights, chosen), chosen)


class _Saying(TorchFunctionMode):
    """Mode in which ``topk`` of a router's scores [U, E] returns the prescribed experts."""

    def __init__(self, said: Tensor, router: Router) -> None:
        super().__init__()
        self._said, self._router, self.was_asked = said, router, False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See TorchFunctionMode."""
        named = kwargs or {}
        found = function(*args, **named)
        if function not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else named["input"]
        if found.indices.shape != self._said.shape or scores.shape[-1] != self._router.experts:
            return found  # a choice among groups of experts
        self.was_asked = True
        said = torch.where(self._said < 0, found.indices, self._said)
        return torch.return_types.topk((scores.gather(-1, said), said))


def _check_said(router: nn.Module, output: Any, known: Router) -> None:
    """Refuse a router that does not return logits, weights and choices."""
    match output:
        case (Tensor() as logits, Tensor() as weights, Tensor() as chosen) if (
            not chosen.is_floating_point()
            and weights.shape == chosen.shape
            and chosen.dim() == 2
            and logits.shape[-1] == known.experts
        ):
            return
    raise _not_watched(router, "it does not return logits, weights and the chosen experts")


def _not_watched(router: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"the routing of {type(router).__name__} cannot be recorded",
        why=why,
        fix="leave out policy.balance and rollout.replay_routing",
    )


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
