"""vLLM, given weights to which something happened on the way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rillflow.rollout.vllm.engine import VllmEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from damaged import damaged


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
