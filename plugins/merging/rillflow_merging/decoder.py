"""Decoder: align the units of one decoder with those of another, so that their weights can be averaged.

    embed ─ R ─┬─ norm ─ q, k, v ─ heads ─ o ─┬─ norm ─ gate, up ─ F ─ down ─┬─ ... ─ norm ─ R ─ head
               └────────── residual ──────────┴────────── residual ──────────┘

R   one transport for the whole residual stream, since all layers add to it
H   per layer: groups of heads, one per key/value head; within a group its query heads, and the dims of its
    values. Dims of queries and keys keep their order: rotary positions depend on it.
F   per layer: the units of the feed-forward layer

By weights, R starts from the embedding, whose tokens are the same in both. Layers are then aligned given R,
and R given the layers, for a few rounds. By activations, all transports follow from the activations of both
models on the same texts (arXiv 2310.05719).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rillflow.errors import ModelError
from rillflow_merging.activations import Activations
from rillflow_merging.parents import Parent, Stored
from rillflow_merging.transport import Matching, distances, transport

ROUNDS = 4
"""Number of rounds in which the residual stream and the layers are aligned by weights."""
_NAME = re.compile(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)")
_ALONG: Mapping[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("", "R+"),
    "lm_head.weight": ("", "R-"),
    "score.weight": ("", "R-"),
    "norm.weight": ("R+",),
    "input_layernorm.weight": ("R+",),
    "post_attention_layernorm.weight": ("R+",),
    "self_attn.q_proj.weight": ("Q+", "R-"),
    "self_attn.q_proj.bias": ("Q+",),
    "self_attn.k_proj.weight": ("K+", "R-"),
    "self_attn.k_proj.bias": ("K+",),
    "self_attn.v_proj.weight": ("V+", "R-"),
    "self_attn.v_proj.bias": ("V+",),
    "self_attn.o_proj.weight": ("R+", "O-"),
    "self_attn.o_proj.bias": ("R+",),
    "self_attn.q_norm.weight": ("",),
    "self_attn.k_norm.weight": ("",),
    "mlp.gate_proj.weight": ("F+", "R-"),
    "mlp.gate_proj.bias": ("F+",),
    "mlp.up_proj.weight": ("F+", "R-"),
    "mlp.up_proj.bias": ("F+",),
    "mlp.down_proj.weight": ("R+", "F-"),
    "mlp.down_proj.bias": ("R+",),
}
"""Units along each dim of a weight, and whether the weight writes (+) or reads (-) them."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention heads of one decoder."""

    queries: int
    """Number of query heads."""
    groups: int
    """Number of key/value heads."""
    dims: int
    """Size of a head."""

    @staticmethod
    def of(parent: Parent) -> Heads:
        """Return the heads that the config describes."""
        config = parent.config
        queries = int(config["num_attention_heads"])
        dims = config.get("head_dim") or int(config["hidden_size"]) // queries
        return Heads(
            queries=queries, groups=int(config.get("num_key_value_heads") or queries), dims=int(dims)
        )


class Aligned:
    """A decoder with its units in another's order; its weights are read like a parent's.

    Args:
        parent: the decoder.
        target: the other decoder.
        moves: transport of every kind of units: ``R``, and ``F0``, ``Q0``, ... by layer.
    """

    def __init__(self, parent: Parent, target: Parent, moves: Mapping[str, Matching]) -> None:
        self._parent, self._moves = parent, moves
        self.weights: Mapping[str, Stored] = {
            name: replace(stored, dtype=parent.weights[name].dtype) for name, stored in target.weights.items()
        }
        """Every weight, with the target's shape."""
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Return [count] elements of a weight from ``first`` on, in row-major order."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self.whole(name).reshape(-1))
        return self._last[1][first : first + count]

    def whole(self, name: str) -> Tensor:
        """Return a weight in its new shape."""
        return moved(name, self._parent.whole(name), self._moves)


