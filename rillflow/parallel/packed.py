"""Packed rows: a micro-batch as one long row, in which rows that begin alike are computed once.

    rows      a b c d        packed tokens [U]    a b c d | e | x y        one for every distinct beginning
              a b c e        positions            0 1 2 3 | 3 | 0 1
              x y            places of the rows   0 1 2 3, 0 1 2 4, 5 6

    rows ── cut after the last token that is read ── pack ──> [1, U], positions, attention plan ┐ Reading
    loss tokens ── ``back`` tokens before each ──> [N] places among the packed tokens           ┘

Rows sampled from one prompt share it, and equal answers share themselves. Everything a decoder does
to one token at a time runs on U tokens; attention alone sees rows, gathered side by side with rows of like
length, and hands each packed token's result back once. Of a row of which much is there for another one, its
own tokens alone ask, and the whole row answers; on a CPU alone, elsewhere kernels want whole rows:

    a b c d    asked by a, b, c and d            a b c e    asked by e alone

A token is predicted from the state one token before it (back = 1), as its value is; a row is scored at
its last token itself (back = 0).

Where a module attends by itself, its rows lie side by side: [B, L], each filled up behind its end, where a
causal decoder never looks. What rows share is computed as often as it is there.

Legend: B rows, T tokens of all rows, U packed tokens, N loss tokens, L longest row; H, K heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rillflow.errors import TrainingError
from rillflow.models.attention import Scores, causal
from rillflow.models.routing import PLAN
from rillflow.parallel.buckets import bucket_bounds
from rillflow.parallel.routing import Routing
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Rows as a model reads them.

    Example:
        packed = pack(Ragged.from_rows([[1, 2], [1, 3]]))
        packed.tokens.tolist() == [1, 2, 3] and packed.places.values.tolist() == [0, 1, 0, 2]
        packed.shared.tolist() == [0, 1]
    """

    tokens: Tensor
    """[U] int64."""
    positions: Tensor
    """[U] int64 the place of each packed token within its rows."""
    places: Ragged
    """int64, for every token of every row its place among the packed tokens."""
    shared: Tensor
    """[B] int64 how many of each row's tokens, its first, are there for a row before."""


def pack(rows: Ragged) -> PackedRows:
    """Lay rows end to end, each beginning that several share only once.

    Rows are sorted, so that a row's neighbour is the one it shares most with; how far the two agree
    decides which of the row's tokens are new.
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
        device: where the module computes.
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
        """The plan with packed tokens that no row sees, up to ``size``; what it gives those is any row's."""
        found = copy(self)
        found.layers = set()
        found._buckets = [
            replace(one, keys=one.keys.with_more(sources=size), queries=one.queries.with_more(sources=size))
            for one in self._buckets
        ]
        found._home = self._home.with_more(results=size)
        return found

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, U, H, D] each packed token attends to the beginning of its rows; see AttentionPlan."""
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
    """What one pass needs."""

    inputs: dict[str, Any]
    """The module's arguments: tokens, positions and the attention plan."""
    wanted: Tensor
    """[N] int64 the tokens, row after row, at which the outputs for the loss tokens stand."""
    copies: Tensor
    """[U] float32 how many rows have each token of the pass; none has what rows are filled up with."""
    routes: Tensor | None = None
    """[U, R, k] int64 the experts each packed token takes, -1 where its routers choose; None where all do."""

    @property
    def size(self) -> int:
        """Packed tokens."""
        return int(self.inputs["input_ids"].shape[1])

    def padded(self, size: int) -> Reading:
        """The same pass with packed tokens that no row sees, up to ``size``."""
        more = (0, size - self.size)
        grown: dict[str, Any] = {name: pad(self.inputs[name], more) for name in ("input_ids", "position_ids")}
        grown["attention_plan"] = self.inputs["attention_plan"].padded(size)
        if PLAN in self.inputs:
            grown[PLAN] = self.inputs[PLAN].padded(size)
        routes = None if self.routes is None else pad(self.routes, (0, 0, 0, 0, *more), value=-1)
        return replace(self, inputs={**self.inputs, **grown}, copies=pad(self.copies, more), routes=routes)

    def routed(self, routing: Routing) -> Reading:
        """The same pass, its routing seen."""
        return replace(self, inputs={**self.inputs, PLAN: routing.plan(self.copies, self.routes)})

    def check(self, module: nn.Module) -> None:
        """Show after the pass that the module asked the plan.

        Raises:
            TrainingError: it has an attention of its own.
        """
        if "attention_plan" in self.inputs and not self.inputs["attention_plan"].layers:
            raise TrainingError(
                f"{type(module).__name__} does not use Rillflow's attention",
                why="rows that lie end to end would see each other",
                fix='build the module with attn_implementation="rillflow"',
            )


