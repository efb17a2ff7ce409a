"""Packed rows: a micro-batch as one long row, in which a shared prefix is computed once.

    rows      a b c d        packed tokens [U]    a b c d | e | x y        one for every distinct prefix
              a b c e        positions            0 1 2 3 | 3 | 0 1
              x y            places of the rows   0 1 2 3, 0 1 2 4, 5 6

    rows ── cut after the last token that is read ── pack ──> [1, U], positions, attention plan ┐ Reading
    loss tokens ── ``back`` tokens before each ──> [N] places among the packed tokens           ┘

Rows sampled from one prompt share the prompt, and equal answers share their tokens. Every token-wise
operation of a decoder runs on U tokens. Only attention distinguishes rows: it gathers rows of similar length,
and returns each packed token's result once. On a CPU, rows that share a long prefix compute queries only for
their own suffix; keys and values cover the whole row. On other devices, kernels need whole rows:

    a b c d    queries a, b, c and d                 a b c e    query e only

A token is predicted from the state one token before it (back = 1), and so is its value; a row is scored at
its last token (back = 0).

A module with its own attention gets padded rows instead, [B, L], with padding after each row's end, where a
causal decoder never looks. There, shared prefixes are computed once for every row.

Legend: B rows, T tokens of all rows, U packed tokens, N loss tokens, L longest row; H, K heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rillflow.errors import TrainingError
from rillflow.models.attention import Scores, causal
from rillflow.models.routing import PLAN, Routing
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Rows in the format of the model's input.

    Example:
        packed = pack(Ragged.from_rows([[1, 2], [1, 3]]))
        packed.tokens.tolist() == [1, 2, 3] and packed.places.values.tolist() == [0, 1, 0, 2]
        packed.shared.tolist() == [0, 1]
    """

    tokens: Tensor
    """[U] int64."""
    positions: Tensor
    """[U] int64 position of each packed token in its rows."""
    places: Ragged
    """int64 index among the packed tokens, for every token of every row."""
    shared: Tensor
    """[B] int64 length of the prefix that each row shares with an earlier row."""


def pack(rows: Ragged) -> PackedRows:
    """Return rows laid end to end, with each shared prefix only once.

    Rows are sorted, so that a row's neighbour is the row with the longest common prefix; the tokens after
    this prefix are new.
    """
    padded = rows.padded(-1)
    texts = rows.lists()
    order = torch.tensor(sorted(range(len(rows)), key=texts.__getitem__), dtype=torch.int64)
    padded, lengths = padded[order], rows.lengths[order]
    steps = torch.arange(padded.shape[1])
    common = torch.zeros_like(lengths)
    alike = (padded[1:] == padded[:-1]) & (padded[1:] >= 0)
    common[1:] = alike.cumprod(1).sum(1)
    fresh = steps >= common[:, None]
    owner = torch.where(fresh, torch.arange(len(rows))[:, None], 0).cummax(0).values
    shift = torch.cumsum(lengths - common, 0) - lengths
    places, shared = torch.empty_like(padded), torch.empty_like(common)
    places[order], shared[order] = steps + shift[owner], common
    new = fresh & (steps < lengths[:, None])
    return PackedRows(
        tokens=padded[new],
        positions=steps.expand_as(padded)[new],
        places=rows.with_values(places[rows.row_of, rows.positions]),
        shared=shared,
    )


