"""A custom rollout engine: no KV cache, one pass over each whole row for each token.

    python examples/own_engine.py                 # a few steps of recipes/arithmetic with it

It shares the trainer's module, so weights need no copy. Its random numbers depend only on the run's seed, the
row and the position, so a row is the same in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import rillflow
from rillflow.formulas.counter import uniform
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability, RowByRow

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic" / "run.toml"


class PlainEngine(RowByRow):
    """Continues every running row by one token per step.

    Further arguments of ``rollout.engine.Engine``, such as ``tp``, are accepted and not used.
    """

    can: ClassVar = frozenset({Capability.GREEDY, Capability.ROWS, Capability.SCORE})
    held_bytes = 0

    def __init__(
        self, module: nn.Module, config: RolloutConfig, *, seed: int, context: int, stops: Any, **_: Any
    ) -> None:
        self._module, self._usual, self._seed = module, config, seed
        self._context, self._stop_tokens = context, stops.tokens
        self._rows: dict[RowId, tuple[Rollout, SamplingConfig]] = {}
        self._version = 0

    @property
    def has_work(self) -> bool:
        """True if a row runs."""
        return bool(self._rows)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Set the version; the weights are those of the module."""
        del weights
        self._version = version

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Begin a row."""
        self._rows[rollout.row] = (rollout, sampling or self._usual)

    def step(self) -> list[Rollout]:
        """Sample one token of every row; return the rows that ended."""
        for row, (rollout, sampling) in self._rows.items():
            self._rows[row] = (self._continued(rollout, sampling), sampling)
        ended = [rollout for rollout, _ in self._rows.values() if rollout.finish != Finish.ABORTED]
        for rollout in ended:
            del self._rows[rollout.row]
        return ended

    def abort(self, row: RowId) -> Rollout:
        """Remove a row and return it with its tokens so far."""
        return self._rows.pop(row)[0]

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log probability of every token but the first of each text."""
        return [
            self._logprobs(text, 1.0)[:-1].gather(-1, torch.tensor(text[1:])[:, None]).squeeze(-1).tolist()
            for text in texts
        ]

    def sleep(self) -> None:
        """Free nothing: there is no cache."""

    def wake(self) -> None:
        """Allocate nothing."""

    def _clear(self) -> None:
        self._rows.clear()

    @torch.inference_mode()
    def _continued(self, rollout: Rollout, sampling: SamplingConfig) -> Rollout:
        """Return the row with one more token, drawn by the inverse of the cumulative distribution."""
        logprobs = self._logprobs(rollout.tokens, sampling.temperature or 1.0)[-1]
        if sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            drawn = uniform(self._seed, torch.tensor(rollout.row), torch.tensor(len(rollout.tokens)))
            token = int((logprobs.double().exp().cumsum(-1) <= drawn).sum().clamp(max=len(logprobs) - 1))
        is_full = (
            sum(rollout.loss_mask) + 1 == sampling.max_tokens or len(rollout.tokens) + 1 == self._context
        )
        finish = Finish.LENGTH if is_full else Finish.ABORTED
        finish = Finish.STOP if token in self._stop_tokens else finish
        return rollout.sampled([token], [float(logprobs[token])], self._version, finish)

    def _logprobs(self, tokens: Sequence[int], temperature: float) -> Tensor:
        """Return [T, V] float32 log probabilities after each token."""
        logits = self._module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return (logits.float() / temperature).log_softmax(-1)


if __name__ == "__main__":
    small = {"algorithm.steps": 3, "algorithm.prompts_per_step": 8, "evaluate.problems": 20}
    small |= {"warm_start.steps": 10, "warm_start.warmup_steps": 2, "policy.warmup_steps": 0}
    rillflow.train(
        RECIPE, settings={**small, "rollout.engine": "own_engine:PlainEngine"}, dir="runs/own_engine"
    )
