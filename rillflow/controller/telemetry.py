"""Telemetry: ranks compute the metrics of a step and write its rollouts where the rows are.

    results with the same row layout ── write_part ──> one file of columns per rank, in the run directory
    each result ── measure of its endpoint ──> per-rank metrics, merged

It reads fields and knows no algorithm: generated rows are recorded with all scores and advantages computed
for them. No row moves for the records; the reader joins files by row id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import StageResult
from rillflow.formulas.counter import uniform
from rillflow.records.batch import Batch, Field, batch_bytes
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish
from rillflow.roles.reward import OUTCOMES, SCORE_FIELDS
from rillflow.runs.durable import replace
from rillflow.runs.integrity import digest
from rillflow.runs.layout import rollout_file
from rillflow.workers.pending import Pending

_SAMPLED = ("tokens", "sampler_logprobs", "versions", "columns")
"""Recorded fields of sampled rows, in addition to the finish reason."""
_PRICED = {"rewards": "penalised", "penalised": "penalised", "advantages": "advantages"}
"""Recorded name of a formula's result, by the field that it writes."""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Calls that record a step."""

    measured: Sequence[Pending]
    """Per-rank metrics."""
    written: Sequence[Pending]
    """Results that are ready when the rows are on disk."""


def asked(
    executor: GroupExecutor, stages: Sequence[StageResult], run: Path, step: int, share: float
) -> Telemetry:
    """Submit the measures and the writing of the rows that a step sampled.

    Args:
        executor: runs the step.
        stages: stages of the step.
        run: the run directory, as the ranks see it.
        step: number of the step in the run.
        share: share of the prompts whose rows are written.
    """
    endpoints = [executor.endpoint(each.stage) for each in stages]
    told = [(at, each.result) for at, each in zip(endpoints, stages, strict=True) if at and at.measures]
    sampled = [made.lie.rows for at, made in told if "versions" in at.writes and made.lie is not None]
    told = [(at, made) for at, made in told if made.lie is not None and made.lie.rows in sampled]
    measured = [executor.measured(at.measures, made) for at, made in told if at.measures is not None]
    kept = [("", made) for _, made in told]
    kept += [(each.into, each.result) for each in stages if each.into in _PRICED]
    alike: list[list[tuple[str, Pending]]] = []
    for name, made in kept if share and sampled else ():
        known = next((each for each in alike if _lie_alike(each[0][1], made)), None)
        if known is None:
            alike.append(known := [])
        known.append((name, made))
    count, written, before = sum(len(each[0][1].holders) for each in alike), [], 0
    for each in alike:
        names, batches = [name for name, _ in each], [made for _, made in each]
        parts = range(before + 1, before + 1 + len(batches[0].holders))
        given = [(str(rollout_file(run, step, part, count)), share, names) for part in parts]
        written.append(executor.on_holders(write_part, given, batches))
        before += len(given)
    return Telemetry(measured=measured, written=written)


def _lie_alike(one: Pending, other: Pending) -> bool:
    return one.lie is not None and one.lie == other.lie and one.holders == other.holders


def write_part(path: str, share: float, names: Sequence[str], *batches: Batch) -> dict[str, str]:
    """Write this rank's rows and their computed fields as one file; return its name and digest.

    Args:
        path: file to write.
        share: share of the prompts to write; the choice depends only on prompt ids.
        names: for each batch, the field that a formula made; empty for a result of an endpoint.
        batches: results for the same rows.

    Raises:
        RunDirectoryError: the disk fails.
    """
    ids, fields = batches[0].ids, dict[str, Field]()
    for name, batch in zip(names, batches, strict=True):
        if name:
            made = batch.fields[name]
            fields |= {_PRICED[name]: made} if isinstance(made, Tensor) else {}
        else:
            fields = {**_known(batch), **fields}
    rows = Batch(ids=ids, fields=fields)
    if share < 1:
        prompts = torch.cat([ids[:, :2], torch.zeros_like(ids[:, :1])], 1)
        drawn = uniform(0, prompts, torch.zeros_like(ids[:, 0]))
        rows = rows.select((drawn < share).nonzero()[:, 0])
    data = batch_bytes(rows)
    replace(Path(path), [data])
    return {Path(path).name: digest(data)}


def _known(batch: Batch) -> dict[str, Field]:
    """Return the recorded fields of a result: of sampled rows, of scores, or of costs (NaN if none)."""
    there = batch.fields
    if "versions" in there:
        ends = Ragged.from_text(Finish(number).name.lower() for number in batch.dense("finish").tolist())
        tokens = batch.ragged("tokens")
        narrow = tokens.with_values(tokens.values.int())
        return {**{name: there[name] for name in _SAMPLED}, "tokens": narrow, "finish": ends}
    if "costs" in there:
        return {"costs": batch.dense("costs").masked_fill(~batch.dense("valid"), torch.nan)}
    found = {name: there[name] for name in (*SCORE_FIELDS, "parts") if name in there}
    if "outcome" in found:
        outcomes: list[Any] = batch.dense("outcome").tolist()
        found["outcome"] = Ragged.from_text(str(OUTCOMES[index]) for index in outcomes)
    return found
