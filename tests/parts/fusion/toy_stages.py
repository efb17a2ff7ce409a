"""Stages of a toy model that counts the micro-batches it keeps, for passes of any length in any order."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.placement.mesh import Mesh
from rillflow.sharding.mesh import rank_groups, require_processes
from rillflow.sharding.packed_rows import Reading
from rillflow.sharding.pipeline_runner import PipelinePass
from rillflow.workers.collectives import Ranks

WIDTH, TOKENS = 8, 4


class ToyStage(nn.Module):
    """One stage: a product, or an embedding first.

    Args:
        pause: called with whether the pass is a backward one, before each pass.
    """

    def __init__(self, stage: int, pause: Callable[[bool], None]) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.embedding = nn.Embedding(64, WIDTH) if stage == 0 else None
        self.product = nn.Linear(WIDTH, WIDTH)
        self.pause = pause
        self.kept: Counter[int] = Counter()
        """Saved tensors of every micro-batch."""
        self.peak = 0
        """Most micro-batches with saved tensors."""

    def forward(
        self,
        state: Tensor | None,
        inputs: dict[str, Any],
        wanted: Tensor,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        self.pause(False)
        number = int(inputs["input_ids"][0, 0])

        def keep(tensor: Tensor) -> _Held:
            holder = _Held(tensor)
            self.kept[number] += 1
            weakref.finalize(holder, self._drop, number)
            self.peak = max(self.peak, len(self.kept))
            return holder

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.tensor):
            if self.embedding is not None:
                state = self.embedding(inputs["input_ids"])
            assert state is not None
            found = torch.tanh(self.product(_Paused.apply(state, self.pause)))
            return found if read is None else read(found)

    def _drop(self, number: int) -> None:
        self.kept[number] -= 1
        if not self.kept[number]:
            del self.kept[number]


class _Held:
    """A saved tensor, to see when it is dropped."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Paused(torch.autograd.Function):
    """The identity, with a pause in the backward pass."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, pause: Callable[[bool], None]) -> Tensor:
        ctx.pause = pause
        return state.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.pause(True)
        return gradient, None


def toy_pass(
    ranks: Ranks, stages: int, count: int, *, is_descending: bool, pause: Callable[[bool], None]
) -> PipelinePass:
    """This rank's stage of a toy model and its micro-batches; replicas fill the ranks."""
    mesh = Mesh.of(dp=ranks.size // stages, pp=stages, tp=1)
    groups = rank_groups(mesh.turned("pp") if is_descending else mesh, ranks)
    part = ToyStage(groups.stage, pause)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=WIDTH))
    return PipelinePass(
        ranks=require_processes(groups.pp),
        module=SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32),
        part=part,
        readings=[reading(number) for number in range(count)],
        finish=lambda number, output: (output * (1 + number)).square().sum(),
        after=lambda: None,
        is_descending=is_descending,
    )


def reading(number: int) -> Reading:
    tokens = torch.arange(number, number + TOKENS)[None]
    return ToyReading(inputs={"input_ids": tokens}, wanted=torch.zeros(0), copies=torch.ones(TOKENS))


class ToyReading(Reading):
    """A pass without attention, which needs no padding."""

    def padded(self, size: int) -> Reading:
        assert size == TOKENS
        return self


def random_pauses(seed: int, most_s: float) -> Callable[[bool], None]:
    """Pauses of random length, so that ranks drift apart from their schedule."""
    draw = Random(seed)
    return lambda _: time.sleep(most_s * draw.random() ** 4)
