"""Rollouts as rows of JSON, written to a run directory in columns, as ranks write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rillflow.records.batch import Batch, Field, batch_bytes, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.runs.durable import replace
from rillflow.runs.layout import rollout_file

NUMBERS = {"reward": "rewards", "penalised_reward": "penalised", "advantage": "advantages"}
RAGGED = {"tokens": torch.int32, "logprobs": torch.float64, "versions": torch.int32}
TEXTS = ("finish", "completion", "outcome", "message")


def write_rollouts(run: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one step's rows as one part; a row may have any subset of the columns."""
    told = [{"tokens": [], "logprobs": [], "versions": [], "finish": "stop", **row} for row in rows]
    if not told:
        return
    fields: dict[str, Field] = {
        {"logprobs": "sampler_logprobs"}.get(name, name): Ragged.from_rows([row[name] for row in told], dtype)
        for name, dtype in RAGGED.items()
    }
    fields |= {
        name: Ragged.from_text([row.get(name) or "" for row in told])
        for name in TEXTS
        if any(name in row for row in told)
    }
    asked = [{"prompt": row.get("prompt", ""), **row.get("columns", {})} for row in told]
    fields["columns"] = Ragged.from_text([json.dumps(each) for each in asked])
    if any("parts" in row for row in told):
        fields["parts"] = Ragged.from_text([json.dumps(row.get("parts", {})) for row in told])
    for name, written in NUMBERS.items():
        if any(name in row for row in told):
            values = [row.get(name) for row in told]
            fields[written] = torch.tensor(
                [float("nan") if value is None else value for value in values], dtype=torch.float64
            )
    if "rewards" in fields:
        fields["valid"] = torch.tensor([row.get("reward") is not None for row in told])
    ids = row_ids([RowId(row.get("epoch", 0), row.get("prompt_id", 0), row.get("sample", 0)) for row in told])
    replace(rollout_file(run, step, 1, 1), [batch_bytes(Batch(ids=ids, fields=fields))])
    known = [text for row in told for text in zip(row["tokens"], row.get("token_texts", ()), strict=False)]
    if known:
        texts = [dict(known).get(token, "") for token in range(1 + max(dict(known)))]
        (run / "tokens.json").write_text(json.dumps({"texts": texts}))
