"""One pass of the unmodified module: prefixes of new rows, and one token of every running row.

    tokens of a pass     t t t t t | t t t | a b c d        packed: no layer but attention knows of rows
                         └ prefixes: t tokens ┘└ n rows ┘
    module(input_ids, position_ids, attention_plan=Pass) ── logits of the rows ──> [n, V]

    In every layer
        1. all keys and values into the cache, a prefix's for every slot that shares it
        2. prefixes side by side, causal ── [t, H, E] ┐
        3. each row's one query over its cache row ── [n, H, E] ┴─> [1, T, H, E]

So a new row reads its prefix and draws its first token in one pass. No Python here loops over rows or
tokens, or looks at a number that is not the shape of a tensor: a pass can be recorded (see recording).

Legend: T tokens of a pass, t of them of prefixes, n rows, P prefixes, X the longest prefix, m cache
places that prefixes fill, L cache positions read; H query heads, K key/value heads; D, E head sizes
of keys and values; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.models.attention import AttentionPlan, Scores, causal
from rillflow.models.routing import PLAN
from rillflow.rollout.native.cache import Layer
from rillflow.rollout.native.routes import ROUTES, RoutePlan
from rillflow.rollout.native.scheduler import Prefill


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """One token a row."""

    tokens: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64 the place of each within its row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefixes:
    """Prefixes laid end to end, and where their keys and values belong."""

    tokens: Tensor
    """[t] int64."""
    positions: Tensor
    """[t] int64 each token's place in its prefix."""
    spread: Tensor
    """[P, X] int64 the tokens side by side; past a prefix's end, its last token again."""
    gather: Tensor
    """[t] int64 where each token stands in that."""
    slots: Tensor
    """[m] int64 the slot of every cache place filled."""
    places: Tensor
    """[m] int64 its position."""
    sources: Tensor
    """[m] int64 the token that fills it."""

    @staticmethod
    def of(prefills: Sequence[Prefill], device: torch.device, fill: int = 0) -> Prefixes:
        """The prefixes of a step; ``fill`` tokens are added that nobody sees."""
        ends = [*accumulate((len(prefill.tokens) for prefill in prefills), initial=0)]
        own = [range(start, stop) for start, stop in pairwise(ends)]
        steps = [range(len(each)) for each in own]
        longest, tail = max(map(len, own)) + fill, [0] * fill
        filled = [(slot, each) for prefill, each in zip(prefills, own, strict=True) for slot in prefill.slots]
        columns: dict[str, list[Any]] = {  # in the order of the fields
            "tokens": [*chain.from_iterable(prefill.tokens for prefill in prefills), *tail],
            "positions": [*chain.from_iterable(steps), *tail],
            "spread": [[*each, *([each[-1]] * (longest - len(each)))] for each in own],
            "gather": [index * longest + step for index, each in enumerate(steps) for step in each] + tail,
            "slots": [*chain.from_iterable([slot] * len(each) for slot, each in filled)],
            "places": [*chain.from_iterable(range(len(each)) for _, each in filled)],
            "sources": [*chain.from_iterable(each for _, each in filled)],
        }
        return Prefixes.of_tensors(
            [torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in columns.values()]
        )

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor]) -> Prefixes:
        """The inverse of ``tensors``."""
        return Prefixes(**dict(zip((each.name for each in fields(Prefixes)), tensors, strict=True)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields, in order."""
        return tuple(vars(self).values())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[t, H, E] from ``query`` [t, H, D], ``key`` [t, K, D] and ``value`` [t, K, E]."""
        query, key, value = (states[self.spread].transpose(1, 2) for states in (query, key, value))
        seen = causal(query, key, value, scores)
        return seen.transpose(1, 2).flatten(0, 1)[self.gather]


class Pass:
    """The attention plan of one pass (see models.attention.AttentionPlan).

    Args:
        layers: keys and values by layer.
        feed: what the n rows feed; None when prefixes are read alone.
        places: [L] int64 the cache positions to read, 0 to L - 1.
        prefixes: what is read beside the rows; None when there are none.
    """

    def __init__(
        self, layers: Mapping[int, Layer], feed: Feed | None, places: Tensor, prefixes: Prefixes | None
    ) -> None:
        self._layers = layers
        self._positions = None if feed is None else feed.positions
        self._places = places
        self._prefixes = prefixes
        self._lines: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T, H, E]; see AttentionPlan."""
        stored = self._layers[layer]
        query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        self._store(stored.keys, key)
        self._store(stored.values, value)
        parts = []
        if self._prefixes is not None:
            read = self._prefixes.tokens.shape[0]
            parts.append(self._prefixes.attend(query[:read], key[:read], value[:read], scores))
            query = query[read:]
        if self._positions is not None:
            parts.append(self._look_back(query, self._positions, stored, scores))
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[None]

    def keep_routes(self, routes: Tensor) -> None:
        """Keep which experts the pass's tokens took [T, R, k] beside their keys and values."""
        self._store(self._layers[ROUTES].keys, routes)

    def _store(self, cached: Tensor, states: Tensor) -> None:
        """Put ``states`` [T, K, D] into ``cached`` [rows, K, length, D]."""
        heads, size = states.shape[1:]
        if self._prefixes is not None:
            read = self._prefixes.tokens.shape[0]
            states = torch.cat([states[self._prefixes.sources], states[read:]])
        if heads not in self._lines:
            self._lines[heads] = self._lines_of(heads, cached.shape[2])
        lines = states.reshape(-1, size).to(cached.dtype)
        cached.view(-1, size).index_copy_(0, self._lines[heads], lines)

    def _lines_of(self, heads: int, length: int) -> Tensor:
        """[(m + n) x K] which lines of the cache, laid flat, this pass fills."""
        slots, places = [], []
        if self._prefixes is not None:
            slots.append(self._prefixes.slots)
            places.append(self._prefixes.places)
        if self._positions is not None:
            slots.append(torch.arange(self._positions.shape[0], device=self._positions.device))
            places.append(self._positions)
        rows = torch.cat(slots)[:, None] * heads + torch.arange(heads, device=self._places.device)
        return (rows * length + torch.cat(places)[:, None]).flatten()

    def _look_back(self, query: Tensor, positions: Tensor, stored: Layer, scores: Scores) -> Tensor:
        """[n, H, E] each row's one query [n, H, D] over its cache."""
        rows, seen = positions.shape[0], self._places.shape[0]
        heads, size = query.shape[1:]
        groups = stored.keys.shape[1]
        keys, values = stored.keys[:rows, :, :seen], stored.values[:rows, :, :seen]
        bias = self._bias(positions, groups, scores.window, keys.dtype)
        # The query heads of one key head are as good as more queries: nothing is repeated.
        query = query.reshape(rows, groups, heads // groups, size)
        if not scores.is_plain:
            products = query.to(keys.dtype) @ keys.transpose(2, 3) * scores.scaling
            shares = scores.shares(products, bias.view(rows, -1, 1, seen)).to(values.dtype)
            return (shares @ values).view(rows, heads, -1).to(query.dtype)
        scale = scores.scaling
        if query.device.type != "cpu":
            found = nn.functional.scaled_dot_product_attention(query, keys, values, bias, scale=scale)
            return found.reshape(rows, heads, -1)
        # With one query a row, scaled_dot_product_attention takes a fifth longer than two products.
        grouped = query.flatten(0, 1).to(keys.dtype)
        products = torch.baddbmm(bias, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
        mixed = torch.bmm(products.softmax(-1), values.flatten(0, 1))
        return mixed.view(rows, heads, -1).to(query.dtype)

    def _bias(self, positions: Tensor, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a cache position, -inf elsewhere: [n x K, 1, L] on a CPU, else [n, 1, 1, L]."""
        if (groups, window) not in self._biases:
            hidden = self._places > positions[:, None]
            if window is not None:
                hidden = hidden | (self._places <= positions[:, None] - window)
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
    layers: Mapping[int, Layer],
    feed: Feed | None,
    places: Tensor,
    prefixes: Prefixes | None,
) -> Tensor:
    """One pass; what is read and fed leaves its keys and values in the layers.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        layers: its keys and values.
        feed: see ``Pass``, as ``places`` and ``prefixes``.

    Returns:
        [n, V] float32 logits of the token after each that is fed; of the last one without ``feed``.
    """
    parts = [part for part in (prefixes, feed) if part is not None]
    tokens = torch.cat([part.tokens for part in parts])
    positions = torch.cat([part.positions for part in parts])
    wanted = torch.arange(tokens.shape[0], device=tokens.device)
    wanted = wanted[-1:] if feed is None else wanted[-feed.tokens.shape[0] :]
    plan, routing = Pass(layers, feed, places, prefixes), RoutePlan()
    logits = call(module, tokens, positions, plan, wanted, **({PLAN: routing} if ROUTES in layers else {}))
    if ROUTES in layers:
        plan.keep_routes(routing.routes)
    return logits


def call(
    module: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan, wanted: Tensor, **more: Any
) -> Tensor:
    """One call of the module.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        tokens: [T] int64.
        positions: [T] int64 the place of each within its row.
        plan: attends in every layer.
        wanted: [n] int64 the tokens whose logits are wanted, the last ones.
        more: arguments of the module besides.

    Returns:
        [n, V] float32.
    """
    logits: Tensor = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        # Four dimensions say that the mask is made already: the library looks no further.
        attention_mask=torch.zeros(1, 1, 1, 1, device=tokens.device),
        attention_plan=plan,
        use_cache=False,
        logits_to_keep=wanted,
        **more,
    ).logits
    return logits[0, -wanted.shape[0] :].float()  # a module that cannot choose gives them all
