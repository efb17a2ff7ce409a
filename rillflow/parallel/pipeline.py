"""Pipeline: micro-batches through the stages of a module, torch's 1F1B schedule over its PipelineStage.

    stage 0   F0 F1 F2 B0 F3 B1 ..   only hidden states [1, U, D] and their gradients cross
    stage 1      F0 F1 B0 F2 B1 ..   every stage knows each micro-batch's tokens and attention by its number
    stage 2         F0 B0 F1 B1 ..   the last one turns outputs into shares of the loss

What crosses has one shape: micro-batches are filled up to the longest one's packed tokens. With fewer
micro-batches than stages all go forward, then all backward; 1F1B would save no memory there.
Legend: U packed tokens of the longest micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from rillflow.cluster.ranks import ProcessRanks

Finish = Callable[[int, Tensor], Tensor]
"""On the last stage: a micro-batch's number and output to its share of the loss, a number."""


class Reading(Protocol):
    """A micro-batch as a module reads it; ``train.reading`` makes them."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The module's arguments, ``input_ids`` among them."""

    @property
    def wanted(self) -> Tensor:
        """[N] int64 the packed tokens at which outputs are wanted."""

    @property
    def size(self) -> int:
        """Packed tokens."""

    def padded(self, size: int) -> Self:
        """The same with packed tokens that no row sees, up to ``size``."""

    def check(self, module: nn.Module) -> None:
        """Show after a pass that the module asked the attention plan."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """What the stages of a pipeline have in common."""

    ranks: ProcessRanks
    """One a stage."""
    device: torch.device
    """Where this stage computes."""
    width: int
    """The hidden size."""
    dtype: torch.dtype
    """Of the hidden states."""


def run_pipeline(
    line: Line,
    part: nn.Module,
    readings: Sequence[Reading],
    finish: Finish,
    after: Callable[[], None] | None = None,
) -> list[Reading]:
    """All micro-batches forward, and backward where ``after`` is given.

    Args:
        line: the stages.
        part: what this stage runs: ``part(state, inputs, wanted)``.
        readings: the micro-batches, the same on every stage.
        finish: called on the last stage, in the order of micro-batches.
        after: called after every backward pass.

    Returns:
        The readings as they were run.
    """
    longest = max(reading.size for reading in readings)
    filled: list[Reading] = [reading.padded(longest) for reading in readings]
    last = line.ranks.rank == line.ranks.size - 1
    step = _Step(part, filled, finish if last else None)
    stage = _stage(line, step, longest, after)
    count, numbers = len(filled), torch.arange(len(filled))
    loss = _share if after is not None else None
    few = after is None or count < line.ranks.size
    kind: type[PipelineScheduleSingle] = ScheduleGPipe if few else Schedule1F1B
    schedule = kind(stage, count, loss_fn=loss, scale_grads=False)
    target = numbers if last and loss is not None else None
    if line.ranks.rank == 0:
        schedule.step(numbers, target=target, return_outputs=False)
    else:
        schedule.step(number=numbers, target=target, return_outputs=False)
    return filled


class _Step(nn.Module):
    """What torch's stage calls: a micro-batch by its number."""

    def __init__(self, part: nn.Module, readings: Sequence[Reading], finish: Finish | None) -> None:
        super().__init__()
        self.part = part
        self._readings = readings
        self._finish = finish

    def forward(self, given: Tensor, number: Tensor | None = None) -> Tensor:
        """The next stage's hidden states, or the share of the loss; ``given`` is the number on the first."""
        index = int(given if number is None else number)
        reading = self._readings[index]
        state = None if number is None else given
        output: Tensor = self.part(state, reading.inputs, reading.wanted)
        return output if self._finish is None else self._finish(index, output)


class _Stage(PipelineStage):
    """Torch's stage, that tells of every backward pass."""

    after: Callable[[], None] | None = None

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """See PipelineStage."""
        super().backward_one_chunk(*arguments, **options)
        if self.after is not None and self.has_backward:
            self.after()


def _stage(line: Line, step: _Step, longest: int, after: Callable[[], None] | None) -> _Stage:
    first, last = line.ranks.rank == 0, line.ranks.rank == line.ranks.size - 1
    trains = after is not None
    state = torch.empty(
        1, longest, line.width, dtype=line.dtype, device="meta", requires_grad=trains
    )  # shapes are all that is asked for: nothing is run to find them out
    share = torch.empty((), device="meta", requires_grad=trains)
    stage = _Stage(
        step,
        line.ranks.rank,
        line.ranks.size,
        line.device,
        input_args=torch.empty(1, dtype=torch.int64, device="meta") if first else state,
        output_args=share if last else state,
        group=line.ranks.group,
    )
    stage.after = after
    return stage


def _share(output: Tensor, number: Tensor) -> Tensor:
    del number
    return output
