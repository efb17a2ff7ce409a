"""Runner: one pass of the unmodified module over prefixes and running rows together.

    prefixes of new rows   t t t t t | t t t |              packed: no layer but attention knows of rows
    one token a row                           | a b c d     n rows, slot by slot
                                └── module(input_ids, position_ids, attention_plan=Pass) ── logits [n, V]

In every layer the pass first writes all keys and values into the cache, for every slot that shares a
prefix; then prefixes attend among themselves and rows attend over the cache. So a new row reads its
prefix and draws its first token in one pass.

With ``fixed_rows`` every shape is fixed, whatever runs: a pass feeds all slots, reads the cache in
whole blocks, and a prefix is read alone, filled up to a whole block. See docs/design/rollout.md.

Legend: T tokens of a pass, t of them of prefixes, n rows, P prefixes, L cache positions read; H query
heads, K key/value heads, G = H / K; D, E head sizes of keys and values; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rillflow.errors import ModelError
from rillflow.models.attention import causal
from rillflow.rollout.native.cache import Cache, Layer
from rillflow.rollout.native.scheduler import Prefill, Step

BLOCK = 32
"""Fixed shapes are whole multiples of this: no matrix kernel meets a ragged edge."""
_CACHE_BLOCK = 64
"""Cache positions read are a multiple of this when shapes are fixed."""


class Prefixes:
    """Prefixes laid end to end, and where their keys and values belong.

    Args:
        prefills: what to read.
        device: of the module.
        fill: tokens to add at the end, which nobody sees.
    """

    def __init__(self, prefills: Sequence[Prefill], device: torch.device, fill: int = 0) -> None:
        lengths = [len(prefill.tokens) for prefill in prefills]
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        where: list[int] = []
        sources: list[int] = []
        for prefill, length in zip(prefills, lengths, strict=True):
            places = range(len(tokens), len(tokens) + length)
            tokens.extend(prefill.tokens)
            positions.extend(range(length))
            for slot in prefill.slots:
                slots.extend([slot] * length)
                where.extend(range(length))
                sources.extend(places)
        lengths[-1] += fill
        self.tokens = torch.tensor([*tokens, *([0] * fill)], device=device)
        """[t] int64."""
        self.positions = torch.tensor([*positions, *([0] * fill)], device=device)
        """[t] int64."""
        self.slots = torch.tensor(slots, device=device)
        """[m] int64 the slot of every cache place written."""
        self.where = torch.tensor(where, device=device)
        """[m] int64 its position."""
        self.sources = torch.tensor(sources, device=device)
        """[m] int64 the token written there."""
        self._shape = (len(lengths), max(lengths))
        self._even = min(lengths) == max(lengths)
        if not self._even:
            self._spread_out(torch.tensor(lengths, device=device))

    def _spread_out(self, lengths: Tensor) -> None:
        starts = lengths.cumsum(0) - lengths
        steps = torch.arange(self._shape[1], device=lengths.device)
        self._spread = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
        self._gather = (steps < lengths[:, None]).flatten().nonzero().flatten()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """[t, H, E] from ``query`` [t, H, D], ``key`` [t, K, D], ``value`` [t, K, E]."""
        side_by_side = [self._beside(states).transpose(1, 2) for states in (query, key, value)]
        seen = causal(*side_by_side, scaling=scaling, window=window).transpose(1, 2).flatten(0, 1)
        return seen if self._even else seen[self._gather]

    def _beside(self, states: Tensor) -> Tensor:
        return states.unflatten(0, self._shape) if self._even else states[self._spread]


class Pass:
    """The attention plan of one pass (see models.attention.AttentionPlan).

    Args:
        cache: where keys and values are.
        positions: [n] int64 the position each row feeds.
        longest: cache positions to read.
        prefixes: what is read beside the rows.
    """

    def __init__(self, cache: Cache, positions: Tensor, longest: int, prefixes: Prefixes | None) -> None:
        self._cache = cache
        self._positions = positions
        self._longest = longest
        self._prefixes = prefixes
        self._places: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}
        self.layers: list[int] = []
        """The layers that asked, in order."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """[1, T, H, E]; see AttentionPlan."""
        self.layers.append(layer)
        flat_query, flat_key, flat_value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        stored = self._cache.layer(layer, flat_key, flat_value)
        self._write(stored.keys, flat_key)
        self._write(stored.values, flat_value)
        parts = []
        read = 0
        if self._prefixes is not None:
            read = len(self._prefixes.tokens)
            parts.append(
                self._prefixes.attend(flat_query[:read], flat_key[:read], flat_value[:read], scaling, window)
            )
        if len(self._positions):
            parts.append(self._look_back(flat_query[read:], stored, scaling, window))
        return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None]

    def _write(self, cached: Tensor, states: Tensor) -> None:
        """Put ``states`` [T, K, D] into ``cached`` [rows, K, length, D]."""
        heads, size = states.shape[1:]
        if self._prefixes is not None:
            read = len(self._prefixes.tokens)
            states = torch.cat([states[self._prefixes.sources], states[read:]])
        if heads not in self._places:
            self._places[heads] = self._places_of(heads, cached.shape[2])
        cached.view(-1, size).index_copy_(
            0, self._places[heads], states.reshape(-1, size).to(cached.dtype)
        )

    def _places_of(self, heads: int, length: int) -> Tensor:
        """[m x K] the rows of the flat cache that this pass writes."""
        positions = self._positions
        slots = torch.arange(len(positions), device=positions.device)
        if self._prefixes is not None:
            slots = torch.cat([self._prefixes.slots, slots])
            positions = torch.cat([self._prefixes.where, positions])
        lines = slots[:, None] * heads + torch.arange(heads, device=positions.device)
        return (lines * length + positions[:, None]).flatten()

    def _look_back(self, query: Tensor, stored: Layer, scaling: float, window: int | None) -> Tensor:
        """[n, H, E] each row's one query [n, H, D] over its cache."""
        rows, heads, size = query.shape
        keys = stored.keys[:rows, :, : self._longest]
        values = stored.values[:rows, :, : self._longest]
        groups = keys.shape[1]
        bias = self._bias(groups, window, keys.dtype)
        if query.device.type != "cpu":
            seen = nn.functional.scaled_dot_product_attention(
                query.view(rows, groups, -1, size), keys, values, attn_mask=bias, scale=scaling
            )
            return seen.reshape(rows, heads, -1)
        # Two batched products take 0.8 of the time of scaled_dot_product_attention here: one query a
        # row leaves its blocks nearly empty.
        grouped = query.reshape(rows * groups, -1, size).to(keys.dtype)
        scores = torch.baddbmm(bias, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scaling)
        seen = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
        return seen.view(rows, heads, -1).to(query.dtype)

    def _bias(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a cache position, -inf elsewhere: [n, 1, 1, L], on a CPU [n x K, 1, L]."""
        if (groups, window) not in self._biases:
            places = torch.arange(self._longest, device=self._positions.device)
            ahead = places > self._positions[:, None]
            if window is not None:
                ahead |= places <= self._positions[:, None] - window
            bias = torch.zeros(ahead.shape, dtype=dtype, device=ahead.device).masked_fill_(ahead, -torch.inf)
            on_cpu = ahead.device.type == "cpu"
            bias = bias.repeat_interleave(groups, 0)[:, None] if on_cpu else bias[:, None, None]
            self._biases[groups, window] = bias
        return self._biases[groups, window]


class Runner:
    """The module and its cache.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        fixed_rows: how many slots every pass feeds; None feeds those that run.
    """

    def __init__(self, module: nn.Module, fixed_rows: int | None = None) -> None:
        self.module = module
        self.cache = Cache()
        self._fixed_rows = fixed_rows

    def run(self, step: Step, tokens: Tensor, positions: Tensor, limit: int) -> Tensor:
        """Do what a step says.

        Args:
            step: the instructions.
            tokens: [n] int64 what each slot feeds; with ``fixed_rows`` all slots, idle ones anything.
            positions: [n] int64 and where.
            limit: cache positions that no running row exceeds.

        Returns:
            [n, V] float32 logits of the token after the fed one.
        """
        length = step.longest if self._fixed_rows is None else _whole(step.longest, _CACHE_BLOCK)
        self.cache.reserve(len(positions), length, max(limit, length))
        self.cache.copy(step.copies)
        self.cache.copy(step.moves)
        if self._fixed_rows is None:
            prefixes = Prefixes(step.prefills, tokens.device) if step.prefills else None
            return self.forward(tokens, positions, length, prefixes)
        for prefill in step.prefills:
            fill = -len(prefill.tokens) % BLOCK
            self.forward(tokens[:0], positions[:0], length, Prefixes([prefill], tokens.device, fill))
        return self.forward(tokens, positions, length, None)

    def forward(self, tokens: Tensor, positions: Tensor, longest: int, prefixes: Prefixes | None) -> Tensor:
        """[n, V] float32 logits of one pass; see ``Pass``."""
        rows = len(tokens)
        plan = Pass(self.cache, positions, longest, prefixes)
        if prefixes is not None:
            tokens = torch.cat([prefixes.tokens, tokens])
            positions = torch.cat([prefixes.positions, positions])
        logits = self._call(tokens, positions, plan, keep=max(rows, 1))
        return logits[0, logits.shape[1] - rows :].float()

    def _call(self, tokens: Tensor, positions: Tensor, plan: Pass, keep: int) -> Tensor:
        """[1, at least keep, V] the last logits; a module that cannot leave out the others gives them all."""
        logits: Tensor = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            attention_plan=plan,
            use_cache=False,
            logits_to_keep=keep,
        ).logits
        return logits


def _whole(count: int, block: int) -> int:
    return -(-count // block) * block


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout and recomputation inside, every part as it was afterwards."""
    training = [part for part in module.modules() if part.training] if module.training else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
