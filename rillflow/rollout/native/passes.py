"""One pass of the unmodified module: prefixes of new rows, and one token of every running row.

    tokens of a pass     t t t t t | t t t | a b c d        packed: only attention distinguishes rows
                         └ prefixes: t tokens ┘└ n rows ┘
    module(input_ids, position_ids, attention_plan=Pass) ── logits of the rows ──> [n, V]

    In every layer
        1. all keys and values into the cache, a prefix's for every slot that shares it
        2. prefixes side by side, causal ── [t, H, E] ┐
        3. each row's one query over its cache row ── [n, H, E] ┴─> [1, T, H, E]

So a new row reads its prefix and draws its first token in one pass. No Python code here loops over rows or
tokens, or reads values of tensors other than their shapes, so a pass can be recorded (see runner).

The experts that tokens take are one more layer of the cache:

    a pass ── chosen [T, k] by each router ──> keys of the layer ROUTES [rows, R, length, k]
    a row ends ── its part of that layer ──> rollout.routes [T, R, k] int16

So routes are shared, copied, moved and recomputed together with keys and values: a row's routes come from
the passes that computed the keys and values its later tokens attended to. Expert numbers are stored in the
cache's dtype; a narrow one represents integers up to 256 exactly.

Legend: T tokens of a pass, t of them in prefixes, n rows, P prefixes, X the longest prefix, m cache positions
that prefixes fill, L cache positions read; H query heads, K key/value heads; D, E head sizes of keys and
values; R routers, k experts of a token; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rillflow.errors import ModelError
from rillflow.models.architecture import trial
from rillflow.models.attention import AttentionPlan, Scores, causal
from rillflow.models.routing import PLAN, RoutePlan, Routers
from rillflow.rollout.native.cache import Layer, LayerShape
from rillflow.rollout.native.scheduler import Prefill


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """One token per row."""

    tokens: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64 position of each token in its row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """The reads and writes of a pass in one bucket."""

    read: Tensor
    """[L] int64 the cache positions to read, 0 to L - 1."""
    positions: Tensor
    """[n] int64 positions of this bucket's fed tokens in their rows."""
    filled: Tensor
    """[3, m] int64 row and position of every cache position that prefixes fill, and index of its token."""
    rows: Tensor | None = None
    """[n] int64 row of the bucket that each fed token writes; None for rows 0 to n - 1."""

    @staticmethod
    def of(
        names: Sequence[int], reaches: Sequence[int], positions: Sequence[Tensor], prefills: Sequence[Prefill]
    ) -> dict[int, Segment]:
        """Return the segments of a pass, by the name of the bucket; prefixes are laid end to end in order."""
        filled: dict[int, list[list[int]]] = {name: [[], [], []] for name in names}
        start, device = 0, positions[0].device
        for prefill in prefills:
            size = len(prefill.tokens)
            for cache_row in prefill.cache_rows:
                rows, positions_of_rows, sources = filled[cache_row.bucket]
                rows += [cache_row.row] * size
                positions_of_rows += range(prefill.begin, prefill.begin + size)
                sources += range(start, start + size)
            start += size
        return {
            name: Segment(
                read=torch.arange(reach, device=device),
                positions=own,
                filled=torch.tensor(filled[name], dtype=torch.int64, device=device),
            )
            for name, reach, own in zip(names, reaches, positions, strict=True)
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefixes:
    """Prefixes laid end to end."""

    tokens: Tensor
    """[t] int64."""
    positions: Tensor
    """[t] int64 position of each token in its prefix."""
    spread: Tensor
    """[P, X] int64 indices of the tokens, one prefix per line, padded with its last token."""
    gather: Tensor
    """[t] int64 index of each token in the flattened ``spread``."""

    @staticmethod
    def of(prefills: Sequence[Prefill], device: torch.device, fill: int = 0) -> Prefixes:
        """Return the prefixes of a step, with ``fill`` padding tokens that nothing attends to."""
        ends = [*accumulate((len(prefill.tokens) for prefill in prefills), initial=0)]
        own = [range(start, stop) for start, stop in pairwise(ends)]
        steps = [range(len(each)) for each in own]
        longest, tail = max(map(len, own)) + fill, [0] * fill
        columns: dict[str, list[Any]] = {  # in the order of the fields
            "tokens": [*chain.from_iterable(prefill.tokens for prefill in prefills), *tail],
            "positions": [*chain.from_iterable(steps), *tail],
            "spread": [[*each, *([each[-1]] * (longest - len(each)))] for each in own],
            "gather": [index * longest + step for index, each in enumerate(steps) for step in each] + tail,
        }
        return Prefixes.of_tensors(
            [torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in columns.values()]
        )

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor]) -> Prefixes:
        """Return the prefixes built from their ``tensors``."""
        return Prefixes(**dict(zip((each.name for each in fields(Prefixes)), tensors, strict=True)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields, in order."""
        return tuple(vars(self).values())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return [t, H, E] from ``query`` [t, H, D], ``key`` [t, K, D] and ``value`` [t, K, E]."""
        query, key, value = (states[self.spread].transpose(1, 2) for states in (query, key, value))
        seen = causal(query, key, value, scores)
        return seen.transpose(1, 2).flatten(0, 1)[self.gather]


@dataclass(frozen=True, kw_only=True, eq=False)
class Continued:
    """Later parts of prefixes, laid end to end; their first parts are already in the cache."""

    tokens: Tensor
    """[t] int64."""
    positions: Tensor
    """[t] int64 position of each token in its prefix."""
    prefills: tuple[Prefill, ...]
    """The parts; each attends over the cache of its first row."""

    @staticmethod
    def of(prefills: Sequence[Prefill], device: torch.device, fill: int = 0) -> Continued:
        """Return the parts of a step, with ``fill`` padding tokens that nothing attends to."""
        tokens = [*chain.from_iterable(prefill.tokens for prefill in prefills), *[0] * fill]
        own = [range(prefill.begin, prefill.begin + len(prefill.tokens)) for prefill in prefills]
        positions = [*chain.from_iterable(own), *[0] * fill]
        return Continued(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            prefills=tuple(prefills),
        )

    def attend(self, query: Tensor, buckets: Mapping[int, Layer], scores: Scores) -> Tensor:
        """Return [t, H, E] from ``query`` [t, H, D] over the cache, which also holds the parts themselves."""
        parts, start = [], 0
        for prefill in self.prefills:
            stop, (bucket, row) = start + len(prefill.tokens), prefill.cache_rows[0]
            keys, values = buckets[bucket].until(prefill.begin + len(prefill.tokens))
            own = query[start:stop].transpose(0, 1)[None].to(keys.dtype)
            seen = causal(own, keys[row : row + 1], values[row : row + 1], scores, prefill.begin)
            parts.append(seen[0].transpose(0, 1).to(query.dtype))
            start = stop
        return torch.cat([*parts, parts[0].new_zeros(query.shape[0] - start, *parts[0].shape[1:])])


class Pass:
    """The attention plan of one pass (see models.attention.AttentionPlan).

    Args:
        layers: keys and values by layer and bucket.
        segments: reads and writes of every bucket, by name, in the order of slots.
        feeds: whether rows are fed; otherwise only prefixes are read.
        prefixes: whole prefixes to read; None for none.
        continued: parts of prefixes to read whose first parts are cached; None for none.
    """

    def __init__(
        self,
        layers: Mapping[int, Mapping[int, Layer]],
        segments: Mapping[int, Segment],
        *,
        feeds: bool,
        prefixes: Prefixes | None,
        continued: Continued | None,
    ) -> None:
        self._layers = layers
        self._feeds, self._prefixes, self._continued = feeds, prefixes, continued
        read = [part.tokens.shape[0] for part in (prefixes, continued) if part is not None]
        self._begin = sum(read)
        self._windows = {name: _Window(segment, bool(read)) for name, segment in segments.items()}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return [1, T, H, E]; see AttentionPlan."""
        query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        for each, bucket, own in self._shares(layer):
            each.store(bucket.keys, key[: self._begin], key[own])
            each.store(bucket.values, value[: self._begin], value[own])
        parts = []
        if self._prefixes is not None:
            fresh = slice(0, self._prefixes.tokens.shape[0])
            parts.append(self._prefixes.attend(query[fresh], key[fresh], value[fresh], scores))
        if self._continued is not None:
            later = query[self._begin - self._continued.tokens.shape[0] : self._begin]
            parts.append(self._continued.attend(later, self._layers[layer], scores))
        if self._feeds:
            parts += [each.look_back(query[own], bucket, scores) for each, bucket, own in self._shares(layer)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[None]

    def keep_routes(self, routes: Tensor) -> None:
        """Store the experts of the pass's tokens, [T, R, k], in the cache next to their keys and values."""
        for each, bucket, own in self._shares(ROUTES):
            each.store(bucket.keys, routes[: self._begin], routes[own])

    def _shares(self, layer: int) -> Iterator[tuple[_Window, Layer, slice]]:
        """Yield every bucket's window, its keys and values of the layer, and its slice of the fed tokens."""
        start = self._begin
        for name, each in self._windows.items():
            stop = start + each.positions.shape[0]
            yield each, self._layers[layer][name], slice(start, stop if len(self._windows) > 1 else None)
            start = stop


class _Window:
    """One bucket in one pass.

    Args:
        segment: reads and writes of the bucket.
        reads: whether the pass reads prefixes.
    """

    def __init__(self, segment: Segment, reads: bool) -> None:
        self._read, self.positions, self._rows = segment.read, segment.positions, segment.rows
        self._filled = segment.filled if reads else None
        self._lines: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def store(self, cached: Tensor, read: Tensor, fed: Tensor) -> None:
        """Store states of prefixes, ``read`` [t, K, D], and of rows, ``fed`` [n, K, D], in the cache.

        Args:
            cached: [rows, K, length, D].
        """
        heads, size = fed.shape[1:]
        states = fed if self._filled is None else torch.cat([read[self._filled[2]], fed])
        if heads not in self._lines:
            self._lines[heads] = self._lines_of(heads, cached.shape[2])
        lines = states.reshape(-1, size).to(cached.dtype)
        cached.view(-1, size).index_copy_(0, self._lines[heads], lines)

    def _lines_of(self, heads: int, length: int) -> Tensor:
        """Return [(m + n) x K] indices of the flattened cache's lines that this pass fills."""
        slots, at = self._rows, self.positions
        if slots is None:
            slots = torch.arange(at.shape[0], device=self._read.device)
        if self._filled is not None:
            slots, at = torch.cat([self._filled[0], slots]), torch.cat([self._filled[1], at])
        rows = slots[:, None] * heads + torch.arange(heads, device=self._read.device)
        return (rows * length + at[:, None]).flatten()

    def look_back(self, query: Tensor, stored: Layer, scores: Scores) -> Tensor:
        """Return [n, H, E]: the attention of each row's single query, [n, H, D], over its cache."""
        rows, seen = self.positions.shape[0], self._read.shape[0]
        heads, size = query.shape[1:]
        groups = stored.keys.shape[1]
        keys, values = stored.keys[:rows, :, :seen], stored.values[:rows, :, :seen]
        bias = self._bias(groups, scores.window, keys.dtype)
        # The query heads of a key head act as additional queries, so no key is repeated.
        query = query.reshape(rows, groups, heads // groups, size)
        if not scores.is_plain:
            products = query.to(keys.dtype) @ keys.transpose(2, 3) * scores.scaling
            shares = scores.shares(products, bias.view(rows, -1, 1, seen)).to(values.dtype)
            return (shares @ values).view(rows, heads, -1).to(query.dtype)
        scale = scores.scaling
        if query.device.type != "cpu":
            found = nn.functional.scaled_dot_product_attention(query, keys, values, bias, scale=scale)
            return found.reshape(rows, heads, -1)
        # With one query per row, scaled_dot_product_attention takes a fifth longer than two products.
        grouped = query.flatten(0, 1).to(keys.dtype)
        products = torch.baddbmm(bias, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
        mixed = torch.bmm(products.softmax(-1), values.flatten(0, 1))
        return mixed.view(rows, heads, -1).to(query.dtype)

    def _bias(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return 0 where a row attends, else -inf: [n x K, 1, L] on a CPU, [n, 1, 1, L] on other devices."""
        if (groups, window) not in self._biases:
            positions = self.positions
            hidden = self._read > positions[:, None]
            if window is not None:
                hidden = hidden | (self._read <= positions[:, None] - window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
            if bias.device.type == "cpu":
                each = bias[:, None].expand(-1, groups, -1)
                self._biases[groups, window] = each.reshape(-1, 1, bias.shape[1])
            else:
                self._biases[groups, window] = bias[:, None, None]
        return self._biases[groups, window]


def forward(
    module: nn.Module,
    layers: Mapping[int, Mapping[int, Layer]],
    segments: Mapping[int, Segment],
    tokens: Tensor | None,
    prefixes: Prefixes | None = None,
    continued: Continued | None = None,
) -> Tensor:
    """Run one pass; store the keys and values of its tokens in the layers.

    Args:
        module: a transformers causal language model with Rillflow's attention.
        layers: keys and values by layer and bucket.
        segments: see ``Pass``, also for ``prefixes`` and ``continued``.
        tokens: [n] int64 tokens fed to rows; None to read prefixes only.

    Returns:
        [n, V] float32 logits of the token after each fed one; without ``tokens``, after the last prefix
        token.
    """
    plan = Pass(layers, segments, feeds=tokens is not None, prefixes=prefixes, continued=continued)
    read = [part for part in (prefixes, continued) if part is not None]
    taken, positions = [part.tokens for part in read], [part.positions for part in read]
    if tokens is not None:
        taken.append(tokens)
        positions += [segment.positions for segment in segments.values()]
    every = torch.cat(taken)
    wanted = torch.arange(every.shape[0], device=every.device)
    wanted = wanted[-1:] if tokens is None else wanted[-tokens.shape[0] :]
    routing = RoutePlan()
    more = {PLAN: routing} if ROUTES in layers else {}
    logits = call(module, every, torch.cat(positions), plan, wanted, **more)
    if more:
        plan.keep_routes(routing.routes)
    return logits


def call(
    module: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan, wanted: Tensor, **more: Any
) -> Tensor:
    """Call the module once.

    Args:
        module: a transformers causal language model with Rillflow's attention.
        tokens: [T] int64.
        positions: [T] int64 position of each token in its row.
        plan: the attention plan of every layer.
        wanted: [n] int64 indices of the tokens whose logits are returned: the last ones.
        more: further arguments of the module.

    Returns:
        [n, V] float32.
    """
    logits: Tensor = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        # Transformers takes a mask of four dimensions as final and builds no other.
        attention_mask=torch.zeros(1, 1, 1, 1, device=tokens.device),
        attention_plan=plan,
        use_cache=False,
        logits_to_keep=wanted,
        **more,
    ).logits
    return logits[0, -wanted.shape[0] :].float()  # a module without logits_to_keep returns all logits


ROUTES = -1
"""Index of the cache layer that stores routes."""
_EXACT = 257
"""Number of integers from 0 on that bfloat16 represents exactly."""


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
        keys: [rows, R, length, k] of the layer ROUTES, in the row's bucket.
        row: index of the row in the bucket.
        tokens: T.
    """
    found = keys[row, :, : tokens - 1].transpose(0, 1).to(torch.int16).cpu()
    return pad(found, (0, 0, 0, 0, 0, 1), value=-1)
