"""Sequence: one row while the engine has it.

    tokens    p p p p p s s s . . .      p prompt, s sampled before (a resumed row)
    prefix    └──────────────┘           read at once: keys and values alone are wanted
    fed one by one           └ s . . .   each pass reads one token and draws the next

A row at step ``t`` feeds the token at position ``t - start_step``, because a running row moves by one
token in every step. So ``start_step`` alone says where a row is, and nothing has to be counted.
No torch here: scheduling is arithmetic on such numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.rollout.config import SamplingConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.rollout import Rollout


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One row, from ``add`` until it is handed back."""

    rollout: Rollout
    """The row's tokens as far as they were collected."""
    sampling: SamplingConfig
    """How its tokens are drawn."""
    prefix: tuple[int, ...]
    """The tokens whose keys and values are made in one go; the token after them is fed first."""
    limit: int
    """Tokens at which the row ends, prompt included."""
    slot: int = -1
    """Its place among the running rows; -1 while it waits."""
    start_step: int = 0
    """The step at which position 0 would have been fed."""
    first_sample_step: int = 0
    """The step of its first own draw; until then it repeats tokens it has."""
    last_step: int = 0
    """The step whose draw reaches the limit."""
    collected_step: int = 0
    """The first step whose draw is not yet in ``rollout``."""
    uniforms: Tensor | None = None
    """Random numbers of its first draws, made in bulk while it waits; None when not made yet."""

    @property
    def group(self) -> tuple[int, int]:
        """Which prompt this is a sample of."""
        return self.rollout.row.epoch, self.rollout.row.prompt

    def shares(self, other: Sequence) -> bool:
        """Whether the other's keys and values of the prefix are this one's too."""
        return self.prefix is other.prefix or (self.group == other.group and self.prefix == other.prefix)

    def start(self, slot: int, clock: int) -> None:
        """Run from step ``clock`` on: feed the token after the prefix."""
        self.slot = slot
        self.start_step = clock - len(self.prefix)
        self.first_sample_step = self.collected_step = self.start_step + len(self.rollout.tokens) - 1
        self.last_step = self.start_step + self.limit - 2

    def wait(self) -> None:
        """Leave the running rows; whatever was made for the old position is void."""
        self.slot = -1
        self.uniforms = None
