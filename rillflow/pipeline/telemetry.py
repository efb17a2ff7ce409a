"""What one step's journal says: metrics of the sampled rows, and the rows themselves for the disk.

Reads fields, not algorithms: whatever an algorithm calls, rows that were generated are recorded with
whatever scores and advantages were computed for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.observe.run_directory import write_rollouts
from rillflow.records.batch import Batch, Field
from rillflow.records.metrics import Metrics, merge_metrics
from rillflow.records.rollout import Finish
from rillflow.roles.reward import OUTCOMES, SCORE_FIELDS, parts_of
from rillflow.roles.trained_role import TrainedRole
from rillflow.workers.endpoint import Measure


def record(
    trained: TrainedRole[Any], run: Path, step: int, measures: Sequence[Measure | None], *batches: Batch
) -> Metrics:
    """Write the rows sampled in a step into the run directory, and measure what was sampled and scored.

    Runs where the policy is, so that rollouts do not pass through the controller.

    Args:
        trained: the policy, or what is trained in its place; its tokeniser knows each token's text.
        run: the run directory, as this rank sees it.
        step: of the run.
        measures: what is to be measured of each batch, if its rows are sampled ones.
        batches: those of the step that are measured, and those that formulas made, in order.
    """
    told = [(measure, batch) for measure, batch in zip(measures, batches, strict=True) if measure is not None]
    sampled = [batch for _, batch in told if "versions" in batch.fields]
    measured = [
        measure(batch)
        for measure, batch in told
        if any(torch.equal(batch.ids, rollouts.ids) for rollouts in sampled)
    ]
    write_rollouts(run, step, rollout_rows(sampled, batches, trained.model.tokenizer.pieces))
    return merge_metrics(measured)


def rollout_rows(
    sampled: Sequence[Batch], batches: Sequence[Batch], decode: Callable[[list[int]], list[str]]
) -> Iterator[dict[str, Any]]:
    """One JSON record a sampled row, with whatever was computed for it.

    Args:
        sampled: what was generated.
        batches: everything of the step that is known of rows.
        decode: gives each token's text. Lists are aligned to the row's tokens, prompt included.
    """
    advantages, paid = _by_row(batches, "advantages"), _by_row(batches, "penalised", "rewards")
    for rollouts in sampled:
        known: dict[str, Field] = {}
        for batch in batches:
            if torch.equal(batch.ids, rollouts.ids):
                known = {**(_costs(batch) if "costs" in batch.fields else batch.fields), **known}
        records = _rows(Batch(ids=rollouts.ids, fields=known), decode)
        for row, record in zip(rollouts.row_ids(), records, strict=True):
            if record.get("reward") is not None and paid[row] != record["reward"]:
                record["penalised_reward"] = paid[row]
            yield record | ({"advantage": advantages[row]} if row in advantages else {})


def _by_row(batches: Sequence[Batch], *names: str) -> dict[tuple[int, ...], float]:
    """The number of each row in the last batch that has one of the fields, the first it has."""
    found: dict[tuple[int, ...], float] = {}
    for batch in batches:
        values = next((batch.fields[name] for name in names if name in batch.fields), None)
        if isinstance(values, Tensor):
            found |= zip(map(tuple, batch.ids.tolist()), values.tolist(), strict=True)
    return found


def _rows(batch: Batch, decode: Callable[[list[int]], list[str]]) -> Iterator[dict[str, Any]]:
    lists = [batch.ragged(name).lists() for name in ("tokens", "sampler_logprobs", "versions")]
    ended = [Finish(number).name.lower() for number in batch.dense("finish").tolist()]
    computed = _verdicts(batch)
    told = zip(batch.row_ids(), batch.ragged("columns").to_text(), *lists, strict=True)
    for index, (row, text, tokens, logprobs, versions) in enumerate(told):
        columns = json.loads(text)
        yield {
            "epoch": row.epoch,
            "prompt_id": row.prompt,
            "sample": row.sample,
            "prompt": columns.pop("prompt"),
            "columns": columns,
            "tokens": tokens,
            "token_texts": decode(tokens),
            "logprobs": logprobs,
            "versions": versions,
            "finish": ended[index],
            **{name: values[index] for name, values in computed.items()},
        }


def _verdicts(batch: Batch) -> dict[str, list[Any]]:
    """What was computed for the rows after they were sampled, by name."""
    texts = [name for name in ("completion", "message") if name in batch.fields]
    found: dict[str, list[Any]] = {name: batch.ragged(name).to_text() for name in texts}
    if "outcome" in batch.fields:
        found["outcome"] = [str(OUTCOMES[index]) for index in batch.dense("outcome").tolist()]
        found["reward"] = _known(batch.dense("rewards"), batch.dense("valid"))
    if any(parts := parts_of(batch)):
        found["parts"] = parts
    if "costs" in batch.fields:
        found["cost"] = _known(batch.dense("costs"), ~batch.dense("costs").isnan())
    return found


def _known(values: Tensor, valid: Tensor) -> list[float | None]:
    """Each row's number; None where it has none."""
    return [value if kept else None for value, kept in zip(values.tolist(), valid.tolist(), strict=True)]


def _costs(batch: Batch) -> dict[str, Field]:
    """What a batch says of costs; NaN where a row has none. Its other verdicts are not the reward's."""
    kept = {name: field for name, field in batch.fields.items() if name not in SCORE_FIELDS}
    return {**kept, "costs": batch.dense("costs").masked_fill(~batch.dense("valid"), torch.nan)}
