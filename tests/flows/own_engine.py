"""An engine of one's own, as another package would bring it: the native one, noting what it is asked."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rillflow.records.batch import Batch
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability
from rillflow.rollout.native.engine import NativeEngine

ASKED: list[str] = []
"""What any engine of this file was asked."""


class Noting(NativeEngine):
    """Samples with copies of the weights that it was given last."""

    can = frozenset({Capability.GREEDY})

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        ASKED.append(f"load {version} {len(weights)}")
        super().load(version, weights)

    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        ASKED.append("generate")
        return super().generate(prompts, samples, sampling)

    def sleep(self) -> None:
        ASKED.append("sleep")

    def wake(self) -> None:
        ASKED.append("wake")


class Halting(Noting):
    """Always draws."""

    can = frozenset({Capability.ROWS})


class NoEngine:
    """Has no method of one."""