class PackedAttention:
    """The attention plan of packed rows (see models.attention.AttentionPlan).

    Args:
        rows: the packed rows.
        device: device of the module.
    """

    def __init__(self, rows: PackedRows, device: torch.device) -> None:
        self.layers: set[int] = set()
        self._buckets: list[_Bucket] = []
        home, size, lengths = torch.empty_like(rows.tokens), 0, rows.places.lengths
        is_worth_it = (device.type == "cpu") & (rows.shared >= lengths * _MUCH)
        silent = torch.where(is_worth_it, rows.shared, 0)
        for mates in _side_by_side(torch.where(rows.shared < lengths, lengths, 0), silent):
            before = int(silent[mates].min())
            places = rows.places.select(mates).padded(-1)
            asking = places[:, before:]
            own = torch.arange(before, places.shape[1]) >= rows.shared[mates, None]
            own &= asking >= 0
            home[asking[own]] = torch.arange(size, size + asking.numel()).view_as(asking)[own]
            size += asking.numel()
            keys = _Pick.of(places, len(home), device)
            queries = _Pick.of(asking, len(home), device) if before else keys
            self._buckets.append(_Bucket(keys=keys, queries=queries, rows=len(mates), before=before))
        self._home = _Pick.of(home, size, device)

    def padded(self, size: int) -> PackedAttention:
        """Return the plan with padding tokens, up to ``size``, whose outputs are arbitrary."""
        found = copy(self)
        found.layers = set()
        found._buckets = [
            replace(one, keys=one.keys.with_more(sources=size), queries=one.queries.with_more(sources=size))
            for one in self._buckets
        ]
        found._home = self._home.with_more(results=size)
        return found

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return [1, U, H, D]: each packed token attends to its prefix in its rows; see AttentionPlan."""
        self.layers.add(layer)
        found = []
        for bucket in self._buckets:
            asking = bucket.rows_of(query, bucket.queries)
            keys, values = (bucket.rows_of(states, bucket.keys) for states in (key, value))
            seen = causal(asking, keys, values, scores, bucket.before)
            found.append(seen.transpose(1, 2).flatten(0, 1).flatten(1))
        everything = found[0] if len(found) == 1 else torch.cat(found)
        return _gather(everything, self._home).view(1, query.shape[2], query.shape[1], -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """Inputs of one pass."""

    inputs: dict[str, Any]
    """Arguments of the module: tokens, positions and the attention plan."""
    wanted: Tensor
    """[N] int64 indices of the tokens at which outputs for the loss tokens are read, row after row."""
    copies: Tensor
    """[U] float32 number of rows that contain each token of the pass; 0 for padding."""
    routes: Tensor | None = None
    """[U, R, k] int64 experts of each packed token, -1 where its routers choose; None if all choose."""

    @property
    def size(self) -> int:
        """Number of packed tokens."""
        return int(self.inputs["input_ids"].shape[1])

    def padded(self, size: int) -> Reading:
        """Return the pass with padding tokens, up to ``size``."""
        more = (0, size - self.size)
        grown: dict[str, Any] = {name: pad(self.inputs[name], more) for name in ("input_ids", "position_ids")}
        grown["attention_plan"] = self.inputs["attention_plan"].padded(size)
        if PLAN in self.inputs:
            grown[PLAN] = self.inputs[PLAN].padded(size)
        routes = None if self.routes is None else pad(self.routes, (0, 0, 0, 0, *more), value=-1)
        return replace(self, inputs={**self.inputs, **grown}, copies=pad(self.copies, more), routes=routes)

    def routed(self, routing: Routing) -> Reading:
        """Return the pass with a plan for its routing."""
        return replace(self, inputs={**self.inputs, PLAN: routing.plan(self.copies, self.routes)})

    def check(self, module: nn.Module) -> None:
        """Check after the pass that the module used the attention plan.

        Raises:
            TrainingError: it has an attention of its own.
        """
        if "attention_plan" in self.inputs and not self.inputs["attention_plan"].layers:
            raise TrainingError(
                f"{type(module).__name__} does not use Rillflow's attention",
                why="packed rows would attend to each other",
                fix='build the module with attn_implementation="rillflow"',
            )


def lay_out(part: Batch, device: torch.device, *, back: int, padded: bool = False) -> Reading:
    """Return the inputs for the part's rows, without tokens after the last one that is read.

    Args:
        part: rows with ``tokens`` and ``loss_mask``, with at least one loss token.
        device: device of the module.
        back: number of tokens between an output and its loss token.
        padded: whether to pad rows instead of packing them.
    """
    tokens, mask = part.ragged("tokens"), part.ragged("loss_mask")
    index = mask.values.nonzero().squeeze(1)
    rows, read = mask.row_of[index], mask.positions[index] - back
    is_read = _are_read(mask, back)
    needed = mask.with_values(is_read).sums()
    inputs = Ragged(values=tokens.values[is_read], lengths=needed)
    if padded:
        filled = inputs.padded(0).to(device)
        wanted = (rows * filled.shape[1] + read).to(device)
        copies = torch.arange(filled.shape[1]) < needed[:, None]
        return Reading(
            inputs={"input_ids": filled, "use_cache": False},
            wanted=wanted,
            copies=copies.flatten().float().to(device),
        )
    packed, routes = pack(inputs), None
    if "routes" in part.fields:
        packed, routes = _pack_routed(inputs, routes_of(part, back=back))
    return Reading(
        inputs={
            "input_ids": packed.tokens[None].to(device),
            "position_ids": packed.positions[None].to(device),
            "use_cache": False,
            "attention_plan": PackedAttention(packed, device),
        },
        wanted=packed.places.values[inputs.bounds[rows] + read].to(device),
        copies=packed.places.values.bincount(minlength=len(packed.tokens)).float().to(device),
        routes=None if routes is None else routes.to(device),
    )


def routes_of(part: Batch, *, back: int) -> Tensor:
    """Return [T, R, k] int64 experts of the tokens that ``lay_out`` reads; a single -1 if unknown."""
    if "routes" not in part.fields:
        return torch.full((1, 1, 1), -1)
    return part.ragged("routes").values[_are_read(part.ragged("loss_mask"), back)].long()


def _are_read(mask: Ragged, back: int) -> Tensor:
    """Return [T] bool, true up to each row's last token with an output for a loss token."""
    last = (mask.values * (mask.positions + 1 - back)).clamp_min(0)
    needed = torch.zeros_like(mask.lengths).scatter_reduce(0, mask.row_of, last, "amax")
    return mask.positions < mask.expand(needed)