def moved(name: str, values: Tensor, moves: Mapping[str, Matching]) -> Tensor:
    """Return a weight with the units along its dims moved, for every dim that has a transport."""
    layer, along = units_of(name)
    for dim, kind in enumerate(along):
        found = moves.get(kind[:-1] if kind.startswith("R") else f"{kind[:-1]}{layer}") if kind else None
        if found is not None:
            values = found.averaged(values, dim) if kind[-1] == "+" else found.shared(values, dim)
    return values


def units_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the layer of a weight, and the units along its dims.

    Raises:
        ModelError: the weight is unknown.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    if match[2] not in _ALONG:
        raise ModelError(
            f"{name} cannot be aligned",
            why="only decoders with the modules of llama, qwen2 and qwen3 can be aligned",
            fix="merge such decoders, or choose another method",
        )
    return match[1] or "", _ALONG[match[2]]


def require_alignable(parent: Parent, target: Parent) -> None:
    """Raise ModelError for two decoders that cannot be aligned.

    Raises:
        ModelError: a weight is of another kind, or heads or layers do not match.
    """
    for each in (parent, target):
        for name in each.weights:
            units_of(name)
    one, other = Heads.of(parent), Heads.of(target)
    if one.dims != other.dims:
        raise ModelError(
            f"heads have the size {one.dims} in {parent.directory} and {other.dims} in {target.directory}",
            why="rotary positions rotate a dim by its index, so the dims of a head cannot be reordered",
            fix="align models with one head size; the number of heads may differ",
        )
    for name, stored in parent.weights.items():
        along, shape = units_of(name)[1], target.weights[name].shape
        if any(not kind and a != b for kind, a, b in zip(along, stored.shape, shape, strict=True)):
            raise ModelError(
                f"{name} has the shape {list(stored.shape)} in {parent.directory} and {list(shape)} in "
                f"{target.directory}",
                why="tokens are not aligned, so both models need the same vocabulary",
                fix="merge models with one vocabulary",
            )


def align_by_weights(parent: Parent, target: Parent, reg: float | None = None) -> Aligned:
    """Return a decoder aligned to another by the distances of weights.

    Raises:
        ModelError: as ``require_alignable``.
        ConfigError: POT is not installed.
    """
    require_alignable(parent, target)
    moves: dict[str, Matching] = {}
    for _ in range(ROUNDS):
        moves["R"] = transport(_residual_cost(parent, target, moves), reg)
        before = dict(moves)
        for layer in layers_of(target):
            moves |= _layer(parent, target, layer, moves["R"], None, reg)
        if all(_same(before.get(kind), found) for kind, found in moves.items()):
            break
    return Aligned(parent, target, moves)


def align_by_activations(
    parent: Parent, target: Parent, said: tuple[Activations, Activations], reg: float | None = None
) -> Aligned:
    """Return a decoder aligned to another by the activations of units on the same tokens.

    Args:
        parent: the decoder.
        target: the other decoder.
        said: activations of the two.
        reg: see ``transport``.

    Raises:
        ModelError: as ``require_alignable``.
        ConfigError: POT is not installed.
    """
    require_alignable(parent, target)
    one, other = said
    cost = sum(distances(a.T, b.T) for a, b in zip(one.residual, other.residual, strict=True))
    assert isinstance(cost, Tensor)
    moves = {"R": transport(cost, reg)}
    for layer in layers_of(target):
        moves |= _layer(parent, target, layer, moves["R"], said, reg)
    return Aligned(parent, target, moves)


def layers_of(parent: Parent) -> list[str]:
    """Return the numbers of a decoder's layers."""
    return sorted({layer for layer, _ in map(units_of, parent.weights) if layer}, key=int)


def _same(one: Matching | None, other: Matching) -> bool:
    if one is None or one.order is None or other.order is None:
        return one is not None and one is other
    return torch.equal(one.order, other.order)


