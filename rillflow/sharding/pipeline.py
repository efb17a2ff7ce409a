"""Pipeline: micro-batches through the stages of a module, by torch's 1F1B schedule over its PipelineStage.

    stage 0   F0 F1 F2 B0 F3 B1 ..   only hidden states [1, U, D] and their gradients are sent
    stage 1      F0 F1 B0 F2 B1 ..   every stage knows each micro-batch's tokens and attention by its number
    stage 2         F0 B0 F1 B1 ..   the last one turns outputs into shares of the loss

All sent tensors have one shape: micro-batches are padded to the packed tokens of the longest one. With fewer
micro-batches than stages, all run forward, then all backward; 1F1B would save no memory there.

Legend: U packed tokens of the longest micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from rillflow.sharding.packed_rows import Reading
from rillflow.workers.collectives import ProcessRanks

NumberedShare = Callable[[int, Any], Tensor]
"""Function that returns a micro-batch's share of the loss from its number and its output."""


def run_pipeline(
    ranks: ProcessRanks,
    module: Any,
    part: nn.Module,
    readings: Sequence[Reading],
    finish: NumberedShare,
    after: Callable[[], None] | None = None,
) -> list[Reading]:
    """Run all micro-batches forward, and backward if ``after`` is given.

    Args:
        ranks: the stages, one per rank.
        module: the decoder, or this stage's part of it.
        part: runs this stage: ``part(state, inputs, wanted, read)``.
        readings: the micro-batches, the same on every stage; may be empty.
        finish: called on the last stage, in the order of micro-batches.
        after: called after every backward pass.

    Returns:
        The readings as they were run, padded.
    """
    if not readings:
        return []
    longest = max(reading.size for reading in readings)
    filled = [reading.padded(longest) for reading in readings]
    first, last = ranks.rank == 0, ranks.rank == ranks.size - 1
    trains = after is not None
    # Only shapes are needed, so meta tensors avoid a pass to infer them.
    width = int(module.config.get_text_config().hidden_size)
    state = torch.empty(1, longest, width, dtype=module.dtype, device="meta", requires_grad=trains)
    share = torch.empty((), device="meta", requires_grad=trains)
    stage = _Stage(
        _Step(part, filled, finish if last else None),
        ranks.rank,
        ranks.size,
        module.device,
        input_args=torch.empty(1, dtype=torch.int64, device="meta") if first else state,
        output_args=share if last else state,
        group=ranks.group,
    )
    stage.after = after
    count, numbers = len(filled), torch.arange(len(filled))
    few = not trains or count < ranks.size
    kind: type[PipelineScheduleSingle] = ScheduleGPipe if few else Schedule1F1B
    schedule = kind(stage, count, loss_fn=_share if trains else None, scale_grads=False)
    target = numbers if last and trains else None
    if first:
        schedule.step(numbers, target=target, return_outputs=False)
    else:
        schedule.step(number=numbers, target=target, return_outputs=False)
    return filled


class _Step(nn.Module):
    """Module called by torch's stage, with a micro-batch's number."""

    def __init__(self, part: nn.Module, readings: Sequence[Reading], finish: NumberedShare | None) -> None:
        super().__init__()
        self.part = part
        self._readings = readings
        self._finish = finish

    def forward(self, given: Tensor, number: Tensor | None = None) -> Tensor:
        """Return the next stage's hidden states, or the loss's share; ``given`` is a number on the first."""
        index = int(given if number is None else number)
        reading = self._readings[index]
        state = None if number is None else given
        read = None if self._finish is None else partial(self._finish, index)
        output: Tensor = self.part(state, reading.inputs, reading.wanted, read)
        return output


class _Stage(PipelineStage):
    """Torch's stage with a callback after every backward pass."""

    after: Callable[[], None] | None = None

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """See PipelineStage."""
        super().backward_one_chunk(*arguments, **options)
        if self.after is not None and self.has_backward:
            self.after()


def _share(output: Tensor, number: Tensor) -> Tensor:
    del number
    return output
