"""Text scores: the log probabilities of a given text's tokens, and the likeliest token at each place.

tokens [T] ── one pass of the module ──> logits [T - 1, V], a chunk at a time ──> own, likeliest, highest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.module import Parallel

_CHUNK_LOGITS = 1 << 24
"""Logits of one chunk: 64 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class TextScores:
    """Log probabilities of a text's tokens at temperature 1; the first token has none."""

    logprobs: list[float]
    """Log probability of each token after the first."""
    likeliest: list[int]
    """Likeliest token at each of these places."""
    highest: list[float]
    """Its log probability."""


@torch.no_grad()
def text_scores(module: nn.Module, tokens: Sequence[int]) -> TextScores:
    """Return the scores of a text.

    Args:
        module: a decoder with Rillflow's attention.
        tokens: the text, at least one token.
    """
    if len(tokens) < 2:
        return TextScores(logprobs=[], likeliest=[], highest=[])
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[0] = False
    rows = Ragged.from_rows([list(tokens)], torch.int64)
    part = Batch(ids=row_ids([RowId(0, 0, 0)]), fields={"tokens": rows, "loss_mask": rows.with_values(mask)})
    output = Parallel.whole(module).outputs(part, 1)
    hidden = output if isinstance(output, Tensor) else output.hidden
    size = max(1, _CHUNK_LOGITS // output.shape[1])
    own, likeliest, highest = list[float](), list[int](), list[float]()
    for begin in range(0, len(tokens) - 1, size):
        chunk = hidden[begin : begin + size]
        logits = chunk if isinstance(output, Tensor) else chunk @ output.weight.T
        logprobs = logits.float().log_softmax(-1)
        wanted = torch.tensor(tokens[begin + 1 : begin + 1 + size], device=logprobs.device)
        top = logprobs.max(-1)
        own += logprobs.gather(1, wanted[:, None])[:, 0].tolist()
        highest += top.values.tolist()
        likeliest += top.indices.tolist()
    return TextScores(logprobs=own, likeliest=likeliest, highest=highest)
