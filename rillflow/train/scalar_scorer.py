"""ScalarScorer: what a scalar head says about a batch.

    rows ── lay_out ──> [1, U] ── body ──> hidden states ── head ──> [U] ── where wanted ──> [N]

    values  the head one token before each loss token: the worth of the state the token was chosen in
    scores  the head at a row's last token: the worth of the whole row

Legend: B rows, T tokens, U packed tokens, N loss tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.models.scalar_head import head_of, token_scores
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.train.config import TrainConfig
from rillflow.train.guards import loss_tokens
from rillflow.train.reading import Reading, last_tokens, lay_out
from rillflow.train.scorer import in_micro_batches, over_mesh


class ScalarScorer:
    """Runs a module with a scalar head over batches, a micro-batch at a time.

    Args:
        module: a decoder with a scalar head and Rillflow's attention; it is put in evaluation mode.
        config: how a batch is cut into micro-batches.
        parallel: where the module is a rank's part of one, that part.

    Raises:
        ModelError: the module has no scalar head.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, *, parallel: Parallel | None = None) -> None:
        self._module: Any = module.eval()
        self._parallel = parallel
        if parallel is None or parallel.seat.last:
            self._head = head_of(module)
        self._budget = config.tokens_per_micro_batch
        self.device = next(module.parameters()).device

    @torch.no_grad()
    def values(self, batch: Batch) -> Ragged:
        """The value of the state before each loss token.

        Args:
            batch: rows with ``tokens`` and ``loss_mask``.

        Returns:
            float32, aligned to ``tokens``; 0 where the loss mask is False. Over pipeline stages the last
            has them, and the others zeros.

        Raises:
            TrainingError: a row's first token is a loss token.
        """
        rows = batch.only("tokens", "loss_mask")
        loss_tokens(rows)
        return self._in_micro_batches(rows, back=1)

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        """[B] float32 the score of each row, read at its last token; as ``values`` over stages.

        Args:
            batch: rows with ``tokens``.

        Raises:
            TrainingError: a row is empty.
        """
        rows = last_tokens(batch)
        return self._in_micro_batches(rows, back=0).sums()

    def forward(self, part: Batch, *, back: int) -> Tensor:
        """[N] the head's number ``back`` tokens before each loss token, in row order; one pass of the module.

        Args:
            part: rows with ``tokens`` and ``loss_mask``, at least one loss token among them.
            back: 1 for values, 0 for scores.
        """
        reading = self.lay_out(part, back=back)
        found = token_scores(self._module.base_model, self._head, reading.inputs)
        reading.check(self._module)
        return found[reading.wanted]

    def lay_out(self, part: Batch, *, back: int) -> Reading:
        """The pass that ``forward`` makes."""
        return lay_out(part, self.device, back=back)

    def _in_micro_batches(self, rows: Batch, *, back: int) -> Ragged:
        if self._parallel is None:
            return in_micro_batches(rows, self._budget, lambda part: self.forward(part, back=back))
        lay = partial(self.lay_out, back=back)
        return over_mesh(rows, self._budget, self._parallel, lay, lambda _, output: output)
