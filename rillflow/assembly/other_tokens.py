"""Other tokens: rows of the policy read by a model with another tokeniser, as functions read text.

    rollouts ─ decode ─> answers ─┐
               columns ─> prompts ┴─ Encoder of the other model ─> Reread: its tokens, and why a row has none

What it costs: a decoding and an encoding of every row on the processor before the model reads it; the rows
themselves stay where they are.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass

from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.roles.reread import Reread
from rillflow.tasks.encoded import Answers, Encoded, Encoder
from rillflow.tasks.example import Example


@dataclass(frozen=True, kw_only=True)
class OtherTokens:
    """Reads rows of one tokeniser by another.

    Example:
        OtherTokens(wrote=policy.tokenizer, encoder=Encoder(tokenizer=mine), context=4096)(rollouts)
    """

    wrote: Tokenizer
    """The policy's."""
    encoder: Encoder
    """The other model's tokeniser, and how it reads prompts."""
    context: int
    """Tokens of a row of the other model at most."""

    def __call__(self, rollouts: Batch) -> Reread:
        """The rows as the other model's tokens; those without room lose their prompts' beginnings.

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
        for answer, row in zip(sampled, self.encoder.encode(examples, Answers.LEARNT), strict=True):
            read = self._short(row) if isinstance(row, Encoded) else None
            is_ended = bool(answer) and answer[-1] in self.wrote.stop_tokens
            tokens.append(array("i", [0]) if read is None else _whole(read, is_ended))
            reason = f"its answer does not fit into {self.context} tokens of the model"
            why.append("" if read is not None else reason if isinstance(row, Encoded) else str(row))
        return Reread(rows=Batch(ids=rollouts.ids, fields={"tokens": Ragged.from_rows(tokens)}), why=why)

    def _short(self, row: Encoded) -> Encoded | None:
        if row.length(Answers.LEARNT, 0) <= self.context:
            return row
        return row.short(Answers.LEARNT, self.context, self.encoder.tokenizer.begin)


def _example(index: int, columns: str, answer: str) -> Example:
    """The row of data that a rollout came from, with what was answered."""
    row = json.loads(columns)
    prompt = row.pop("prompt")
    asked = prompt if isinstance(prompt, str) else tuple(prompt)
    return Example(index=index, prompt=asked, completion=answer, columns=row)


def _whole(row: Encoded, is_ended: bool) -> array[int]:
    """Prompt and answer; an answer that was cut off has no end."""
    answer = row.answers[0]
    return row.prompt + (answer if is_ended else answer[: max(len(answer) - 1, 0)])
