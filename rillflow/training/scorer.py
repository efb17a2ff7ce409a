"""Scorer: read a module's outputs at the loss tokens of a batch.

    rows ── lay_out ──> [1, U] ── module ──> logits [N, V] ── LogprobReader ──> log probability, entropy [N]
                                  body, head ──> numbers [N] ── ScalarReader ──> the same numbers

    logprobs  of each loss token, from the state one token before it
    values    the scalar head at that state: the value of the state in which the token was chosen
    scores    the scalar head at a row's last token: the score of the whole row

Legend: B rows, T tokens, U packed tokens, N loss tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.formulas.logprobs import TokenLogprobs, token_logprobs
from rillflow.models.routing import Routing
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.records.ragged import Ragged, concatenate_ragged
from rillflow.records.rollout import completions
from rillflow.sharding.module import Output, Parallel
from rillflow.sharding.packed_rows import last_tokens
from rillflow.training.config import TrainConfig
from rillflow.training.guards import ROUTES, check_gap, check_ratio, loss_tokens
from rillflow.training.minibatches import gathered


@dataclass(frozen=True, kw_only=True)
class LogprobReader:
    """Reader of a language model's log probabilities."""

    temperature: float = 1.0
    """Temperature at which the tokens were sampled."""
    ratio_tolerance: float | None = None
    """Largest deviation of the trainer/sampler ratio at a token, checked if set; for on-policy rows."""
    gap_tolerance: float | None = None
    """Largest mean difference of trainer and sampler, checked if set; for on-policy bfloat16 rows."""
    back = 1
    """Number of tokens before a loss token at which the module's output is read."""

    def read(self, tokens: Batch, output: Output) -> TokenLogprobs:
        """Return log probabilities and entropy at the loss tokens; ``tokens`` is reduced to these tokens."""
        return token_logprobs(output, tokens.ragged("tokens").values, self.temperature)

    def checked(self, tokens: Batch, read: TokenLogprobs) -> dict[str, Metric]:
        """Check the contract on-policy-ratio; return the measured metrics.

        Raises:
            TrainingError: a row is not on-policy.
        """
        found: dict[str, Metric] = {}
        if self.ratio_tolerance is not None:
            found |= check_ratio(tokens, read.logprobs, self.ratio_tolerance)
        if self.gap_tolerance is not None:
            found |= check_gap(tokens, read.logprobs, self.gap_tolerance)
        return found

    def describe(self, read: TokenLogprobs, index: int) -> str:
        """Return a description, for an error, of the output at loss token ``index``."""
        return f"its log probability is {float(read.logprobs[index].detach())}"


@dataclass(frozen=True, kw_only=True)
class ScalarReader:
    """Reader of a scalar head's numbers."""

    back: int
    """1 for values, 0 for scores."""

    def read(self, tokens: Batch, output: Output) -> Tensor:
        """Return the output itself."""
        del tokens  # the numbers need no token ids
        assert isinstance(output, Tensor)
        return output

    def checked(self, tokens: Batch, read: Tensor) -> dict[str, Metric]:
        """Return no metrics: no contract concerns the numbers of a head."""
        del tokens, read
        return {}

    def describe(self, read: Tensor, index: int) -> str:
        """See LogprobReader."""
        return f"its scalar output is {float(read[index].detach())}"


OutputReader = LogprobReader | ScalarReader
"""Reader of a module's outputs: log probabilities, or the numbers of a scalar head."""