def _residual_cost(parent: Parent, target: Parent, moves: Mapping[str, Matching]) -> Tensor:
    """Return distances [d0, d1] of residual-stream dims, over weights whose other dims are aligned."""
    cost: Tensor | None = None
    inner = {kind: found for kind, found in moves.items() if kind != "R"}
    for name in target.weights:
        layer, along = units_of(name)
        dims = [dim for dim, kind in enumerate(along) if kind.startswith("R")]
        if not dims or (layer and not inner) or len(along) == 1:
            continue
        mine, theirs = (
            values.movedim(dims[0], 0).flatten(1)
            for values in (moved(name, parent.whole(name).double(), inner), target.whole(name))
        )
        found = distances(mine, theirs)
        cost = found if cost is None else cost + found
    assert cost is not None, "a decoder has an embedding"
    return cost


def _layer(
    parent: Parent,
    target: Parent,
    layer: str,
    residual: Matching,
    said: tuple[Activations, Activations] | None,
    reg: float | None,
) -> dict[str, Matching]:
    """Return the transports of one layer's units, given the residual stream's."""

    def pair(part: str) -> tuple[Tensor, Tensor] | None:
        """Return a weight of the layer in both, along the target's residual stream; None if there is none."""
        names = [name for name in target.weights if name.endswith(f"layers.{layer}.{part}")]
        if not names:
            return None
        mine = moved(names[0], parent.whole(names[0]).double(), {"R": residual})
        return mine, target.whole(names[0]).double()

    heads = (Heads.of(parent), Heads.of(target))
    found = _head_moves(pair, heads, None if said is None else _head_states(said, int(layer)), reg)
    if said is None:
        cost = sum(
            distances(*(values.flatten(1) if values.dim() > 1 else values[:, None] for values in both))
            for part in ("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "up_proj.bias")
            if (both := pair(f"mlp.{part}")) is not None
        )
        down = pair("mlp.down_proj.weight")
        assert down is not None
        cost = cost + distances(down[0].T, down[1].T)
    else:
        cost = distances(*(each.inner[int(layer)].T for each in said))
    return {f"{kind}{layer}": move for kind, move in found.items()} | {f"F{layer}": transport(cost, reg)}


def _head_states(said: tuple[Activations, Activations], layer: int) -> tuple[Tensor, Tensor]:
    return said[0].heads[layer], said[1].heads[layer]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pairing:
    """Two groups of heads, one per model, matched to each other."""

    cost: float
    queries: Matching
    values: Matching


_Pairings = list[list[_Pairing]]
"""Pairings of each group of one model with each group of the other."""


def _head_moves(
    pair: Callable[[str], tuple[Tensor, Tensor] | None],
    heads: tuple[Heads, Heads],
    states: tuple[Tensor, Tensor] | None,
    reg: float | None,
) -> dict[str, Matching]:
    """Return the transports of a layer's queries, keys, values and output projection inputs."""
    one, other = heads
    parts = {part: _by_head(pair, part, heads) for part in ("q", "k", "v", "o")}
    said = None
    if states is not None:
        said = tuple(
            each.double().view(len(each), of.groups, -1, of.dims)
            for each, of in zip(states, heads, strict=True)
        )
    pairings = [
        [_pairing(parts, said, left, right, reg) for right in range(other.groups)]
        for left in range(one.groups)
    ]
    cost = torch.tensor([[each.cost for each in row] for row in pairings], dtype=torch.float64)
    groups = transport(cost, reg)
    if groups.order is not None and all(
        pairings[left][right].queries.order is not None and pairings[left][right].values.order is not None
        for right, left in enumerate(groups.order.tolist())
    ):
        return _orders(groups.order.tolist(), pairings, heads)
    return _plans(groups.dense(), pairings, heads)


def _by_head(
    pair: Callable[[str], tuple[Tensor, Tensor] | None], part: str, heads: tuple[Heads, Heads]
) -> tuple[Tensor, Tensor]:
    """Return a projection of both models as [groups, heads per group, dims, d1], with its bias appended."""
    both, bias = pair(f"self_attn.{part}_proj.weight"), pair(f"self_attn.{part}_proj.bias")
    assert both is not None, "a decoder has projections"
    found = []
    for index, of in enumerate(heads):
        values = both[index].T if part == "o" else both[index]
        if bias is not None and part != "o":
            values = torch.cat([values, bias[index][:, None]], 1)
        found.append(values.reshape(of.groups, -1, of.dims, values.shape[1]))
    return found[0], found[1]


def _pairing(
    parts: Mapping[str, tuple[Tensor, Tensor]],
    said: tuple[Tensor, ...] | None,
    left: int,
    right: int,
    reg: float | None,
) -> _Pairing:
    """Match two groups: query heads first, then the dims of values given the matched outputs."""
    mine, theirs = ({part: both[i][g] for part, both in parts.items()} for i, g in ((0, left), (1, right)))
    if said is None:
        cost = distances(mine["q"].flatten(1), theirs["q"].flatten(1))
        keys = float((mine["k"] - theirs["k"]).square().sum())
    else:  # a head's contribution to the residual stream does not depend on the order of its dims
        added = [
            torch.einsum("nhd,hdr->hnr", each[:, group], of["o"]).flatten(1)
            for each, group, of in zip(said, (left, right), (mine, theirs), strict=True)
        ]
        cost, keys = distances(*added), 0.0
    queries = transport(cost, reg)
    spent = float((queries.dense() * cost).sum()) * cost.shape[1]
    if said is None:
        features = [mine["v"][0], theirs["v"][0]]
        outputs = [queries.averaged(mine["o"], 0), theirs["o"]]
        features = [
            torch.cat([one, two.transpose(0, 1).flatten(1)], 1)
            for one, two in zip(features, outputs, strict=True)
        ]
    else:
        rows = [queries.averaged(said[0][:, left], 1), said[1][:, right]]
        features = [each.flatten(0, 1).T for each in rows]
    cost = distances(*features)
    values = transport(cost, reg)
    spent += keys + float((values.dense() * cost).sum()) * cost.shape[1]
    return _Pairing(cost=spent, queries=queries, values=values)


def _orders(
    order: list[int], pairings: list[list[_Pairing]], heads: tuple[Heads, Heads]
) -> dict[str, Matching]:
    """Return permutations of rows, from those of groups, of heads within them and of dims within these."""
    one, _ = heads
    size, dims = one.queries // one.groups, torch.arange(one.dims)
    found: dict[str, list[Tensor]] = {"Q": [], "K": [], "V": [], "O": []}
    for right, left in enumerate(order):
        fits = pairings[left][right]
        assert fits.queries.order is not None and fits.values.order is not None
        found["K"].append(left * one.dims + dims)
        found["V"].append(left * one.dims + fits.values.order)
        for head in fits.queries.order.tolist():
            found["Q"].append((left * size + head) * one.dims + dims)
            found["O"].append((left * size + head) * one.dims + fits.values.order)
    return {kind: Matching(order=torch.cat(rows)) for kind, rows in found.items()}


def _plans(groups: Tensor, pairings: _Pairings, heads: tuple[Heads, Heads]) -> dict[str, Matching]:
    """Return the same as plans: blocks of groups, containing blocks of heads, containing dims."""
    eye = torch.eye(heads[0].dims, dtype=torch.float64) / heads[0].dims

    def blocks(of: Callable[[_Pairing], Tensor]) -> Matching:
        rows = [
            torch.cat([groups[left, right] * of(fits) for right, fits in enumerate(row)], 1)
            for left, row in enumerate(pairings)
        ]
        return Matching(plan=torch.cat(rows, 0))

    return {
        "Q": blocks(lambda fits: torch.kron(fits.queries.dense(), eye)),
        "K": blocks(lambda _: eye),
        "V": blocks(lambda fits: fits.values.dense()),
        "O": blocks(lambda fits: torch.kron(fits.queries.dense(), fits.values.dense())),
    }
