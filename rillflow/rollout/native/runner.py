"""Runner: the module and its cache, doing what a step says.

    Step ─┬─ copies, moves ──────────────> Cache ─┐
          ├─ prefills ─> Prefixes ─┐              │
    Slots ┴─ Feed ─────────────────┴─> pass <─────┘ ─> logits [n, V]

With ``fixed_rows`` every shape is fixed, whatever runs: a pass feeds all slots, reads the cache in
whole blocks, and each prefix is read alone, filled up to a whole block. See docs/design/rollout.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rillflow.rollout.native.cache import Cache
from rillflow.rollout.native.passes import Feed, Prefixes
from rillflow.rollout.native.recording import RecordedModule
from rillflow.rollout.native.scheduler import Step

BLOCK = 32
"""Fixed shapes are whole multiples of this: no matrix kernel meets a ragged edge."""
CACHE_BLOCK = 64
"""Cache positions read are a multiple of this when shapes are fixed."""


class Runner:
    """The module and its cache.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        cache: made for it.
        fixed_rows: how many slots every pass feeds; None feeds those that run.
    """

    def __init__(self, module: RecordedModule, cache: Cache, fixed_rows: int | None = None) -> None:
        self._module = module
        self.cache = cache
        """Keys and values of the running rows."""
        self._fixed_rows = fixed_rows
        self._idle = True

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
        if self._idle:
            self._module.check_weights()
            self._idle = False
        self.cache.reserve(len(feed.tokens), length, limit)
        self.cache.copy(step.copies)
        self.cache.copy(step.moves)
        device = feed.tokens.device
        layers, places = self.cache.layers, torch.arange(length, device=device)
        if fixed:
            for prefill in step.prefills:
                fill = -len(prefill.tokens) % BLOCK
                self._module.forward(layers, None, places, Prefixes.of([prefill], device, fill))
            return self._module.forward(layers, feed, places, None)
        prefixes = Prefixes.of(step.prefills, device) if step.prefills else None
        return self._module.forward(layers, feed, places, prefixes)

    def release(self) -> None:
        """Give the cache's memory back; weights may be exchanged after that."""
        self.cache.release()
        self._idle = True


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
