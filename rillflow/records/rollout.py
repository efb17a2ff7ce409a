"""Rollouts: append-only token trajectories, as single records and as the fields of a batch.

    field               kind            aligned to    content
    tokens              ragged int64    itself        prompt and everything sampled or inserted after it
    loss_mask           ragged bool     tokens        True where the policy sampled the token
    sampler_logprobs    ragged float32  tokens        log probability at sampling, 0 where not sampled
    versions            ragged int32    tokens        weight version that sampled the token, -1 elsewhere
    finish              dense int8 [B]                why the row ended (Finish)
    columns             ragged uint8                  the prompt's other columns, as JSON text
    routes              ragged int16    tokens        [routers, k] experts of each token, -1 where it went
                                                      through no pass; only if they are recorded

The log probability at position t is that of token t given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch
from torch import Tensor

from rillflow.errors import RecordError
from rillflow.records.batch import Batch, Field, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId

CACHE = "cache"
"""Field of the KV caches of rows that move to another engine."""


class Finish(IntEnum):
    """Reason why a rollout ended."""

    STOP = 0
    """A stop token was sampled; it is the last token."""
    LENGTH = 1
    """The limit of new tokens, or of the model's context, was reached."""
    ABORTED = 2
    """The row was taken out while it ran; its tokens are kept, and it can be resumed."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One trajectory.

    Example:
        start = Rollout.start(RowId(0, 0, 0), [5, 6])
        start.sampled([7], [-0.3], version=2).loss_mask == (False, False, True)
    """

    row: RowId
    """Stable id of the row."""
    tokens: tuple[int, ...]
    """Tokens of prompt and answer."""
    loss_mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    logprobs: tuple[float, ...]
    """The sampler's log probability of each sampled token, after temperature; 0 elsewhere."""
    versions: tuple[int, ...]
    """The weight version that sampled each token; -1 elsewhere."""
    finish: Finish = Finish.ABORTED
    """Reason for the end; ABORTED until the rollout ends."""
    columns: str = "{}"
    """The prompt's other columns, as JSON text."""
    routes: Tensor | None = field(default=None, compare=False)
    """[T, R, k] int16 experts of each token, once the rollout has ended; None if they are not recorded."""
    cache: Tensor | None = field(default=None, compare=False)
    """[P, W] keys and values of its first P tokens in all layers, while it moves to another engine."""

    @staticmethod
    def start(row: RowId, prompt: Sequence[int], columns: str = "{}") -> Rollout:
        """Return a trajectory that holds only its prompt."""
        empty = Rollout(row=row, tokens=(), loss_mask=(), logprobs=(), versions=(), columns=columns)
        return empty.inserted(prompt)

    def sampled(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: int, finish: Finish = Finish.ABORTED
    ) -> Rollout:
        """Return the trajectory with sampled tokens appended."""
        if len(tokens) != len(logprobs):
            raise RecordError(f"{len(tokens)} sampled tokens but {len(logprobs)} log probabilities")
        return self._extended(tokens, logprobs, version, is_sampled=True, finish=finish)

    def inserted(self, tokens: Sequence[int]) -> Rollout:
        """Return the trajectory with appended tokens that were not sampled, such as a tool's answer."""
        return self._extended(tokens, [0.0] * len(tokens), -1, is_sampled=False, finish=Finish.ABORTED)

    def first(self, count: int, finish: Finish) -> Rollout:
        """Return the trajectory's first tokens, with the end there."""
        return replace(
            self,
            tokens=self.tokens[:count],
            loss_mask=self.loss_mask[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            finish=finish,
        )

    def _extended(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: int, is_sampled: bool, finish: Finish
    ) -> Rollout:
        return Rollout(  # in half the time of ``replace``: it is made for every turn of every row
            row=self.row,
            tokens=(*self.tokens, *tokens),
            loss_mask=(*self.loss_mask, *([is_sampled] * len(tokens))),
            logprobs=(*self.logprobs, *logprobs),
            versions=(*self.versions, *([version] * len(tokens))),
            finish=finish,
            columns=self.columns,
            routes=self.routes,
            cache=self.cache,
        )


def starts(prompts: Batch, samples: int) -> list[Rollout]:
    """Return ``samples`` trajectories per prompt [B] with the prompt alone, ordered by prompt and sample."""
    texts = prompts.ragged("columns").to_text()
    rows = zip(prompts.row_ids(), prompts.ragged("tokens").lists(), texts, strict=True)
    begun = [Rollout.start(row, tokens, columns) for row, tokens, columns in rows]
    return [
        replace(each, row=each.row._replace(sample=sample)) for each in begun for sample in range(samples)
    ]


def rollout_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Return the rollouts as a batch with the fields of this module's table."""
    routes = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    there: dict[str, Field] = {}
    if rollouts and len(routes) == len(rollouts):
        lengths = torch.tensor([len(each) for each in routes])
        there["routes"] = Ragged(values=torch.cat(routes), lengths=lengths)
    return Batch(
        ids=row_ids([rollout.row for rollout in rollouts]),
        fields={
            **there,
            "tokens": Ragged.from_rows([rollout.tokens for rollout in rollouts]),
            "loss_mask": Ragged.from_rows([rollout.loss_mask for rollout in rollouts], torch.bool),
            "sampler_logprobs": Ragged.from_rows([rollout.logprobs for rollout in rollouts], torch.float32),
            "versions": Ragged.from_rows([rollout.versions for rollout in rollouts], torch.int32),
            "finish": torch.tensor([int(rollout.finish) for rollout in rollouts], dtype=torch.int8),
            "columns": Ragged.from_text([rollout.columns for rollout in rollouts]),
        },
    )


def moved_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Return the rollouts as a batch with their caches, if one has a cache: the ragged field ``cache``."""
    made, caches = rollout_batch(rollouts), [each.cache for each in rollouts]
    there = [cache for cache in caches if cache is not None]
    if not there:
        return made
    lengths = torch.tensor([0 if cache is None else len(cache) for cache in caches])
    return made.with_fields(cache=Ragged(values=torch.cat(there), lengths=lengths))


def rollouts_of(batch: Batch) -> list[Rollout]:
    """Return the rollouts that ``rollout_batch`` or ``moved_batch`` made a batch of."""
    names = ("tokens", "loss_mask", "sampler_logprobs", "versions")
    fields = [[tuple(each) for each in batch.ragged(name).lists()] for name in names]
    lengths, texts = batch.ragged("tokens").lengths, batch.ragged("columns").to_text()
    routes: Sequence[Tensor | None] = [None] * len(batch)
    if "routes" in batch.fields:
        routes = torch.split(batch.ragged("routes").values, lengths.tolist())
    caches: Sequence[Tensor | None] = [None] * len(batch)
    if CACHE in batch.fields:
        held = batch.ragged(CACHE)
        caches = [each if len(each) else None for each in torch.split(held.values, held.lengths.tolist())]
    return [
        Rollout(
            row=row,
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            finish=Finish(finish),
            columns=text,
            routes=experts,
            cache=cache,
        )
        for row, tokens, mask, logprobs, versions, finish, text, experts, cache in zip(
            batch.row_ids(), *fields, batch.dense("finish").tolist(), texts, routes, caches, strict=True
        )
    ]


def completions(batch: Batch) -> Ragged:
    """Return only the sampled tokens, as a ragged field [B]."""
    return batch.ragged("tokens").where(batch.ragged("loss_mask"))
