"""EngineWrapper: base of the engines whose rows something else writes together with the policy.

    rows ─ add ─> waiting ─> a derived class ─ add ─> inner engine: samples a turn
    ended rows <─ step ──────────┴── what is said next <── step ──┘

The engines of agents and of environments derive from it; ``Plugin.writers`` brings further ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import ClassVar

from torch import nn

from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability, Engine, RowByRow

LONGEST_WAIT_S = 1.0
"""Longest wait in seconds of one ``step`` in which no row is sampled."""


class EngineWrapper(RowByRow):
    """An engine that samples with another one, which needs ``Capability.ROWS``.

    Args: see Engine; and
        inner: constructs the engine that samples.
        stack: closed when the rank ends.
    """

    can: ClassVar = frozenset(Capability) - {Capability.LOOK, Capability.CACHE}

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        inner: Callable[..., Engine],
        stack: ExitStack,
        **given: object,
    ) -> None:
        self._inner, self._config = inner(module, config, **given), config
        self._stack = stack
        self._waiting = deque[tuple[Rollout, SamplingConfig]]()

    @property
    def held_bytes(self) -> int:
        """See Engine."""
        return self._inner.held_bytes

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine."""
        return self._inner.score(texts)

    def sleep(self) -> None:
        """See Engine."""
        self._inner.sleep()

    def wake(self) -> None:
        """See Engine."""
        self._inner.wake()

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Begin a row from its prompt, once there is room."""
        self._waiting.append((rollout, sampling or self._config))

    def abort(self, row: RowId) -> Rollout:
        """Remove a row and return it as it was added: what writes it cannot be paused."""
        for waiting in self._waiting:
            if waiting[0].row == row:
                self._waiting.remove(waiting)
                return waiting[0]
        return self._taken_out(row)

    def look(self, row: RowId) -> Rollout:
        """See Engine; never called."""
        raise NotImplementedError

    @abstractmethod
    def _taken_out(self, row: RowId) -> Rollout:
        """Remove a row that has begun; return it as it was added."""
