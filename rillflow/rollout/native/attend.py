"""The attention of one pass: prefixes among themselves, running rows over the cache.

    tokens of a pass     t t t t t | t t t | a b c d
    query, key, value    └ prefixes: t tokens ┘└ n rows ┘
        1. all keys and values into the cache, a prefix's for every slot that shares it
        2. prefixes side by side, causal ── [t, H, E] ┐
        3. each row's one query over its cache row ── [n, H, E] ┴─> [1, T, H, E]

Nothing here depends on the number of rows or tokens but through the shape of a tensor, and no
Python loop runs over either.

Legend: T tokens of a pass, t of them of prefixes, n rows, P prefixes, X the longest prefix, m cache
places that prefixes fill, L cache positions read; H query heads, K key/value heads; D, E head sizes
of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rillflow.models.attention import causal
from rillflow.rollout.native.cache import Layer
from rillflow.rollout.native.scheduler import Prefill


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
        lengths = [len(prefill.tokens) for prefill in prefills]
        longest = max(lengths) + fill
        tokens: list[int] = []
        positions: list[int] = []
        spread: list[list[int]] = []
        gather: list[int] = []
        slots: list[int] = []
        places: list[int] = []
        sources: list[int] = []
        for index, (prefill, length) in enumerate(zip(prefills, lengths, strict=True)):
            own = range(len(tokens), len(tokens) + length)
            spread.append([*own, *([own[-1]] * (longest - length))])
            gather.extend(range(index * longest, index * longest + length))
            tokens.extend(prefill.tokens)
            positions.extend(range(length))
            for slot in prefill.slots:
                slots.extend([slot] * length)
                places.extend(range(length))
                sources.extend(own)
        tail = [0] * fill

        def on_device(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return Prefixes(
            tokens=on_device(tokens + tail),
            positions=on_device(positions + tail),
            spread=on_device(spread),
            gather=on_device(gather + tail),
            slots=on_device(slots),
            places=on_device(places),
            sources=on_device(sources),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """[t, H, E] from ``query`` [t, H, D], ``key`` [t, K, D] and ``value`` [t, K, E]."""
        query, key, value = (states[self.spread].transpose(1, 2) for states in (query, key, value))
        seen = causal(query, key, value, scaling, window)
        return seen.transpose(1, 2).flatten(0, 1)[self.gather]


class Pass:
    """The attention plan of one pass (see models.attention.AttentionPlan).

    Args:
        layers: keys and values by layer.
        positions: [n] int64 the position each row feeds.
        places: [L] int64 the cache positions to read, 0 to L - 1.
        prefixes: what is read beside the rows.
    """

    def __init__(
        self, layers: Mapping[int, Layer], positions: Tensor, places: Tensor, prefixes: Prefixes | None
    ) -> None:
        self._layers = layers
        self._positions = positions
        self._places = places
        self._prefixes = prefixes
        self._lines: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """[1, T, H, E]; see AttentionPlan."""
        stored = self._layers[layer]
        query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        self._store(stored.keys, key)
        self._store(stored.values, value)
        if self._prefixes is None:
            return self._look_back(query, stored, scaling, window)[None]
        read = self._prefixes.tokens.shape[0]
        parts = self._prefixes.attend(query[:read], key[:read], value[:read], scaling, window)
        if self._positions.shape[0]:
            parts = torch.cat([parts, self._look_back(query[read:], stored, scaling, window)])
        return parts[None]

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
        device = self._positions.device
        slots, places = torch.arange(self._positions.shape[0], device=device), self._positions
        if self._prefixes is not None:
            slots = torch.cat([self._prefixes.slots, slots])
            places = torch.cat([self._prefixes.places, places])
        rows = slots[:, None] * heads + torch.arange(heads, device=device)
        return (rows * length + places[:, None]).flatten()

    def _look_back(self, query: Tensor, stored: Layer, scaling: float, window: int | None) -> Tensor:
        """[n, H, E] each row's one query [n, H, D] over its cache."""
        rows, seen = self._positions.shape[0], self._places.shape[0]
        heads, size = query.shape[1:]
        groups = stored.keys.shape[1]
        keys, values = stored.keys[:rows, :, :seen], stored.values[:rows, :, :seen]
        bias = self._bias(groups, window, keys.dtype)
        # The query heads of one key head are as good as more queries: nothing is repeated.
        query = query.reshape(rows, groups, heads // groups, size)
        if query.device.type != "cpu":
            found = nn.functional.scaled_dot_product_attention(query, keys, values, bias, scale=scaling)
            return found.reshape(rows, heads, -1)
        # With one query a row, scaled_dot_product_attention takes a fifth longer than two products.
        grouped = query.flatten(0, 1).to(keys.dtype)
        scores = torch.baddbmm(bias, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scaling)
        mixed = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
        return mixed.view(rows, heads, -1).to(query.dtype)

    def _bias(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a cache position, -inf elsewhere: [n x K, 1, L] on a CPU, else [n, 1, 1, L]."""
        if (groups, window) not in self._biases:
            positions = self._positions[:, None]
            hidden = self._places > positions
            if window is not None:
                hidden = hidden | (self._places <= positions - window)
            bias = torch.where(hidden, -torch.inf, 0.0).to(dtype)
            on_cpu = bias.device.type == "cpu"
            self._biases[groups, window] = (
                bias.repeat_interleave(groups, 0)[:, None] if on_cpu else bias[:, None, None]
            )
        return self._biases[groups, window]