def lay_out(part: Batch, device: torch.device, *, back: int, padded: bool = False) -> Reading:
    """The part's rows, with nothing behind the last token that is read.

    Args:
        part: rows with ``tokens`` and ``loss_mask``, at least one loss token among them.
        device: where the module computes.
        back: how many tokens before a loss token its output stands.
        padded: whether rows lie side by side.
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
    """[T, R, k] int64 the experts that those tokens took that ``lay_out`` reads; -1 where nobody knows."""
    if "routes" not in part.fields:
        return torch.full((1, 1, 1), -1)
    return part.ragged("routes").values[_are_read(part.ragged("loss_mask"), back)].long()


def _are_read(mask: Ragged, back: int) -> Tensor:
    """[T] bool the tokens up to the last one of each row at which an output for a loss token stands."""
    last = (mask.values * (mask.positions + 1 - back)).clamp_min(0)
    needed = torch.zeros_like(mask.lengths).scatter_reduce(0, mask.row_of, last, "amax")
    return mask.positions < mask.expand(needed)


def _pack_routed(rows: Ragged, routes: Tensor) -> tuple[PackedRows, Tensor]:
    """Rows that share a beginning as far as their tokens took the same experts [T, R, k]; and [U, R, k]."""
    texts = torch.cat([rows.values[:, None], routes.flatten(1)], 1)
    packed = pack(rows.with_values(torch.unique(texts, dim=0, return_inverse=True)[1]))
    source = torch.empty_like(packed.tokens)
    source[packed.places.values] = torch.arange(len(rows.values))
    return replace(packed, tokens=rows.values[source]), routes[source]


def empty_reading(device: torch.device) -> Reading:
    """A pass over one token of no row, for a rank that has none while others have."""
    rows, mask = Ragged.from_rows([[0]]), Ragged.from_rows([[1]], torch.bool)
    part = Batch(ids=torch.zeros(1, 3, dtype=torch.int64), fields={"tokens": rows, "loss_mask": mask})
    found = lay_out(part, device, back=0)
    return replace(found, copies=torch.zeros_like(found.copies))


def last_tokens(batch: Batch) -> Batch:
    """The rows' ``tokens``, and a ``loss_mask`` that is True at each row's last token alone.

    Raises:
        TrainingError: a row is empty.
    """
    tokens = batch.ragged("tokens")
    empty = (tokens.lengths == 0).nonzero()
    if len(empty):
        raise TrainingError(
            f"row ({batch.row_id(int(empty[0]))}) is empty",
            why="a row is scored at its last token, and there is none",
            fix="leave the row out",
        )
    last = tokens.positions == tokens.expand(tokens.lengths - 1)
    return batch.only("tokens").with_fields(loss_mask=tokens.with_values(last))


_MUCH = 1 / 3
"""A row of which at least this share is there for another asks with its own tokens alone."""


def _side_by_side(lengths: Tensor, silent: Tensor) -> Iterator[Tensor]:
    """Rows of like ``lengths`` and as many ``silent`` tokens, by their places; none of length 0."""
    order = torch.argsort(lengths, descending=True, stable=True)
    for start, end in pairwise(bucket_bounds(lengths[order].tolist())):
        alike = order[start:end]
        alike = alike[torch.argsort(silent[alike], descending=True, stable=True)]
        for first, last in pairwise(bucket_bounds((silent[alike] + 1).tolist())):  # 0 would be left out
            yield alike[first:last]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pick:
    """Rows of a matrix chosen by index, and for each row of the matrix who chose it."""

    index: Tensor
    """[M] int64 the source of each result."""
    order: Tensor
    """[R] int64 the results that count, by source."""
    offsets: Tensor
    """[sources] int64 where each source's results begin in ``order``."""

    @staticmethod
    def of(places: Tensor, sources: int, device: torch.device) -> _Pick:
        """The pick of ``places``, those below 0 being padding."""
        index = places.flatten()
        real = (index >= 0).nonzero().squeeze(1)
        chosen = index[real]
        by_source = torch.argsort(chosen, stable=True)
        offsets = torch.searchsorted(chosen[by_source], torch.arange(sources))
        parts = (part.to(device) for part in (index.clamp_min(0), real[by_source], offsets))
        return _Pick(**dict(zip(("index", "order", "offsets"), parts, strict=True)))

    def with_more(self, *, sources: int = 0, results: int = 0) -> _Pick:
        """The pick with sources that nobody chooses, and results that are padding, up to so many."""
        unchosen = self.offsets.new_full((max(0, sources - len(self.offsets)),), len(self.order))
        more = self.index.new_zeros(max(0, results - len(self.index)))
        return replace(self, index=torch.cat([self.index, more]), offsets=torch.cat([self.offsets, unchosen]))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bucket:
    """Rows side by side, [rows, longest]."""

    keys: _Pick
    """Of all their places, from packed tokens [U]."""
    queries: _Pick
    """Of the places that ask."""
    rows: int
    """How many."""
    before: int
    """How many tokens of each do not ask."""

    def rows_of(self, states: Tensor, pick: _Pick) -> Tensor:
        """[rows, heads, chosen places, size] the bucket's rows of packed states [1, heads, U, size]."""
        flat = states[0].transpose(0, 1).flatten(1)
        return _gather(flat, pick).view(self.rows, -1, *states.shape[1::2]).transpose(1, 2)


def _gather(values: Tensor, pick: _Pick) -> Tensor:
    found: Tensor = _Gather.apply(values, pick)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    """values[index], whose gradient is summed source by source: on a CPU many times faster than scattered."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pick: _Pick) -> Tensor:
        ctx.pick = pick
        return values.index_select(0, pick.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        pick: _Pick = ctx.pick
        given = gradients[0].contiguous()
        return nn.functional.embedding_bag(pick.order, given, pick.offsets, mode="sum"), None
