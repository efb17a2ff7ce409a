"""Comparisons: what a judge is asked about answers, as rows of tokens.

    template ─ pieces, {prompt}, answers ─> piece, prompt, piece, answer, piece ... ─┬─ label A ─┐
                                                                                     └─ label B ─┴─ rows

The pieces are encoded one by one, in training and in judging alike, so no token spans two of them, and what
spells a special token in a prompt or an answer is text. A prompt that leaves no room loses its beginning;
answers stay whole.
Legend: N questions, K labels; the rows of a question share all but their last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rillflow.errors import ModelError
from rillflow.formulas.judging import Preferences
from rillflow.models.tokenizer import Chat, Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.rewards.frame import FrameConfig
from rillflow.rewards.outcome import Outcome, Score


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question to a judge."""

    prompt: str
    """What was asked."""
    answers: tuple[str, ...]
    """One answer, or two in the order in which they are shown."""


class Questioner:
    """Makes rows of questions.

    Args:
        tokenizer: the judge's.
        frame: the text around.
        context: tokens of a row at most.

    Raises:
        ModelError: a label is not one token, the tokeniser cannot read the frame, or the model has no chat
            template that would write it.
    """

    def __init__(self, tokenizer: Tokenizer, frame: FrameConfig, context: int) -> None:
        self._tokenizer, self._frame, self._context = tokenizer, frame, context
        self._known: dict[str, list[int]] = {}
        text, begin = frame.template, tokenizer.begin
        if frame.chat:
            text = tokenizer.rendered(Chat(turns=[{"role": "user", "content": text}]), opens=True)
        pieces = frame.split(text)
        if pieces[1::2] != frame.places:
            raise ModelError(
                f"the judge's chat template writes the places {pieces[1::2]}",
                why=f"the frame has {frame.places}, each once",
                fix="set frame.chat = false and write the text around them in the frame",
            )
        self._fixed = [
            tokenizer.encode_more(each, is_rendered=frame.chat) if each else [] for each in pieces[::2]
        ]
        if begin is not None and not frame.chat:
            self._fixed[0].insert(0, begin)
        self.labels = [self._label(label) for label in frame.labels]
        """The token of each label."""
        self.encoded(Question(prompt="", answers=("",) * (2 if frame.compares else 1)))

    def encoded(self, question: Question) -> list[int]:
        """The tokens of a question, without a label; the end of its prompt where not all has room.

        Raises:
            ModelError: the tokeniser cannot read a text, or the answers leave no room.
        """
        before, after, *more = self._fixed
        after = [*after]
        for answer, piece in zip(question.answers, more, strict=True):
            after += [*self._text(answer), *piece]
        prompt = self._text(question.prompt)
        room = self._context - 1 - len(before) - len(after)
        if room < min(len(prompt), 1):
            raise ModelError(
                f"two answers of {[len(each) for each in question.answers]} characters leave no room",
                why=f"prompt, answers and frame share the judge's context of {self._context} tokens",
                fix="use a judge with a longer context, or shorter answers",
            )
        return [*before, *prompt[max(len(prompt) - room, 0) :], *after]

    def labelled(self, questions: Sequence[list[int]], labels: Sequence[int], ids: Tensor) -> Batch:
        """Rows with ``tokens`` and a ``loss_mask`` at the last token alone, a label.

        Args:
            questions: N encoded ones.
            labels: of each the place of its label.
            ids: [N, 3] int64, of the rows.
        """
        rows = [[*tokens, self.labels[label]] for tokens, label in zip(questions, labels, strict=True)]
        tokens = Ragged.from_rows(rows, torch.int64)
        last = tokens.positions == tokens.expand(tokens.lengths - 1)
        return Batch(ids=ids, fields={"tokens": tokens, "loss_mask": tokens.with_values(last)})

    def _text(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 100_000:
                self._known.clear()
            self._known[text] = self._tokenizer.encode_more(text) if text else []
        return self._known[text]

    def _label(self, label: str) -> int:
        tokens = self._tokenizer.encode_more(label)
        if len(tokens) != 1:
            raise ModelError(
                f"the label {label!r} is {len(tokens)} tokens of the judge",
                why="a judge answers with one token",
                fix="choose labels that are one token each, with a space before them where it has one",
            )
        return tokens[0]


class Standings:
    """What comparisons say of each row.

    Args:
        rows: how many.
        tie: how far from 1/2 a probability is at least that says something.
    """

    def __init__(self, rows: int, tie: float) -> None:
        self._tie = tie
        self._wins, self._said, self._met, self._against, self._bias = torch.zeros(
            5, rows, dtype=torch.float64
        )

    def add(self, pairs: Sequence[tuple[int, int]], found: Preferences) -> None:
        """Comparisons of rows i and j, what is said being of i.

        Args:
            pairs: N of them.
            found: what is said.
        """
        if not pairs:
            return
        one, other = torch.tensor(pairs).unbind(1)
        counts = ((found.likely - 0.5).abs() >= self._tie).double()
        for rows, likely in ((one, found.likely), (other, 1 - found.likely)):
            self._wins.index_add_(0, rows, likely * counts)
            self._said.index_add_(0, rows, counts)
            self._met.index_add_(0, rows, torch.ones_like(counts))
            self._against.index_add_(0, rows, found.contradicts.double())
            self._bias.index_add_(0, rows, found.bias)

    def scores(self) -> list[Score]:
        """The mean probability of each row to win; an abstention where nothing is said of it."""
        return [
            Score(outcome=Outcome.SCORE, value=wins / said) if said else _silent(met)
            for wins, said, met in zip(
                self._wins.tolist(), self._said.tolist(), self._met.tolist(), strict=True
            )
        ]

    def extra(self) -> dict[str, Tensor]:
        """[B] float32 each: ``contradicted``, ``bias`` and ``ties``; NaN of a row that met no other."""
        sums = {"contradicted": self._against, "bias": self._bias, "ties": self._met - self._said}
        return {name: (each / self._met).float() for name, each in sums.items()}


def _silent(met: float) -> Score:
    why = "every comparison is as good as a tie" if met else "there is no other answer to compare it with"
    return Score(outcome=Outcome.ABSTAIN, message=why)


def prompt_text(columns: str) -> str:
    """The prompt of a row, from the field ``columns``; of a conversation its turns, a line each."""
    prompt = json.loads(columns)["prompt"]
    if isinstance(prompt, str):
        return prompt
    turns = ((turn.get("role", ""), turn.get("content", "")) for turn in prompt)
    return "\n".join(f"{role}: {_content(content)}" for role, content in turns)


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content)
