"""Sampling shard: one rank's shard of a decoder, for passes without gradients.

    like ── copied, its parameters on the meta device ── plan ──> modules of the local sizes
                                                                            │
    {logical name: local tensor} ── assign, nothing is copied ──────────────┴──> a module to sample from

    COLUMNS               x ─> w_r x                        own outputs: own heads, own hidden units
    ROWS                  x_r ─> w_r x_r ─ sum ─> + bias    the same bits on every rank
    SPLIT_ROWS            x ─ own slice ─> as ROWS
    GATHERED              x ─> w_r x ─ concatenated over ranks
    LOOKED_UP             token ─ other ranks' tokens give 0 ─> row ─ sum
    SUMMED, and the rest  replicated, without communication

If a fused projection gives every rank all heads (Phi3, OLMo2), a rank attends with its own heads only, and
the output projection then gets inputs that are already split: the cache is 1 / tp there too.

Sums are added in the order of ranks, and all other computation is the same on every rank. So all ranks have
bitwise equal logits and draw the same token without communication.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.adapters import ADAPTER, AdaptedLinear, join
from rillflow.models.attention import AttentionPlan, Scores, causal
from rillflow.models.lazy_weights import replace_parameters
from rillflow.models.quantised import QuantisedLinear, keep_quantised, product
from rillflow.models.tensor_plan import Style, require_heads, tensor_plan, weight_parts
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Interval, slices
from rillflow.workers.collectives import Ranks

Bounds = tuple[Interval, ...]
"""Start and stop (excluded) of a rank's slice of a parameter, in every dim."""


def sampling_module(like: PreTrainedModel, plan: Mapping[str, Style], tp: Ranks) -> PreTrainedModel:
    """Return a decoder of this rank's sizes in evaluation mode; parameters stay meta until ``assign``.

    All ranks call it together with the same arguments. ``attention_plan`` receives only this rank's heads.

    Args:
        like: the whole decoder, with Rillflow's attention; its config and buffers are copied, its weights
            are not read.
        plan: ``tensor_plan(like)``; unused for one rank.
        tp: the ranks that share every weight. A single rank gets the whole decoder.

    Raises:
        ModelError: the model has no plan, heads do not divide by the ranks, or a weight is too short to be
            split over them.
    """
    away = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=False)
        for each in like.parameters()
    }
    module: PreTrainedModel = copy.deepcopy(like, away)
    if tp.size > 1:
        plan = plan or tensor_plan(like)
        require_heads(like, tp.size)
        _shard(module, plan, tp)
        _tie(module, like)
    return module.eval().requires_grad_(False)


def local_bounds(
    module: PreTrainedModel, plan: Mapping[str, Style], rank: int, size: int
) -> dict[str, Bounds]:
    """Return the slice that one of ``size`` ranks holds of every parameter, by logical name.

    Raises:
        ModelError: a weight is too short to give every rank a slice.
    """
    mesh, found = Mesh.of(tp=size), {}
    parts = weight_parts(dict(plan), module)
    for name, parameter in module.named_parameters():
        held = slices(Placement(mesh, {"tp": parts[name]}), parameter.shape)
        if not all(held.values()):
            raise ModelError(
                f"tp is {size} and {name} has the shape {list(parameter.shape)}",
                why=f"torch.chunk splits it by the plan, and leaves nothing for rank {size - 1}",
                fix="choose a smaller tp",
            )
        found[name] = held[rank][0].bounds
    return found


