"""Shown: rollouts as the page shows them, read from the files of their step.

row of the index ─> step, place ─ StepFiles ─> short row: texts cut around what was searched, with marks
run, step, row id ─ StepFiles ─> whole row: every column, every token with its text and log probability
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_json
from rillflow.runs.rollouts import prompt_text
from rillflow_parts.watch.index import Index
from rillflow_parts.watch.step_files import StepFiles

CUT = 300
"""Most characters of a text in a short row."""
BEFORE = 60
"""Characters shown before the first match, if a text is cut."""
MARKS = 20
"""Most matches that are marked in a text."""
_SHORT = ("completion", "outcome", "reward", "finish", "columns", "versions", "advantage")


def files_of(run: Path, step: int) -> tuple[Path, ...]:
    """Return the files of a step.

    Raises:
        LookupError: the step has no complete rollouts in columns.
    """
    files = layout.files_of_step(run, step)
    if not files or files[0].suffix != ".safetensors":
        raise LookupError(f"step {step}")
    return files


def short_rows(run: Path, index: Index, rows: Iterable[int], text: str) -> list[dict[str, Any]]:
    """Return rows of an index; a step whose files are gone is left out."""
    wanted = [(index.block_of(row), row) for row in rows]
    found = dict[int, dict[str, Any]]()
    for block in dict.fromkeys(block for block, _ in wanted):
        step, first = int(index.blocks[block]["step"]), int(index.blocks[block]["first"])
        places = [row - first for its, row in wanted if its == block]
        try:
            with StepFiles(files_of(run, step)) as files:
                found |= {first + place: short_row(files, step, place, text) for place in places}
        except (LookupError, RunDirectoryError):  # the run was rewound or deleted meanwhile
            continue
    return [found[row] for _, row in wanted if row in found]


def short_row(files: StepFiles, step: int, place: int, text: str = "") -> dict[str, Any]:
    """Return a row with its texts cut around the first match of ``text``."""
    row = files.row(place, _SHORT)
    prompt, prompt_marks = excerpt(prompt_text(row.get("prompt")), text)
    answer, marks = excerpt(row.get("completion") or "", text)
    sampled = [version for version in row.get("versions", ()) if version >= 0]
    return {
        **_identity(row, step),
        "prompt_text": prompt,
        "prompt_marks": prompt_marks,
        "completion": answer,
        "marks": marks,
        **_score(row),
        "length": len(sampled),
        "version_min": min(sampled, default=None),
        "version_max": max(sampled, default=None),
    }


def whole_row(run: Path, step: int, epoch: int, prompt: int, sample: int) -> dict[str, Any]:
    """Return everything about a row.

    Raises:
        LookupError: there is no such row.
        RunDirectoryError: a file is damaged.
    """
    with StepFiles(files_of(run, step)) as files:
        place = files.place_of(epoch, prompt, sample)
        if place is None:
            raise LookupError(f"row {epoch}, {prompt}, {sample} of step {step}")
        row = files.row(place)
        others = [other for other in files.group(epoch, prompt) if other != place]
        group = [short_row(files, step, other) for other in others]
    versions = row.get("versions", [])
    sampled = [version for version in versions if version >= 0]
    return {
        **_identity(row, step),
        "prompt_text": prompt_text(row.get("prompt")),
        "messages": row.get("prompt") if isinstance(row.get("prompt"), list) else None,
        "completion": row.get("completion", ""),
        **_score(row),
        "length": len(sampled),
        "version_min": min(sampled, default=None),
        "version_max": max(sampled, default=None),
        "message": row.get("message") or "",
        "parts": row.get("parts", {}),
        "cost": finite(row.get("cost")),
        "penalised_reward": finite(row.get("penalised_reward")),
        "columns": row.get("columns", {}),
        "tokens": list(_tokens(row, token_texts(run))),
        "groups": group,
    }


def token_texts(run: Path) -> Sequence[str]:
    """Return the text of every token; empty without a readable tokens.json."""
    try:
        found: Any = read_json(run / layout.TOKENS).get("texts", [])
    except RunDirectoryError:
        return ()
    return found if isinstance(found, list) else ()


def _tokens(row: Mapping[str, Any], texts: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield every token of the row, the prompt's included."""
    for token, logprob, version in zip(row["tokens"], row["logprobs"], row["versions"], strict=True):
        yield {
            "id": token,
            "text": texts[token] if 0 <= token < len(texts) else None,
            "is_sampled": version >= 0,
            "logprob": finite(logprob) if version >= 0 else None,
            "version": version if version >= 0 else None,
        }


def _identity(row: Mapping[str, Any], step: int) -> dict[str, int]:
    return {"step": step, "epoch": row["epoch"], "prompt": row["prompt_id"], "sample": row["sample"]}


def _score(row: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: finite(row.get(name)) for name in ("reward", "advantage")}
    return {**told, "outcome": row.get("outcome") or "", "finish": row.get("finish") or ""}


def finite(value: Any) -> float | None:
    """Return a number as JSON has it; None for NaN, infinity and no number."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def excerpt(text: str, searched: str) -> tuple[str, list[list[int]]]:
    """Return at most CUT characters around the first match, and the matches as UTF-16 offsets in them."""
    places = re.compile(re.escape(searched), re.IGNORECASE) if searched else None
    first = places.search(text) if places else None
    start = max(0, first.start() - BEFORE) if first and len(text) > CUT else 0
    shown = ("…" if start else "") + text[start : start + CUT] + ("…" if start + CUT < len(text) else "")
    if places is None:
        return shown, []
    marks = [[_units(shown[: each.start()]), _units(shown[: each.end()])] for each in places.finditer(shown)]
    return shown, marks[:MARKS]


def _units(text: str) -> int:
    """Return the length of a text as a browser counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
