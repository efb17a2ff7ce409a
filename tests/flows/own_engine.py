"""A custom engine, as from another package: the native engine, with a log of its calls."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.records.batch import Batch
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability
from rillflow.rollout.native.engine import NativeEngine

sys.path.insert(0, str(Path(__file__).parent))
from damaged import damaged

ASKED: list[str] = []
"""Calls to any engine of this file."""


class Noting(NativeEngine):
    """The native engine with a log of its calls."""

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
    """An engine that cannot sample greedily."""

    can = frozenset({Capability.ROWS})


class NoEngine:
    """A class without any engine method."""


class Copying(NativeEngine):
    """Samples with its own copy of the weights, which a canary verifies; the copy may get damaged."""

    can = frozenset({Capability.GREEDY, Capability.SCORE})
    damage = ""

    def __init__(self, module: Any, config: RolloutConfig, **given: Any) -> None:
        self._own = copy.deepcopy(module)
        super().__init__(self._own, config, **given)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        own = dict(self._own.named_parameters())
        with torch.no_grad():
            for name, weight in damaged(self.damage, version, weights).items():
                own[name].copy_(weight)
        super().load(version, weights)

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        told = self._own(torch.tensor(texts), use_cache=False).logits.log_softmax(-1)
        return [
            [float(told[row, place, token]) for place, token in enumerate(text[1:])]
            for row, text in enumerate(texts)
        ]


class Missing(Copying):
    damage = "missing"


class Stale(Copying):
    damage = "stale"


class Transposed(Copying):
    damage = "transposed"


class Scaled(Copying):
    damage = "scaled"