def _pack_routed(rows: Ragged, routes: Tensor) -> tuple[PackedRows, Tensor]:
    """Pack rows, sharing a prefix while its tokens took the same experts [T, R, k]; return [U, R, k] too."""
    texts = torch.cat([rows.values[:, None], routes.flatten(1)], 1)
    packed = pack(rows.with_values(torch.unique(texts, dim=0, return_inverse=True)[1]))
    source = torch.empty_like(packed.tokens)
    source[packed.places.values] = torch.arange(len(rows.values))
    return replace(packed, tokens=rows.values[source]), routes[source]


def empty_reading(device: torch.device) -> Reading:
    """Return a pass over one token of no row, for a rank without rows while others have some."""
    rows, mask = Ragged.from_rows([[0]]), Ragged.from_rows([[1]], torch.bool)
    part = Batch(ids=torch.zeros(1, 3, dtype=torch.int64), fields={"tokens": rows, "loss_mask": mask})
    found = lay_out(part, device, back=0)
    return replace(found, copies=torch.zeros_like(found.copies))


def last_tokens(batch: Batch) -> Batch:
    """Return the rows' ``tokens``, and a ``loss_mask`` that is True only at each row's last token.

    Raises:
        TrainingError: a row is empty.
    """
    tokens = batch.ragged("tokens")
    empty = (tokens.lengths == 0).nonzero()
    if len(empty):
        raise TrainingError(
            f"row ({batch.row_id(int(empty[0]))}) is empty",
            why="a row is scored at its last token, and there is none",
            fix="remove the row",
        )
    last = tokens.positions == tokens.expand(tokens.lengths - 1)
    return batch.only("tokens").with_fields(loss_mask=tokens.with_values(last))


