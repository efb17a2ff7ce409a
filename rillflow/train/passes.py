"""Passes: a learner's and a scorer's micro-batches over a mesh.

    parts ─ lay_out ─> readings ─ Parallel ─> outputs on the last stage ─ finish ─> shares of the loss
                                              an error? kept, the passes go on ─ agree ─> raised on all ranks

An error in the middle would leave the other ranks waiting: the rank that met it goes on with shares of 0,
and all give up together when the passes are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rillflow.errors import RillflowError, TrainingError
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.train.reading import Reading, empty_reading

_SEPARATOR = "\0"


class Passes:
    """The passes of one step.

    Args:
        parallel: this rank's part of the module.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._error: RillflowError | None = None

    def run(
        self,
        parts: Sequence[Batch],
        lay_out: Callable[[Batch], Reading],
        finish: Callable[[Batch, Tensor], Tensor],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Every part forward, and backward where ``after`` is given.

        Args:
            parts: the micro-batches; the same on every rank of a replica.
            lay_out: a part as the module reads it.
            finish: on the last stage, a part and its output to its share of the loss.
            after: called after every backward pass.
        """

        def guarded(index: int, output: Tensor) -> Tensor:
            if self._error is None:
                try:
                    return finish(parts[index], output)
                except RillflowError as error:
                    self._error = error
            return output.sum() * 0

        readings = [lay_out(part) for part in parts]
        if after is None:
            self._parallel.score(readings, guarded, self._empty)
        else:
            self._parallel.train(readings, guarded, self._empty, after)

    def agree(self) -> None:
        """Raise on every rank what was met on any.

        Raises:
            RillflowError: this rank's own error.
            TrainingError: another rank's.
        """
        everyone = self._parallel.seat.everyone
        failed = torch.tensor([float(self._error is not None)])
        everyone.sum_([failed])
        if not failed:
            return
        said = "" if self._error is None else _SEPARATOR.join(map(str, self._error.args))
        texts = everyone.gather(torch.tensor(list(said.encode()), dtype=torch.uint8))
        if self._error is not None:
            raise self._error
        first = next(text for text in texts if len(text))
        raise TrainingError(*bytes(first.tolist()).decode().split(_SEPARATOR))

    def _empty(self) -> Reading:
        return empty_reading(self._parallel.device)
