"""Routing: observe which experts the tokens of a mixture take, or prescribe them.

    decoder layer ── routing_plan among its arguments, in every pass and in its recomputation
      router ── logits [U, E], weights [U, k], chosen [U, k] ── plan.routed ──> weights
        └ its last topk of k among E scores ── plan.choices ──> the prescribed experts

A module stays unmodified: its layers and routers get hooks while it is watched. Routers are the modules for
which transformers records ``router_logits``. For prescribed experts, the module's own code computes the
weights from its scores.

Legend: U tokens of a pass, E experts, k of them taken by a token, R routers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rillflow.errors import ModelError

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
