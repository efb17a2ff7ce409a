"""Roles whose work is sleep, for gathering.py: an engine whose rows are as long as told, and scorers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.roles.sampler import Sampler
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability, RowByRow
from rillflow.rollout.native.engine import NativeEngine
from rillflow.workers.backend import Site
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import SPLIT_DP

FLAT_ROWS = 32
"""Rows of a replica up to which a decoding step takes no longer than with one."""
TOKEN_S = "GATHERING_TOKEN_S"
"""The variable of the environment that says how long a decoding step takes at least."""
CACHE_WIDTH = 256
"""Numbers of a token's keys and values."""


def token_s(rows: int) -> float:
    """Return the seconds of a decoding step with this number of running rows."""
    return float(os.environ[TOKEN_S]) * max(1.0, rows / FLAT_ROWS)


@dataclass(kw_only=True)
class Run:
    """A row that runs."""

    rollout: Rollout
    """The row as it was added."""
    left: int
    """Tokens until it ends."""
    made: int = 0
    """Tokens since it was added."""

    def now(self, version: int) -> Rollout:
        """Return the row with its tokens so far."""
        finish = Finish.ABORTED if self.left else Finish.LENGTH
        return self.rollout.sampled([7] * self.made, [-1.0] * self.made, version, finish)


class SleepingRows(RowByRow):
    """An engine that sleeps; the prompt's column ``length`` says how long a row is."""

    can: ClassVar = frozenset({Capability.ROWS, Capability.CACHE})
    held_bytes: ClassVar = 0

    def __init__(self, *_: object, **how: object) -> None:
        del how
        self._version, self._rows = 0, dict[RowId, Run]()

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return bool(self._rows)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine."""
        del weights
        self._version = version

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine."""
        del sampling
        length = json.loads(rollout.columns)["length"] - sum(rollout.loss_mask)
        self._rows[rollout.row] = Run(rollout=replace(rollout, cache=None), left=length)

    def abort(self, row: RowId) -> Rollout:
        """See Engine."""
        return self._rows.pop(row).now(self._version)

    def detach(self, row: RowId) -> Rollout:
        """See Engine."""
        found = self.abort(row)
        return replace(found, cache=torch.zeros(len(found.tokens), CACHE_WIDTH))

    def step(self) -> list[Rollout]:
        """See Engine."""
        time.sleep(token_s(len(self._rows)))
        for run in self._rows.values():
            run.left, run.made = run.left - 1, run.made + 1
        ended = [row for row, run in self._rows.items() if not run.left]
        return [self._rows.pop(row).now(self._version) for row in ended]

    def _clear(self) -> None:
        self._rows.clear()

    def sleep(self) -> None:
        """See Engine."""

    def wake(self) -> None:
        """See Engine."""


class Weights:
    """Weights that nobody trains."""

    def __init__(self) -> None:
        self.version, self.canary, self.tp = 0, (), None
        self.module = SimpleNamespace(named_parameters=dict)

    def turn_to_generation(self, asleep: object) -> None:
        """See SharedWeights."""


def sampler(_: Site) -> Sampler:
    """Make the sampler of a rank."""
    model = SimpleNamespace(tokenizer=SimpleNamespace(stop_tokens=frozenset()), context=4096)
    how: Any = {"model": model, "rollout": RolloutConfig(), "seed": 0, "engine": SleepingRows}
    return Sampler(cast(Any, Weights()), **how)


class Scorer:
    """Takes its time for every row."""

    def __init__(self, _: object) -> None: ...

    @endpoint(SPLIT_DP, reads=("tokens",), writes=("scores",), alone=True)
    def score(self, rollouts: Batch, row_s: float) -> Batch:
        """Return the field ``scores``."""
        time.sleep(row_s * len(rollouts))
        return Batch(ids=rollouts.ids, fields={"scores": torch.zeros(len(rollouts))})


def step_length(row: RowId) -> int:
    """Return the tokens of a row of a whole step: one in eight is long."""
    return 110 if Random(str(row)).random() < 0.125 else 20


class GivenLengths(NativeEngine):
    """The native engine, whose rows are as long as told and whose decoding steps take their time."""

    can: ClassVar = NativeEngine.can

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **{**how, "stop_tokens": frozenset(), "stops": None})
        self._config: RolloutConfig = given[1]

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine."""
        chosen = (sampling or self._config).model_copy(update={"max_tokens": step_length(rollout.row)})
        super().add(rollout, chosen)

    def step(self) -> list[Rollout]:
        """See Engine."""
        began, ended = time.monotonic(), super().step()
        time.sleep(max(0.0, began + float(os.environ[TOKEN_S]) - time.monotonic()))
        return ended

    def generate(
        self,
        prompts: Batch,
        samples: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    ) -> Batch:
        """See Engine."""
        assert sampling is None or isinstance(sampling, SamplingConfig)
        begun, found = starts(prompts, samples), dict[RowId, Rollout]()
        for each in begun:
            self.add(each, sampling)
        while self.has_work:
            found |= {each.row: each for each in self.step()}
        return rollout_batch([found[each.row] for each in begun])
