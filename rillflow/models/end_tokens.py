"""End tokens: the tokens that end a completion, as a model's directory and its configs name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError
from rillflow.models.weight_files import settings_in


def end_tokens(source: str) -> list[int]:
    """Return the end tokens of a directory's generation_config.json, or else of its config.json.

    Raises:
        ModelError: a file is not a JSON object.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(source) / name
        found = settings_in(file) if file.exists() else {}
        inner = found.get("text_config")
        ends = found.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        if ends is not None:
            return _checked_ends(file, ends)
    return []


def _checked_ends(file: Path, ends: Any) -> list[int]:
    found = [ends] if isinstance(ends, int) else ends
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise ModelError(
            f"{file}: eos_token_id is {str(ends)[:60]}", why="it must be a token id, or a list of token ids"
        )
    return found


def listed(tokens: int | Sequence[int] | None) -> list[int]:
    """Return a config's end tokens (one, several or none) as a list."""
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)


def require_ends(ends: Iterable[int], rows: int) -> None:
    """Refuse end tokens beyond the rows of the embedding.

    Raises:
        ModelError: it names the first one.
    """
    beyond = [token for token in sorted(ends) if not 0 <= token < rows]
    if beyond:
        raise ModelError(
            f"the end token {beyond[0]} is beyond the model's embedding of {rows} rows",
            why="a token beyond the embedding is never sampled",
            fix="correct eos_token_id in generation_config.json or config.json",
        )
