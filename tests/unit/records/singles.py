"""Convert a batch of rollouts to single records."""

from __future__ import annotations

from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout


def rollouts_of(batch: Batch) -> list[Rollout]:
    """Return the batch's rows as single records: the inverse of ``rollout_batch``."""
    names = ("tokens", "loss_mask", "sampler_logprobs", "versions")
    ragged = [map(tuple, batch.ragged(name).lists()) for name in names]
    finishes, columns = map(Finish, batch.dense("finish").tolist()), batch.ragged("columns").to_text()
    return [
        Rollout(
            row=row, tokens=tokens, loss_mask=mask, logprobs=sampled, versions=at, finish=end, columns=text
        )
        for row, tokens, mask, sampled, at, end, text in zip(
            batch.row_ids(), *ragged, finishes, columns, strict=True
        )
    ]
