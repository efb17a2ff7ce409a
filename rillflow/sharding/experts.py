"""Expert parallelism: each rank of ep has 1/ep of each layer's experts; tokens are sent to them and back.

    this rank's tokens [U, D] ─ router ─> chosen [U, k], weights
         │ a copy for each choice, sorted by expert [S, D]
         ├────────── all to all: to the ranks that have the experts ──────────┐
         │                                                                    v
         │                         grouped products, by the module's own code: received [S', D], own experts
         ├────────── all to all: back <───────────────────────────────────────┘
         v
    times the weights, summed over k ─> [U, D]

A module stays unmodified: hooks on its experts send tokens before, and bring results back after. The ranks of
ep have different rows but run equally many passes, and communicate in every such layer: forward, backward and
in recomputation. So an expert's gradient covers the tokens of its whole ep group, and is summed over groups.

Legend: U tokens, D hidden size, k experts of a token, S = U k, E experts, e = E / ep of them here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rillflow.errors import ModelError
from rillflow.placement.mesh import divisors
from rillflow.workers.collectives import ProcessRanks


def experts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules that hold a layer's experts, recognised by transformers' experts interface."""
    return {name: part for name, part in module.named_modules() if "is_concatenated" in vars(part)}


def expert_weights(module: nn.Module) -> set[str]:
    """Return the names of the experts' parameters."""
    parts = experts_of(module).items()
    return {f"{name}.{weight}" for name, part in parts for weight, _ in part.named_parameters()}


def cut_experts(module: nn.Module, ranks: ProcessRanks) -> None:
    """Keep this rank's experts, in place, and route tokens to the ranks of the other experts.

    Args:
        module: a mixture of experts, whole and the same on every rank; it may be on the meta device.
        ranks: the ranks of ep.

    Raises:
        ModelError: the model is dense, or the ranks do not divide a layer's experts.
    """
    parts = experts_of(module)
    if not parts:
        raise ModelError(
            f"ep is {ranks.size} and {type(module).__name__} has no experts",
            why="ep distributes experts over ranks, and a dense model has none",
            fix="leave ep at 1; dp and fsdp work with every decoder",
        )
    for name, part in parts.items():
        weights = dict(part.named_parameters())
        count = next(iter(weights.values())).shape[0]
        odd = [each for each, weight in weights.items() if weight.shape[0] != count or "." in each]
        if odd or count % ranks.size:
            raise ModelError(
                f"ep is {ranks.size} and {name} has {count} experts",
                why=f"{odd[0]} has no dimension of experts"
                if odd
                else f"every rank needs the same number; {count} / {ranks.size} leaves {count % ranks.size}",
                fix=f"choose ep among {', '.join(map(str, divisors(count)))}" if not odd else "leave ep at 1",
            )
        for each, weight in weights.items():
            own = weight.detach().chunk(ranks.size)[ranks.rank].clone()
            part.register_parameter(each, nn.Parameter(own, requires_grad=weight.requires_grad))
        vars(part)["num_experts"] = count // ranks.size
        trip = _Trip(ranks, count)
        part.register_forward_pre_hook(trip.there)
        part.register_forward_hook(trip.back)


class _Trip:
    """Exchange of one layer's tokens with their experts' ranks, in every pass."""

    def __init__(self, ranks: ProcessRanks, experts: int) -> None:
        self._ranks, self._experts = ranks, experts
        self._weights: list[Tensor] = []

    def there(self, _part: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Replace this rank's tokens by those of all ranks for its experts, one copy per choice."""
        hidden, chosen, weights = given
        self._weights = [weights]
        ids, self._order = torch.sort(chosen.flatten(), stable=True)
        counts = torch.bincount(ids, minlength=self._experts).view(self._ranks.size, -1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._ranks.group)
        self._sent, self._received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        copies = hidden.index_select(0, self._order // chosen.shape[1])
        tokens = _exchange(copies, self._received, self._sent, self._ranks)
        own = torch.arange(counts.shape[1], device=hidden.device).repeat(self._ranks.size)
        places = torch.repeat_interleave(own, theirs.flatten())
        # One extra token, because products of no rows are not defined everywhere.
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        places = torch.cat([places, own[:1]])
        return tokens, places[:, None], tokens.new_ones(len(tokens), 1, dtype=weights.dtype)

    def back(self, _part: nn.Module, _given: Any, output: Tensor) -> Tensor:
        """Return [U, D] the outputs for this rank's tokens, weighted and summed."""
        found = _exchange(output[:-1], self._sent, self._received, self._ranks)
        home = torch.empty_like(self._order)
        home[self._order] = torch.arange(len(home), device=home.device)
        weights = self._weights.pop()
        each = found[home].view(*weights.shape, -1) * weights[..., None]
        return each.sum(1).to(output.dtype)


class _AllToAll(torch.autograd.Function):
    """Exchange of rows between ranks; the backward pass sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], ranks: ProcessRanks) -> Tensor:
        ctx.received, ctx.sent, ctx.ranks = received, sent, ranks
        return _crossed(rows, received, sent, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _crossed(gradients[0], ctx.sent, ctx.received, ctx.ranks), None, None, None


def _exchange(rows: Tensor, received: list[int], sent: list[int], ranks: ProcessRanks) -> Tensor:
    found: Tensor = _AllToAll.apply(rows, received, sent, ranks)  # type: ignore[no-untyped-call]
    return found


def _crossed(rows: Tensor, received: Iterable[int], sent: Iterable[int], ranks: ProcessRanks) -> Tensor:
    """Send the rows [S, D]; return [S', D] the rows received from other ranks, in rank order."""
    counts = list(received)
    found = rows.new_empty(sum(counts), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), counts, list(sent), group=ranks.group)
    return found
