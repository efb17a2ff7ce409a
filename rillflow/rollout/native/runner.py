"""Runner: one pass of the unmodified module over prefixes and running rows together.

    prefixes of new rows   t t t t t | t t t |              packed: no layer but attention knows of rows
    one token a row                           | a b c d     n rows, slot by slot
                                └── module(input_ids, position_ids, attention_plan=Pass) ── logits [n, V]

With ``fixed_rows`` every shape is fixed, whatever runs: a pass feeds all slots, reads the cache in
whole blocks, and each prefix is read alone, filled up to a whole block. See docs/design/rollout.md.

Legend: T tokens of a pass, n rows, V vocabulary, L cache positions read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rillflow.models.attention import AttentionPlan
from rillflow.rollout.native.attend import Pass, Prefixes
from rillflow.rollout.native.cache import Cache
from rillflow.rollout.native.scheduler import Step
from rillflow.rollout.native.slots import Feed

BLOCK = 32
"""Fixed shapes are whole multiples of this: no matrix kernel meets a ragged edge."""
CACHE_BLOCK = 64
"""Cache positions read are a multiple of this when shapes are fixed."""


def call(module: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan, keep: int) -> Tensor:
    """One pass of the module.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        tokens: [T] int64.
        positions: [T] int64 the place of each within its row.
        plan: attends in every layer.
        keep: how many logits are wanted, the last ones.

    Returns:
        [keep, V] float32.
    """
    logits: Tensor = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        # Four dimensions say that the mask is made already: the library looks no further.
        attention_mask=torch.zeros(1, 1, 1, 1, device=tokens.device),
        attention_plan=plan,
        use_cache=False,
        logits_to_keep=max(keep, 1),
    ).logits
    return logits[0, logits.shape[1] - keep :].float()


def forward(module: nn.Module, cache: Cache, feed: Feed, places: Tensor, prefixes: Prefixes | None) -> Tensor:
    """[n, V] float32 logits of the rows; prefixes and rows leave their keys and values in the cache.

    Args:
        module: see ``call``.
        cache: with room for all of it.
        feed: [n] a token a row.
        places: [L] the cache positions to read.
        prefixes: what is read beside the rows.
    """
    tokens, positions = feed.tokens, feed.positions
    if prefixes is not None:
        tokens = torch.cat([prefixes.tokens, tokens])
        positions = torch.cat([prefixes.positions, positions])
    plan = Pass(cache.layers, feed.positions, places, prefixes)
    return call(module, tokens, positions, plan, keep=len(feed.tokens))


class Runner:
    """The module and its cache.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        cache: made for it.
        fixed_rows: how many slots every pass feeds; None feeds those that run.
    """

    def __init__(self, module: nn.Module, cache: Cache, fixed_rows: int | None = None) -> None:
        self._module = module
        self._cache = cache
        self._fixed_rows = fixed_rows

    def run(self, step: Step, feed: Feed, limit: int) -> Tensor:
        """Do what a step says.

        Args:
            step: the instructions.
            feed: what each of n slots feeds; with ``fixed_rows`` all slots do.
            limit: cache positions that no running row exceeds.

        Returns:
            [n, V] float32 logits of the token after the fed one.
        """
        fixed = self._fixed_rows is not None
        length = -(-step.longest // CACHE_BLOCK) * CACHE_BLOCK if fixed else step.longest
        device = feed.tokens.device
        self._cache.reserve(len(feed.tokens), length, limit)
        self._cache.copy(step.copies)
        self._cache.copy(step.moves)
        prefixes = None
        if fixed:
            for prefill in step.prefills:
                fill = -len(prefill.tokens) % BLOCK
                self._pass(
                    Feed.same(token=0, position=0, rows=0, device=device),
                    length,
                    Prefixes.of([prefill], device, fill),
                )
        elif step.prefills:
            prefixes = Prefixes.of(step.prefills, device)
        return self._pass(feed, length, prefixes)

    def release(self) -> None:
        """Give the cache's memory back."""
        self._cache.release()

    def _pass(self, feed: Feed, length: int, prefixes: Prefixes | None) -> Tensor:
        places = torch.arange(length, device=feed.tokens.device)
        return forward(self._module, self._cache, feed, places, prefixes)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout and recomputation inside; afterwards every part is as it was."""
    training = [part for part in module.modules() if part.training] if module.training else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
