"""EngineWrapper: base of the engines whose rows agents or environments write together with the policy."""

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
from rillflow.serving.tool_calls import tool_format
from rillflow.tasks.encoded import Encoder

LONGEST_WAIT_S = 1.0
"""Longest wait in seconds of one ``step`` in which no row is sampled."""


class EngineWrapper(RowByRow):
    """An engine that samples with another one, which needs ``Capability.ROWS``.

    Args: see Engine; and
        inner: constructs the engine that samples.
        encoder: encodes what agents or environments say.
        stack: closed when the rank ends.
    """

    can: ClassVar = frozenset(Capability) - {Capability.LOOK, Capability.CACHE}

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        inner: Callable[..., Engine],
        encoder: Encoder,
        stack: ExitStack,
        **given: object,
    ) -> None:
        self._inner, self._config = inner(module, config, **given), config
        self._encoder, self._stack = encoder, stack
        self._tools = tool_format(config.tool_format, encoder.tokenizer)
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
        """Let an agent or an environment begin a row from its prompt."""
        self._waiting.append((rollout, sampling or self._config))

    def abort(self, row: RowId) -> Rollout:
        """Remove a row and return it as it was added: its agent or environment cannot be paused."""
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
