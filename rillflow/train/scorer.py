"""Scorer: what a module says about the loss tokens of a batch.

    rows ── cut after what the last loss token needs ── pack ──> [1, U] ── module ──> logits [N, V]
         [N] log probability, entropy <── token_logprobs (only positions that predict a loss token) ──┘

Legend: B rows, T tokens, U packed tokens, N loss tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.formulas.logprobs import TokenLogprobs, token_logprobs
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged, concatenate_ragged
from rillflow.train.config import TrainConfig
from rillflow.train.guards import loss_tokens
from rillflow.train.minibatches import gathered
from rillflow.train.passes import Passes
from rillflow.train.reading import Reading, lay_out


class Scorer:
    """Runs a module over batches, a micro-batch at a time.

    Args:
        module: a causal language model with Rillflow's attention; it is put in evaluation mode.
        config: how a batch is cut into micro-batches.
        parallel: where the module is a rank's part of one, that part.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, *, parallel: Parallel | None = None) -> None:
        self._module: Any = module.eval()
        self._budget = config.tokens_per_micro_batch
        self._parallel = parallel
        self.device = next(module.parameters()).device

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged:
        """Log probabilities of the loss tokens.

        Args:
            batch: rows with ``tokens`` and ``loss_mask``.
            temperature: the one the tokens were sampled at.

        Returns:
            float32, aligned to ``tokens``; 0 where the loss mask is False. Over pipeline stages the last
            has them, and the others zeros.

        Raises:
            TrainingError: a row's first token is a loss token.
        """
        rows = batch.only("tokens", "loss_mask")
        loss_tokens(rows)
        if self._parallel is None:
            return in_micro_batches(rows, self._budget, lambda part: self.forward(part, temperature).logprobs)
        return over_mesh(
            rows,
            self._budget,
            self._parallel,
            self.lay_out,
            lambda part, output: self.read(part, output, temperature).logprobs,
        )

    def forward(self, part: Batch, temperature: float = 1.0) -> TokenLogprobs:
        """Log probability and entropy of the part's N loss tokens, in row order; one pass of the module.

        Args:
            part: rows with ``tokens`` and ``loss_mask``, at least one loss token among them.
            temperature: the one the tokens were sampled at.
        """
        reading = self.lay_out(part)
        logits = self._module(**reading.inputs, logits_to_keep=reading.wanted).logits[0]
        reading.check(self._module)
        return self.read(part, logits, temperature)

    def lay_out(self, part: Batch) -> Reading:
        """The pass that ``forward`` makes."""
        return lay_out(part, self.device, back=1)

    def read(self, part: Batch, logits: Tensor, temperature: float = 1.0) -> TokenLogprobs:
        """What ``forward`` gives, from the logits [N, V] of its pass."""
        chosen = part.ragged("tokens").values[part.ragged("loss_mask").values]
        return token_logprobs(logits, chosen.to(self.device), temperature)


def in_micro_batches(rows: Batch, budget: int, read: Callable[[Batch], Tensor]) -> Ragged:
    """What ``read`` gives the loss tokens [N] of every micro-batch, in the rows' own order.

    Args:
        rows: with ``tokens`` and ``loss_mask``.
        budget: tokens of a micro-batch.
        read: called with micro-batches that have a loss token.

    Returns:
        float32, aligned to ``tokens``; 0 where the loss mask is False.
    """

    def aligned(part: Batch) -> Ragged:
        mask = part.ragged("loss_mask")
        values = torch.zeros(mask.values.shape[0])
        if bool(mask.values.any()):
            values[mask.values] = read(part).float().cpu()
        return mask.with_values(values)

    parts = micro_batches(rows, budget)
    if not parts:
        return rows.ragged("tokens").with_values(torch.zeros(0))
    found = concatenate_ragged([aligned(rows.select(part)) for part in parts])
    return found.select(torch.argsort(torch.cat(parts)))


def over_mesh(
    rows: Batch,
    budget: int,
    parallel: Parallel,
    lay_out: Callable[[Batch], Reading],
    read: Callable[[Batch, Tensor], Tensor],
) -> Ragged:
    """As ``in_micro_batches``, over a mesh; zeros on the stages before the last.

    Args:
        rows: with ``tokens`` and ``loss_mask``.
        budget: tokens of a micro-batch.
        parallel: this rank's part of the module.
        lay_out: a micro-batch as the module reads it.
        read: what a micro-batch's output says of its loss tokens [N].
    """
    parts = [rows.select(part) for part in micro_batches(rows, budget)]
    parts = [part for part in parts if bool(part.ragged("loss_mask").values.any())]
    found: list[Tensor] = []

    def finish(part: Batch, output: Tensor) -> Tensor:
        found.append(read(part, output))
        return found[-1].sum()

    passes = Passes(parallel)
    passes.run(parts, lay_out, finish)
    passes.agree()
    given = iter(found)
    return in_micro_batches(
        rows, budget, lambda part: next(given, torch.zeros(int(part.ragged("loss_mask").values.sum())))
    )


def micro_batches(batch: Batch, budget: int, units: Tensor | None = None) -> list[Tensor]:
    """Indices of rows, cut so that no part has more than ``budget`` tokens unless one unit alone does.

    Rows of one prompt stay neighbours, because what they share is computed once in each part.

    Args:
        batch: rows with ``tokens``.
        budget: tokens of a part.
        units: [B] int64; rows that share a number stay in one part. Each row is a unit without it.
    """
    ids = batch.ids.tolist()
    order = sorted(range(len(batch)), key=ids.__getitem__)
    lengths = batch.ragged("tokens").lengths.tolist()
    parts: list[list[int]] = []
    held = budget
    for unit in gathered(order, units):
        size = sum(lengths[row] for row in unit)
        if not parts or held + size > budget:
            parts.append([])
            held = 0
        parts[-1] += unit
        held += size
    return [torch.tensor(part, dtype=torch.int64) for part in parts]
