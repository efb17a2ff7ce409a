"""Scorer: what a module says about the loss tokens of a batch.

    rows ── cut after what the last loss token needs ── pack ──> [1, U] ── module ──> logits [N, V]
         [N] log probability, entropy <── token_logprobs (only positions that predict a loss token) ──┘

Legend: B rows, T tokens, U packed tokens, N loss tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rillflow.errors import TrainingError
from rillflow.formulas.logprobs import TokenLogprobs, token_logprobs
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged, concatenate_ragged
from rillflow.train.config import TrainConfig
from rillflow.train.guards import loss_tokens
from rillflow.train.packed import PackedAttention, pack


class Scorer:
    """Runs a module over batches, a micro-batch at a time.

    Args:
        module: a causal language model with Rillflow's attention; it is put in evaluation mode.
        config: how a batch is cut into micro-batches.
    """

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self._module: Any = module.eval()
        self._budget = config.tokens_per_micro_batch
        self.device = next(module.parameters()).device

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged:
        """Log probabilities of the loss tokens.

        Args:
            batch: rows with ``tokens`` and ``loss_mask``.
            temperature: the one the tokens were sampled at.

        Returns:
            float32, aligned to ``tokens``; 0 where the loss mask is False.

        Raises:
            TrainingError: a row's first token is a loss token.
        """
        rows = batch.only("tokens", "loss_mask")
        parts = micro_batches(rows, self._budget)
        scored = [self._aligned(rows.select(part), temperature) for part in parts]
        if not scored:
            return rows.ragged("tokens").with_values(torch.zeros(0))
        return concatenate_ragged(scored).select(torch.argsort(torch.cat(parts)))

    def forward(self, part: Batch, temperature: float = 1.0) -> TokenLogprobs:
        """Log probability and entropy of the part's N loss tokens, in row order; one pass of the module.

        Args:
            part: rows with ``tokens`` and ``loss_mask``, at least one loss token among them.
            temperature: the one the tokens were sampled at.
        """
        tokens, mask = part.ragged("tokens"), part.ragged("loss_mask")
        index = mask.values.nonzero().squeeze(1)
        rows, places = mask.row_of[index], mask.positions[index]
        needed = torch.zeros_like(mask.lengths).scatter_reduce(0, rows, places, "amax")
        inputs = _beginnings(tokens, needed)
        packed = pack(inputs)
        predicting = packed.places.values[inputs.starts[rows] + places - 1]
        plan = PackedAttention(packed, self.device)
        logits = self._module(
            input_ids=packed.tokens[None].to(self.device),
            position_ids=packed.positions[None].to(self.device),
            use_cache=False,
            attention_plan=plan,
            logits_to_keep=predicting.to(self.device),
        ).logits[0]
        if not plan.layers:
            raise TrainingError(
                f"{type(self._module).__name__} does not use Rillflow's attention",
                why="rows that lie end to end would see each other",
                fix='build the module with attn_implementation="rillflow"',
            )
        return token_logprobs(logits, tokens.values[index].to(self.device), temperature)

    def _aligned(self, part: Batch, temperature: float) -> Ragged:
        mask = loss_tokens(part).ragged("loss_mask"), part.ragged("loss_mask")
        values = torch.zeros(mask[1].values.shape[0])
        if mask[0].values.numel():
            values[mask[1].values] = self.forward(part, temperature).logprobs.float().cpu()
        return mask[1].with_values(values)


def micro_batches(batch: Batch, budget: int) -> list[Tensor]:
    """Indices of rows, cut so that no part has more than ``budget`` tokens unless one row alone does.

    Rows of one prompt stay neighbours, because what they share is computed once in each part.
    """
    ids = batch.ids.tolist()
    order = sorted(range(len(batch)), key=ids.__getitem__)
    lengths = batch.ragged("tokens").lengths.tolist()
    parts: list[list[int]] = []
    held = budget
    for row in order:
        if not parts or held + lengths[row] > budget:
            parts.append([])
            held = 0
        parts[-1].append(row)
        held += lengths[row]
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def _beginnings(rows: Ragged, lengths: Tensor) -> Ragged:
    """The first ``lengths`` [B] values of each row."""
    kept = rows.positions < rows.expand(lengths)
    return Ragged(values=rows.values[kept], lengths=lengths)