_MUCH = 1 / 3
"""Minimum shared fraction of a row for computing queries only for its suffix."""


def _side_by_side(lengths: Tensor, silent: Tensor) -> Iterator[Tensor]:
    """Yield indices of rows with similar ``lengths`` and ``silent`` tokens; omit rows of length 0."""
    order = torch.argsort(lengths, descending=True, stable=True)
    for start, end in pairwise(bucket_bounds(lengths[order].tolist())):
        alike = order[start:end]
        alike = alike[torch.argsort(silent[alike], descending=True, stable=True)]
        for first, last in pairwise(bucket_bounds((silent[alike] + 1).tolist())):  # 0 would be omitted
            yield alike[first:last]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pick:
    """Rows of a matrix chosen by index, with the inverse mapping."""

    index: Tensor
    """[M] int64 source of each result."""
    order: Tensor
    """[R] int64 results that are not padding, ordered by source."""
    offsets: Tensor
    """[sources] int64 first index of each source's results in ``order``."""

    @staticmethod
    def of(places: Tensor, sources: int, device: torch.device) -> _Pick:
        """Return the pick of ``places``; those below 0 are padding."""
        index = places.flatten()
        real = (index >= 0).nonzero().squeeze(1)
        chosen = index[real]
        by_source = torch.argsort(chosen, stable=True)
        offsets = torch.searchsorted(chosen[by_source], torch.arange(sources))
        parts = (part.to(device) for part in (index.clamp_min(0), real[by_source], offsets))
        return _Pick(**dict(zip(("index", "order", "offsets"), parts, strict=True)))

    def with_more(self, *, sources: int = 0, results: int = 0) -> _Pick:
        """Return the pick extended to ``sources`` with unchosen sources, and to ``results`` with padding."""
        unchosen = self.offsets.new_full((max(0, sources - len(self.offsets)),), len(self.order))
        more = self.index.new_zeros(max(0, results - len(self.index)))
        return replace(self, index=torch.cat([self.index, more]), offsets=torch.cat([self.offsets, unchosen]))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bucket:
    """Rows of a rectangle [rows, longest]."""

    keys: _Pick
    """Pick of all their places from the packed tokens [U]."""
    queries: _Pick
    """Pick of the places that compute queries."""
    rows: int
    """Number of rows."""
    before: int
    """Number of leading tokens per row without queries."""

    def rows_of(self, states: Tensor, pick: _Pick) -> Tensor:
        """Return the bucket's rows [rows, heads, chosen places, size] of states [1, heads, U, size]."""
        flat = states[0].transpose(0, 1).flatten(1)
        return _gather(flat, pick).view(self.rows, -1, *states.shape[1::2]).transpose(1, 2)


def _gather(values: Tensor, pick: _Pick) -> Tensor:
    found: Tensor = _Gather.apply(values, pick)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    """values[index] with gradients summed source by source; on a CPU many times faster than scattering."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pick: _Pick) -> Tensor:
        ctx.pick = pick
        return values.index_select(0, pick.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        pick: _Pick = ctx.pick
        given = gradients[0].contiguous()
        return nn.functional.embedding_bag(pick.order, given, pick.offsets, mode="sum"), None


_FILL = 0.75
"""Minimum length of a row in a bucket, as a share of the bucket's longest row."""
_SHORT = 32
"""A bucket whose longest row has at most this length takes all remaining rows."""


def bucket_bounds(lengths: Sequence[int]) -> list[int]:
    """Return the first index of each bucket, for lengths in falling order, and the end; omit empty rows.

    Example: ``bucket_bounds([100, 80, 40, 0]) == [0, 2, 3]``
    """
    bounds, least = list[int](), 0.0
    for place, length in enumerate(filled := [length for length in lengths if length]):
        if not bounds or length < least:
            bounds.append(place)
            least = length * _FILL if length > _SHORT else 0.0
    return [*bounds, len(filled)]
