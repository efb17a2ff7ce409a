"""Retokenize: encode the policy's rows again for a model with another tokeniser.

    rollouts ─ decode ─> answers ─┐
               columns ─> prompts ┴─ Encoder of the other model ─> Reread: its tokens, and why a row has none

Every row is decoded and encoded on the CPU before the model reads it; the rows themselves stay where they
are.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.tasks.encoded import Encoded, Encoder
from rillflow.tasks.example import Example
from rillflow.tasks.kinds import DEMONSTRATIONS


@dataclass(frozen=True, kw_only=True)
class Reread:
    """Rows encoded again by another tokeniser."""

    rows: Batch
    """``tokens`` of B rows, at least one per row."""
    why: Sequence[str]
    """Reason why each row could not be read; empty if it could. An unreadable row has a placeholder token."""


@dataclass(frozen=True, kw_only=True)
class OtherTokens:
    """Converter of rows from one tokeniser to another.

    Example:
        OtherTokens(wrote=policy.tokenizer, encoder=Encoder(tokenizer=mine), context=4096)(rollouts)
    """

    wrote: Tokenizer
    """The policy's tokeniser."""
    encoder: Encoder
    """Encoder with the other model's tokeniser and prompt format."""
    context: int
    """Most tokens in a row of the other model."""

    def __call__(self, rollouts: Batch) -> Reread:
        """Return the rows as the other model's tokens; long rows lose the beginnings of their prompts.

        Args:
            rollouts: B rows with ``tokens``, ``loss_mask`` and ``columns``.
        """
        sampled = completions(rollouts).lists()
        texts = rollouts.ragged("columns").to_text()
        examples = [
            _example(index, columns, self.wrote.decode(tokens))
            for index, (columns, tokens) in enumerate(zip(texts, sampled, strict=True))
        ]
        tokens: list[array[int]] = []
        why: list[str] = []
        for answer, row in zip(sampled, self.encoder.encode(examples, DEMONSTRATIONS), strict=True):
            read = self._short(row) if isinstance(row, Encoded) else None
            is_ended = bool(answer) and answer[-1] in self.wrote.stop_tokens
            tokens.append(array("i", [0]) if read is None else _whole(read, is_ended))
            reason = f"its answer does not fit into the model's context of {self.context} tokens"
            why.append("" if read is not None else reason if isinstance(row, Encoded) else str(row))
        return Reread(rows=Batch(ids=rollouts.ids, fields={"tokens": Ragged.from_rows(tokens)}), why=why)

    def _short(self, row: Encoded) -> Encoded | None:
        if row.length(DEMONSTRATIONS, 0) <= self.context:
            return row
        return row.short(DEMONSTRATIONS, self.context, self.encoder.tokenizer.begin)


def _example(index: int, columns: str, answer: str) -> Example:
    """Return the row of data that a rollout came from, with its sampled answer."""
    row = json.loads(columns)
    prompt = row.pop("prompt")
    asked = prompt if isinstance(prompt, str) else tuple(prompt)
    return Example(index=index, prompt=asked, completion=answer, columns=row)


def _whole(row: Encoded, is_ended: bool) -> array[int]:
    """Return prompt and answer; an answer that was cut off has no end token."""
    answer = row.answers[0]
    return row.prompt + (answer if is_ended else answer[: max(len(answer) - 1, 0)])
