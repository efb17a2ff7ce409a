"""A worker whose cache rows are reused in every way, in a random order, and what its cache must hold.

rows      arrive in time, fork from beginnings of others, take further turns, are cancelled, moved
cache     is small, so that rows wait again (preemption) and buckets grow and shrink
weights   are replaced while rows run

after each step    every cache row that the index offers holds the keys and values of its tokens
at the end         every recorded log probability is that of a plain pass with the weights of its version
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.native.cuda_graphs import GraphedPasses, rounded
from rillflow.rollout.native.engine import NativeEngine
from rillflow.rollout.native.scheduler import Step

CONTEXT = 256
SHARED = 70
"""Length of common beginnings: more than the least that is copied."""


class CountedPasses(GraphedPasses):
    """Rounded passes that count passes with padding rows, and passes with graphs to replay."""

    passes = padded = replayed = 0

    def forward(self, layers: Any, segments: Any, tokens: Tensor) -> Tensor:
        """See GraphedPasses."""
        shape = rounded(layers, segments, rounds_rows=self._rounds_rows)
        self.passes += 1
        self.padded += sum(rows for _, rows, *_ in shape) > len(tokens)
        self.replayed += bool(self._graphs)
        return super().forward(layers, segments, tokens)


def round_passes(engine: NativeEngine, *, captures: bool = False) -> CountedPasses:
    """Let an engine of one worker round its passes on a CPU as on CUDA, and count them."""
    (worker,) = engine._workers
    with torch.inference_mode():
        recorded = worker._driven()._module
    passes = CountedPasses(recorded._module, captures=captures, rounds_rows=worker._fixed_rows is None)
    recorded._graphed = passes
    return passes


@dataclass(kw_only=True)
class Reuse:
    """An engine under test, its rows, and plain modules of each version."""

    module: nn.Module
    """The module that samples; its weights change."""
    engine: NativeEngine
    """The engine under test."""
    chance: Random
    """Decides what happens."""
    most_samples: int = 4
    """Largest number of rows that arrive together."""
    is_cache_compared: bool = True
    """Whether to compare the offered cache rows after each step."""
    plain: dict[int, nn.Module] = field(default_factory=dict)
    """Copies of the module, by version."""
    ended: list[Rollout] = field(default_factory=list)
    """Rows that will not continue."""
    aside: list[Rollout] = field(default_factory=list)
    """Rows that were taken out, and continue later."""
    states: dict[tuple[int, tuple[int, ...]], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Keys and values of every layer, [K, T, D], by version and tokens."""
    offered: int = 0
    """Compared cache rows."""
    copied: int = 0
    """Copies of cache rows."""
    requeued: int = 0
    """Rows that waited again because others needed their memory."""

    def __post_init__(self) -> None:
        device = next(self.module.parameters()).device
        self._system = [[self.chance.randrange(60) for _ in range(SHARED)] for _ in range(2)]
        self._prompts, self._version, self._device = 0, 0, device
        self.plain[0] = copy.deepcopy(self.module)
        (self._worker,) = self.engine._workers
        schedule = self._worker._scheduler.schedule

        def counted() -> Step:
            step = schedule()
            self.copied += len(step.copies)
            return step

        self._worker._scheduler.schedule = counted  # type: ignore[method-assign]

    def run(self, events: int) -> None:
        """Let things happen, then finish all rows."""
        for _ in range(events):
            ways = [self.arrive, self.arrive, self.cancel, self.take_out, self.put_back, self.preempt]
            self.chance.choice(ways)()
            if self.chance.random() < 0.1:
                self.publish()
            for _ in range(self.chance.choice([1, 2, 5, 12])):
                self.step()
        while self.aside:
            self.put_back()
        while self.engine.has_work:
            self.step()

    def step(self) -> None:
        """Run a step; half of the rows that end take another turn."""
        for row in self.engine.step():
            if len(row.tokens) < CONTEXT - 60 and self.chance.random() < 0.5:
                self.aside.append(self._with_answer(row))
            else:
                self.ended.append(row)
        if self.is_cache_compared:
            self.compare_cache()

    def arrive(self) -> None:
        """Add a prompt's rows: a fresh one, or one that forks from the beginning of another row."""
        begin = self.chance.choice([[], *self._system])
        known = [*self.ended, *self.aside]
        if known and self.chance.random() < 0.4:
            row = self.chance.choice(known)
            begin = list(row.tokens[: self.chance.randint(1, len(row.tokens))])
        own = [self.chance.randrange(60) for _ in range(self.chance.randint(1, 9))]
        tokens = [*begin[: CONTEXT - 60], *own]
        for sample in range(self.chance.randint(1, self.most_samples)):
            self._add(Rollout.start(RowId(0, self._prompts, sample), tokens))
        self._prompts += 1

    def cancel(self) -> None:
        """Take a row out for ever."""
        if rows := self._inside():
            self.ended.append(self.engine.abort(self.chance.choice(rows)))

    def take_out(self) -> None:
        """Take a row out, with or without its cache; it may get an answer."""
        if rows := self._inside():
            take = self.chance.choice([self.engine.abort, self.engine.detach])
            row = take(self.chance.choice(rows))
            self.aside.append(self._with_answer(row) if self.chance.random() < 0.5 else row)

    def put_back(self) -> None:
        """Continue a row that was taken out."""
        if self.aside:
            self._add(self.aside.pop(self.chance.randrange(len(self.aside))))

    def preempt(self) -> None:
        """Let the latest rows wait again, as when others need their memory."""
        running = sorted(self._worker._scheduler.running, key=lambda row: row.arrival)
        latest = running[len(running) - self.chance.randint(0, 2) :]
        self.requeued += len(latest)
        self._worker._requeue(latest)

    def publish(self) -> None:
        """Replace the weights."""
        self._version += 1
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.mul_(1 + 0.05 * self.chance.choice([-1, 1]))
        self.plain[self._version] = copy.deepcopy(self.module)
        self.engine.load(self._version, {})

    def compare_cache(self) -> None:
        """Compare every offered cache row with a plain pass over its tokens."""
        runner, index = self._worker._runner, self._worker._scheduler._index
        for row, tokens in index._tokens.items():
            assert runner is not None
            version = self._worker._sampled_version
            for layer, (keys, values) in enumerate(self._states(version, tokens)):
                held = runner.cache.layers[layer][row.bucket]
                for own, true in ((held.keys, keys), (held.values, values)):
                    found = own[row.row, :, : len(tokens)].float()
                    gap = float((found - true).abs().max() / true.abs().max())
                    assert gap < self.tolerance, f"{row} holds other keys or values: {gap:.3g}"
            self.offered += 1

    def deviations(self) -> list[float]:
        """Return each ended row's largest deviation of a log probability from a plain pass."""
        return [self._deviation(row) for row in self.ended]

    def _deviation(self, row: Rollout) -> float:
        worst = 0.0
        for version in {version for version in row.versions if version >= 0}:
            ids = torch.tensor([row.tokens], device=self._device)
            with torch.no_grad():
                logits = self.plain[version](input_ids=ids, use_cache=False).logits[0, :-1]
            true = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
            gaps = (torch.tensor(row.logprobs[1:]) - true).abs()
            worst = max(worst, float(gaps[torch.tensor(row.versions[1:]) == version].max()))
        return worst

    @property
    def tolerance(self) -> float:
        """Largest relative difference of keys and values by rounding."""
        return 1e-4 if next(self.module.parameters()).dtype == torch.float32 else 0.03

    def _inside(self) -> list[RowId]:
        return [*self._worker._scheduler._rows]

    def _add(self, row: Rollout) -> None:
        more = self.chance.choice([1, 4, 12, 40])
        self.engine.add(row, SamplingConfig(max_tokens=sum(row.loss_mask) + more))

    def _with_answer(self, row: Rollout) -> Rollout:
        answer = [self.chance.randrange(60) for _ in range(self.chance.choice([1, 4, 25]))]
        return row.inserted(answer[: max(1, CONTEXT - 40 - len(row.tokens))])

    def _states(self, version: int, tokens: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        if (version, tokens) not in self.states:
            self.states[version, tokens] = states_of(self.plain[version], tokens)
        return self.states[version, tokens]


def states_of(module: nn.Module, tokens: Rows[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values [K, T, D] of every layer after a plain pass."""
    device = next(module.parameters()).device
    with torch.no_grad():
        cache = module(input_ids=torch.tensor([list(tokens)], device=device), use_cache=True).past_key_values
    return [(layer.keys[0].float(), layer.values[0].float()) for layer in cache.layers]


def engine_of(
    module: nn.Module,
    *,
    seed: int = 3,
    record_after: float = inf,
    keep_cache: bool = False,
    **settings: object,
) -> NativeEngine:
    """Return an engine of one worker."""
    config = RolloutConfig(**{"max_tokens": 30, **settings})  # type: ignore[arg-type]
    return NativeEngine(
        module,
        config.with_kept_cache(keep_cache),
        stop_tokens=frozenset(),
        seed=seed,
        context=CONTEXT,
        record_after=record_after,
        workers=1,
    )