class Scorer:
    """Runner of a module over batches, one micro-batch at a time.

    Args:
        module: a decoder with Rillflow's attention; it is put in evaluation mode.
        config: how a batch is divided into micro-batches.
        parallel: this rank's part of the module, if it is split over ranks.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, *, parallel: Parallel | None = None) -> None:
        self._budget = config.tokens_per_micro_batch
        self._parallel = parallel or Parallel.whole(module)

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged:
        """Return log probabilities of the loss tokens.

        Args:
            batch: rows with ``tokens`` and ``loss_mask``; if they have ``routes``, the routing is replayed.
            temperature: temperature at which the tokens were sampled.

        Returns:
            float32, aligned to ``tokens``; 0 where the loss mask is False. With pipeline stages the last one
            returns them, and the others zeros.

        Raises:
            TrainingError: a row's first token is a loss token.
        """
        rows = batch.only("tokens", "loss_mask", *(ROUTES & batch.fields.keys()))
        loss_tokens(rows)
        return self._aligned(rows, LogprobReader(temperature=temperature), lambda read: read.logprobs)

    @torch.no_grad()
    def values(self, batch: Batch) -> Ragged:
        """Return the value of the state before each loss token; otherwise as ``logprobs``."""
        self._parallel.require_head()
        rows = batch.only("tokens", "loss_mask")
        loss_tokens(rows)
        return self._aligned(rows, ScalarReader(back=1), lambda read: read)

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        """Return [B] float32 scores of the rows, read at their last tokens; with stages as ``logprobs``.

        Args:
            batch: rows with ``tokens``.

        Raises:
            TrainingError: a row is empty.
        """
        self._parallel.require_head()
        return self._aligned(last_tokens(batch), ScalarReader(back=0), lambda read: read).sums()

    def forward(self, part: Batch, reader: OutputReader) -> Any:
        """Return a whole module's outputs at the part's N loss tokens, in row order; one pass of the module.

        Args:
            part: rows with ``tokens`` and ``loss_mask``, with at least one loss token.
            reader: what to read.
        """
        tokens = _loss_tokens_alone(part).to(self._parallel.device)
        return reader.read(tokens, self._parallel.outputs(part, reader.back))

    def _aligned(self, rows: Batch, reader: OutputReader, number: Callable[[Any], Tensor]) -> Ragged:
        """Return one number per loss token, aligned to ``tokens``, in the rows' own order."""
        index = micro_batches(rows, self._budget, padded=self._parallel.padded)
        parts = [rows.select(each) for each in index]
        masks = [part.ragged("loss_mask") for part in parts]
        taught = [part for part, mask in zip(parts, masks, strict=True) if bool(mask.values.any())]
        numbers = iter(self._numbers(taught, reader, number))  # every rank of a mesh takes part
        if not index:
            return rows.ragged("tokens").with_values(torch.zeros(0))
        found = [mask.with_values(torch.zeros(mask.values.shape[0])) for mask in masks]
        for mask, column in zip(masks, found, strict=True):
            if bool(mask.values.any()):
                column.values[mask.values] = next(numbers).float().cpu()
        return concatenate_ragged(found).select(torch.argsort(torch.cat(index)))

    def _numbers(
        self, parts: Sequence[Batch], reader: OutputReader, number: Callable[[Any], Tensor]
    ) -> list[Tensor]:
        """Return [N] for each part; zeros on the stages before the last."""
        found: list[Tensor] = []

        def finish(part: Batch, output: Output) -> Tensor:
            tokens = _loss_tokens_alone(part).to(self._parallel.device)
            found.append(number(reader.read(tokens, output)))
            return found[-1].sum()

        known = any(ROUTES & part.fields.keys() for part in parts)
        routing = Routing(self._parallel.routers, self._parallel.device) if known else None
        self._parallel.run(parts, reader.back, finish, routing=routing)
        self._parallel.agree()
        return found or [torch.zeros(int(part.ragged("loss_mask").values.sum())) for part in parts]


def _loss_tokens_alone(part: Batch) -> Batch:
    """Return the rows with the ids of their loss tokens, and no other field."""
    return Batch(ids=part.ids, fields={"tokens": completions(part)})


def micro_batches(
    batch: Batch, budget: int, units: Tensor | None = None, *, padded: bool = False
) -> list[Tensor]:
    """Return indices of rows, in parts of at most ``budget`` tokens unless one unit alone has more.

    Rows of one prompt stay neighbours, because each part computes their shared prefix once. Padded rows are
    sorted by length instead, and padding counts.

    Args:
        batch: rows with ``tokens``.
        budget: tokens of a part.
        units: [B] int64; rows with the same number stay in one part. None makes each row a unit.
        padded: whether each row counts as the longest of its part.
    """
    ids = batch.ids.tolist()
    lengths = batch.ragged("tokens").lengths.tolist()
    order = sorted(range(len(batch)), key=lambda row: (-lengths[row] if padded else 0, ids[row]))
    parts: list[list[int]] = []
    held = 0
    for unit in gathered(order, units):
        own = [lengths[row] for row in unit]  # a padded part's first row is its longest
        width = max(own) if not parts else lengths[parts[-1][0]]
        size = len(unit) * width if padded else sum(own)
        if not parts or held + size > budget:
            parts.append([])
            held, size = 0, len(unit) * max(own) if padded else size
        parts[-1] += unit
        held += size
    return [torch.tensor(part, dtype=torch.int64) for part in parts]
