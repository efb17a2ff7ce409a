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

from rillflow.cluster.ranks import Ranks
from rillflow.errors import NotFiniteError, RillflowError, TrainingError
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.train.reading import Reading, empty_reading

_SEPARATOR = "\0"


def first_said(ranks: Ranks, said: str) -> str:
    """The first text of a rank that has one, on all ranks."""
    texts = ranks.gather(torch.tensor(list(said.encode()), dtype=torch.uint8))
    return bytes(next(text for text in texts if len(text)).tolist()).decode()


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
            NotFiniteError: on every rank, where that is all that was met.
            RillflowError: this rank's own error.
            TrainingError: another rank's.
        """
        everyone, own = self._parallel.seat.everyone, self._error
        is_hard = own is not None and not isinstance(own, NotFiniteError)
        failed = torch.tensor([float(own is not None), float(is_hard)])
        everyone.sum_([failed])
        if not failed[0]:
            return
        said = first_said(everyone, "" if own is None else _SEPARATOR.join(map(str, own.args)))
        kind = TrainingError if failed[1] else NotFiniteError
        if own is not None and (is_hard or kind is NotFiniteError):
            raise own
        raise kind(*said.split(_SEPARATOR))

    def _empty(self) -> Reading:
        return empty_reading(self._parallel.device)