def assign(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Make these tensors the module's weights; nothing is copied, and ties are kept.

    The first call creates the parameters. Later calls give the same parameter objects new storages, so
    references to a parameter see its new value.

    Args:
        module: a module made by ``sampling_module``.
        tensors: the local tensor of every parameter, by its logical name; all on one device.

    Raises:
        ModelError: a name is missing or unknown, or a shape differs.
    """
    held = dict(module.named_parameters())
    _check_names(held.keys(), tensors.keys())
    for name, parameter in held.items():
        if tensors[name].shape != parameter.shape:
            raise ModelError(
                f"the given tensor for {name} has the shape {list(tensors[name].shape)}",
                why=f"this rank's shard has the shape {list(parameter.shape)}",
                fix="split the weight by weight_parts, with torch.chunk",
            )
        if not parameter.is_meta:
            parameter.data = tensors[name].detach()
    if any(parameter.is_meta for parameter in held.values()):
        given = {id(parameter): tensors[name].detach() for name, parameter in held.items()}
        replace_parameters(module, lambda parameter: given[id(parameter)])


def _shard(module: PreTrainedModel, plan: Mapping[str, Style], tp: Ranks) -> None:
    """Replace the submodules that the plan names by their local form."""
    everyone = [local_bounds(module, plan, rank, tp.size) for rank in range(tp.size)]
    fused = _fused(module, plan)
    logical = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, style in plan.items():
        if style is Style.SUMMED:
            continue
        part: Any = module.get_submodule(name)
        packed = part.form.packed if isinstance(part, QuantisedLinear) else 1
        bounds = [_unpacked(held[logical[id(part.weight)]], packed) for held in everyone]
        if style is Style.LOOKED_UP:
            _look_up(part, bounds[tp.rank], tp)
        else:
            own_heads = name.partition(ADAPTER)[0] in fused
            new = _linear(part, Style.ROWS if own_heads else style, bounds, tp)
            if isinstance(part, QuantisedLinear):
                keep_quantised(new, part.form, name)
            if isinstance(part, AdaptedLinear):
                join(new, *part.beside)
            module.set_submodule(name, new)
    if fused:
        layers = frozenset(fused.values())

        def attend_with_own(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            given = named.get("attention_plan")
            return inputs, {**named, "attention_plan": OwnHeads(given, layers, tp.rank, tp.size)}

        module.register_forward_pre_hook(attend_with_own, with_kwargs=True)


def _unpacked(bounds: Bounds, packed: int) -> Bounds:
    """Return a slice of a weight in numbers, from one in stored integers."""
    *above, (start, stop) = bounds
    return (*above, (start * packed, stop * packed))


def _linear(part: nn.Linear, style: Style, bounds: list[Bounds], tp: Ranks) -> nn.Linear:
    has_bias = part.bias is not None
    if style in (Style.ROWS, Style.SPLIT_ROWS):
        return RowsLinear(bounds[tp.rank][1], part.out_features, has_bias, style is Style.SPLIT_ROWS, tp)
    widths = tuple(stop - start for (start, stop), _ in bounds)
    if style is Style.GATHERED:
        return GatheredLinear(part.in_features, widths, has_bias, tp)
    return nn.Linear(part.in_features, widths[tp.rank], has_bias, device="meta")


def _look_up(part: nn.Embedding, bounds: Bounds, tp: Ranks) -> None:
    """Shard an embedding; ``num_embeddings`` stays the size of the whole vocabulary."""
    rows, size = bounds
    part.weight = nn.Parameter(torch.empty(rows[1] - rows[0], size[1], device="meta"))
    part.padding_idx = None  # it only concerns gradients, and its row may be another rank's
    lookup = Lookup(rows, tp)
    part.register_forward_pre_hook(lookup.before)
    part.register_forward_hook(lookup.after)


def _fused(module: PreTrainedModel, plan: Mapping[str, Style]) -> dict[str, int]:
    """Return the attention output projections that receive all heads, with their layers.

    Only modules that call Rillflow's attention have a ``layer_idx``, so this attribute identifies them.
    """
    owners = {name: name.rpartition(".")[0] for name in plan if plan[name] is Style.SPLIT_ROWS}
    layers = {name: vars(module.get_submodule(owner)).get("layer_idx") for name, owner in owners.items()}
    return {name: layer for name, layer in layers.items() if isinstance(layer, int)}


def _tie(module: PreTrainedModel, like: PreTrainedModel) -> None:
    """Tie the parameters of ``module`` that are tied in ``like``."""
    first: dict[int, nn.Parameter] = {}
    for name, parameter in like.named_parameters(remove_duplicate=False):
        owner, _, kind = name.rpartition(".")
        found = first.setdefault(id(parameter), module.get_parameter(name))
        module.get_submodule(owner).register_parameter(kind, found)


def _check_names(wanted: Set[str], given: Set[str]) -> None:
    for names, fault in (
        (wanted - given, "is not given"),
        (given - wanted, "is not a parameter of the module"),
    ):
        if names:
            raise ModelError(
                f"the weight {min(names)} {fault}",
                why=f"the module has {len(wanted)} weights, tied ones counted once; {len(given)} are given",
                fix="pass every weight under its logical name",
            )


class RowsLinear(nn.Linear):
    """A linear layer with its inputs split over ranks: outputs are summed, then the bias is added.

    Args:
        inputs: this rank's inputs.
        outputs: number of outputs.
        bias: whether it has a bias.
        split: whether it receives all inputs and takes its own slice.
        ranks: the ranks that share the inputs.
    """

    def __init__(self, inputs: Interval, outputs: int, bias: bool, split: bool, ranks: Ranks) -> None:
        super().__init__(inputs[1] - inputs[0], outputs, bias, device="meta")
        self._inputs = slice(*inputs) if split else None
        self._ranks = ranks

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., outputs]."""
        if self._inputs is not None:
            states = states[..., self._inputs]
        total = product(self, states)
        self._ranks.sum_([total])
        return total if self.bias is None else total + self.bias


class GatheredLinear(nn.Linear):
    """A linear layer with its outputs split over ranks and then gathered.

    Args:
        inputs: number of inputs.
        widths: outputs of every rank.
        bias: whether it has a bias.
        ranks: the ranks that share the outputs.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], bias: bool, ranks: Ranks) -> None:
        super().__init__(inputs, widths[ranks.rank], bias, device="meta")
        self._widths = widths
        self._ranks = ranks

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., outputs of all ranks]."""
        own = super().forward(states)
        filled = nn.functional.pad(own, (0, max(self._widths) - own.shape[-1]))
        everyone = self._ranks.stack(filled)
        return torch.cat([part[..., :width] for part, width in zip(everyone, self._widths, strict=True)], -1)


class Lookup:
    """Hooks of an embedding that has the rows of some tokens.

    Args:
        rows: this rank's tokens.
        ranks: the ranks that share all tokens.
    """

    def __init__(self, rows: Interval, ranks: Ranks) -> None:
        self._start, self._stop = rows
        self._ranks = ranks
        self._foreign: Tensor | None = None

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return tokens as row indices of this rank; those of other ranks become row 0."""
        (tokens,) = inputs
        self._foreign = (tokens < self._start) | (tokens >= self._stop)
        return (torch.where(self._foreign, 0, tokens - self._start),)

    def after(self, _: nn.Module, __: tuple[Tensor, ...], found: Tensor) -> Tensor:
        """Return [..., size] the rows, summed over ranks."""
        assert self._foreign is not None  # ``before`` has run
        found = found.masked_fill(self._foreign[..., None], 0.0)
        self._foreign = None
        self._ranks.sum_([found])
        return found


class OwnHeads:
    """An attention plan that receives all heads in some layers and attends with this rank's only.

    Args:
        plan: the inner plan; None for plain causal attention.
        layers: the layers with all heads.
        rank: index of this rank's part.
        size: number of parts.
    """

    def __init__(self, plan: AttentionPlan | None, layers: frozenset[int], rank: int, size: int) -> None:
        self._plan = plan
        self._layers = layers
        self._rank, self._size = rank, size

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See AttentionPlan."""
        if layer in self._layers:
            query, key, value = (self._own(states) for states in (query, key, value))
            if scores.sinks is not None:
                scores = replace(scores, sinks=self._own(scores.sinks[None])[0])
        if self._plan is None:
            return causal(query, key, value, scores).transpose(1, 2)
        return self._plan.attend(layer, query, key, value, scores)

    def _own(self, heads: Tensor) -> Tensor:
        """Return this rank's part of [N, heads, ...]."""
        return heads.chunk(self._size, dim=1)[self._rank]
