"""Encoded: rows as a model's tokens, all encoded before the first step.

examples ── encode ─┬─> Encoded(example, prompt, answers)      four bytes per token
                    └─> DataError                              names the row's place in the data

Rows are encoded in large batches. A batch with a row that cannot be encoded is halved until that row is
alone. Imports no torch.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rillflow.errors import DataError, ModelError
from rillflow.models.tokenizer import Chat, Tokenizer
from rillflow.models.turn_tokens import encode_turns
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.example import Answer, Example, answer_text
from rillflow.tasks.kinds import DEMONSTRATIONS, PROMPTS, DataKind

BATCH = 1000
"""Rows that are encoded at once."""
LONGEST_TOKEN = 32
"""Characters per token; a text longer than the context at this rate is refused without encoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A row as tokens."""

    example: Example
    """The row."""
    prompt: array[int]
    """Tokens of its prompt."""
    answers: tuple[array[int], ...] = ()
    """Tokens of its answers, each with its end token."""
    learnt: array[int] | None = None
    """For each token of its only answer, 1 if it is learnt and 0 if not; None: all are learnt."""

    def length(self, kind: DataKind, max_tokens: int) -> int:
        """Return the tokens of prompt and longest answer; without answers, ``max_tokens`` count instead."""
        return len(self.prompt) + max(map(len, self.answers[: len(kind.answers)]), default=max_tokens)

    def short(self, kind: DataKind, room: int, begin: int | None) -> Encoded | None:
        """Return the row with its prompt cut at the beginning to ``room`` tokens in total, its answers uncut.

        A begin token is kept. Return None if no token of the prompt would be left.

        Args:
            kind: kind of data, whose answers count.
            room: tokens of prompt and answer.
            begin: the model's begin token.
        """
        kept = room - (self.length(kind, 0) - len(self.prompt))
        first = self.prompt[:1] if list(self.prompt[:1]) == [begin] else self.prompt[:0]
        if kept <= len(first):
            return None
        prompt = first + self.prompt[len(self.prompt) - (kept - len(first)) :]
        return replace(self, prompt=prompt)

    def cut(self, kind: DataKind) -> Encoded:
        """Return the row with only the answers of a kind."""
        if len(self.answers) == len(kind.answers):
            return self
        return replace(self, answers=self.answers[: len(kind.answers)])


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokeniser with the settings for encoding rows.

    Example:
        rows = Encoder(tokenizer=model.tokenizer).rows(task.train)
    """

    tokenizer: Tokenizer
    """Tokeniser of the model."""
    is_rendered: bool = False
    """Whether the chat template has already been applied to text prompts and their answers."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    learns_turns: bool = False
    """Whether every assistant turn of a conversation is learnt, and not the last alone."""
    context: int | None = None
    """Largest number of tokens of a row; much longer texts are refused before encoding. None: no limit."""

    @staticmethod
    def of(tokenizer: Tokenizer, task: TaskConfig, context: int | None = None) -> Encoder:
        """Return an encoder with the settings of a task."""
        return Encoder(
            tokenizer=tokenizer.at(task.moment),
            is_rendered=task.chat_template_applied,
            template_arguments=task.template_arguments,
            learns_turns=task.turns == "all",
            context=context,
        )

    def chat(self, row: Example, turns: Sequence[Mapping[str, Any]]) -> Chat:
        """Return messages of a row for the chat template; the row's own variables replace the task's."""
        arguments = {**self.template_arguments, **row.template_arguments}
        return Chat(turns=turns, tools=row.tools, arguments=arguments)

    def rows(self, examples: Sequence[Example], kind: DataKind = PROMPTS) -> list[Encoded]:
        """Return all rows, encoded.

        Raises:
            DataError: a row cannot be encoded.
        """
        found = list(self.encode(examples, kind))
        for error in (row for row in found if isinstance(row, DataError)):
            raise error
        return [row for row in found if isinstance(row, Encoded)]

    def encode(self, examples: Sequence[Example], kind: DataKind) -> Iterator[Encoded | DataError]:
        """Yield every row in order, or the error that explains why it cannot be encoded."""
        for _, group in groupby(examples, lambda row: isinstance(row.prompt, str)):
            alike = list(group)
            for start in range(0, len(alike), BATCH):
                yield from self._halved(alike[start : start + BATCH], kind)

    def _halved(self, rows: Sequence[Example], kind: DataKind) -> list[Encoded | DataError]:
        """Encode rows that are all texts or all conversations."""
        try:
            return [*self._together(rows, kind)]
        except ModelError as error:
            if len(rows) == 1:
                return [DataError(error.what, error.why, error.fix)]
        half = len(rows) // 2
        return self._halved(rows[:half], kind) + self._halved(rows[half:], kind)

    def _together(self, rows: Sequence[Example], kind: DataKind) -> Iterator[Encoded]:
        """Encode the rows at once; an error names the first row."""
        if self.learns_turns and kind is DEMONSTRATIONS and not isinstance(rows[0].prompt, str):
            yield from self._conversations(rows)
            return
        encode = self._texts if isinstance(rows[0].prompt, str) else self._chats
        texts, columns = [_answers(row, kind) for row in rows], list[list[list[int]]]()
        for number, name in enumerate(("prompt", *kind.answers)):
            for row, each in zip(rows, texts, strict=True):
                value = each[number - 1] if number else row.key
                self._require_short(name, row, value if isinstance(value, str) else json.dumps(value))
            try:
                columns.append(encode(rows, [each[number - 1] for each in texts] if number else None))
            except ModelError as error:
                raise ModelError(f"the {name} of {rows[0]}: {error.what}", error.why, error.fix) from error
        for row, prompt, *found in zip(rows, *columns, strict=True):
            if not prompt and found:  # a text without a begin token: its first token is given
                prompt, found = found[0][:1], [found[0][1:]]
            cut = map(self.tokenizer.to_end, found) if kind.stops_early else found
            made = tuple(array("i", each) for each in cut)
            yield Encoded(example=row, prompt=array("i", prompt), answers=made)

    def _conversations(self, rows: Sequence[Example]) -> Iterator[Encoded]:
        """Encode conversations whose assistant turns are all learnt."""
        chats = []
        for row in rows:
            (answer,) = _answers(row, DEMONSTRATIONS)
            last = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
            turns = [*row.turns, last]
            self._require_short("conversation", row, json.dumps(turns))
            chats.append(self.chat(row, turns))
        try:
            found = encode_turns(self.tokenizer, chats)
        except ModelError as error:
            raise ModelError(f"the conversation of {rows[0]}: {error.what}", error.why, error.fix) from error
        for row, made in zip(rows, found, strict=True):
            learnt, answers = array("b", made.learnt), (array("i", made.answer),)
            yield Encoded(example=row, prompt=array("i", made.prompt), answers=answers, learnt=learnt)

    def _require_short(self, name: str, row: Example, text: str) -> None:
        if self.context is not None and len(text) > LONGEST_TOKEN * self.context:
            raise ModelError(
                f"the {name} of {row} has {len(text):,} characters",
                why=f"the context of {self.context:,} tokens holds {LONGEST_TOKEN * self.context:,} at most",
                fix="shorten it, or use a longer context",
            )

    def _texts(self, rows: Sequence[Example], answers: Sequence[Answer] | None) -> list[list[int]]:
        if answers is not None:
            texts = [answer_text(answer) for answer in answers]
            return self.tokenizer.encode_completions(texts, is_rendered=self.is_rendered)
        return self.tokenizer.encode_texts([str(row.prompt) for row in rows], is_rendered=self.is_rendered)

    def _chats(self, rows: Sequence[Example], answers: Sequence[Answer] | None) -> list[list[int]]:
        chats = [self.chat(row, row.turns) for row in rows]
        if answers is not None:
            return self.tokenizer.encode_replies(chats, answers)
        return self.tokenizer.encode_chats(chats)


def _answers(row: Example, kind: DataKind) -> tuple[Answer, ...]:
    if not kind.answers and row.prompt == "":
        raise ModelError(
            f"{row} has a text to learn and no prompt",
            why="nothing can be sampled for it",
            fix="set task.held_out = 0, or task.held_out_source to rows with prompts",
        )
    if kind.answers and not row.answers:
        raise ModelError(
            f"{row} has no answer to learn from",
            why="supervised steps train on the column 'completion', or else 'answer'; the others are "
            f"{', '.join(map(repr, row.columns)) or 'none'}",
            fix="name the column that has it, such as task.columns = { completion = 'response' }, or turn "
            "these steps off: --set warm_start=none, --set algorithm.pretrain_weight=0",
        )
    return row.answers
