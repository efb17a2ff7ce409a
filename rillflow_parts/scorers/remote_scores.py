"""Remote scores: a reward behind an HTTP address, called with rows and answering with their scores.

    prompts, completions, columns ─ rows_per_request ─> POST {"prompts", "completions", "columns"}
    scores, in order  <─────────────────────────────── {"scores": [1.0, null, ...]}

Null abstains. A failed request is the error of its rows, a late one their timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rillflow_parts.scorers.json_requests import HttpAddress


class RemoteScores:
    """A reward function that asks an HTTP server.

    Args:
        rows_per_request: largest number of rows of one request.
        address: settings of an ``HttpAddress``.
    """

    def __init__(self, *, rows_per_request: int, **address: Any) -> None:
        self._rows, self._address = rows_per_request, HttpAddress(**address)

    def __call__(
        self, prompts: Sequence[object], completions: Sequence[object], **columns: Sequence[object]
    ) -> list[object]:
        """Return a score, None or an exception for each row."""
        parts = [slice(first, first + self._rows) for first in range(0, len(prompts), self._rows)]
        bodies = [
            {
                "prompts": prompts[part],
                "completions": completions[part],
                "columns": {name: values[part] for name, values in columns.items()},
            }
            for part in parts
        ]
        replies = self._address.post_all(bodies)
        return [
            entry
            for part, reply in zip(parts, replies, strict=True)
            for entry in self._entries(reply, len(prompts[part]))
        ]

    def _entries(self, reply: Any, rows: int) -> list[object]:
        """Return the scores of a request's rows; its failure for each row if there are none."""
        if isinstance(reply, Exception):
            return [reply] * rows
        scores = reply.get("scores") if isinstance(reply, dict) else reply
        if isinstance(scores, list) and len(scores) == rows:
            return scores
        said = (
            f"{len(scores)} scores" if isinstance(scores, list) else f"no list of scores: {str(reply)[:200]}"
        )
        return [ValueError(f"{self._address.url} answered {rows} rows with {said}")] * rows
