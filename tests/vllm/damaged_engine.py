"""vLLM engines with damaged weights, or whose server is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rillflow.models.adapters import is_adapter
from rillflow.records.batch import Batch
from rillflow_parts.vllm.engine import VllmEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from damaged import damaged

KILLS: list[int] = []
"""Calls of ``generate_parts`` during which the server is killed, each once."""


class Missing(VllmEngine):
    damage = "missing"

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().load(version, damaged(self.damage, version, weights))


class Stale(Missing):
    damage = "stale"


class Transposed(Missing):
    damage = "transposed"


class Scaled(Missing):
    damage = "scaled"


class NoAdapter(VllmEngine):
    """Runs only the base."""

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().load(version, self.arrived(version, weights))

    def arrived(self, version: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if not is_adapter(name)}


class StaleAdapter(NoAdapter):
    """Keeps the first adapter."""

    def arrived(self, version: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().arrived(version, weights) if self._version >= 0 else dict(weights)


class ScaledAdapter(NoAdapter):
    """Has the wrong scale."""

    def arrived(self, version: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight * (1.5 if "up" in name else 1) for name, weight in weights.items()}


class Killed(VllmEngine):
    """Its server dies while rows run."""

    calls = 0

    def generate_parts(self, parts: Sequence[Batch], *how: Any) -> Iterator[Batch]:
        Killed.calls += 1
        if Killed.calls in KILLS:
            KILLS.remove(Killed.calls)
            self.add_then_kill(parts)
        yield from super().generate_parts(parts, *how)

    def add_then_kill(self, parts: Sequence[Batch]) -> None:
        kill, step = self._core._server.kill, self._core.step  # type: ignore[attr-defined]

        def step_and_kill(most: int) -> Any:
            kill()
            return step(most)

        self._core.step = step_and_kill  # type: ignore[method-assign]
