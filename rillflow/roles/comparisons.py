"""Comparisons: turn questions to a judge into rows of tokens.

    template ─ pieces, {prompt}, answers ─> piece, prompt, piece, answer, piece ... ─┬─ label A ─┐
                                                                                     └─ label B ─┴─ rows

The pieces are encoded one by one, in training and in judging, so no token spans two of them, and a special
token that a prompt or an answer spells is plain text. A prompt that does not fit loses its beginning;
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
from rillflow.rewards.judge_prompt import FrameConfig
from rillflow.rewards.outcome import Outcome, Score


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question to a judge."""

    prompt: str
    """Prompt that was answered."""
    answers: tuple[str, ...]
    """One answer, or two in the order in which they are shown."""


class Questioner:
    """Encoder of questions into rows.

    Args:
        tokenizer: the judge's tokeniser.
        frame: template around prompt and answers.
        context: most tokens in a row.

    Raises:
        ModelError: a label is not one token, the tokeniser cannot read the frame, or the model has no chat
            template for it.
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
                f"the judge's chat template renders the placeholders {pieces[1::2]}",
                why=f"it must keep the frame's placeholders {frame.places}, each once and in this order",
                fix="set frame.chat = false, and write the chat format into the frame",
            )
        self._fixed = [
            tokenizer.encode_more(each, is_rendered=frame.chat) if each else [] for each in pieces[::2]
        ]
        if begin is not None and not frame.chat:
            self._fixed[0].insert(0, begin)
        self.labels = [self._label(label) for label in frame.labels]
        """Token of each label."""
        self.encoded(Question(prompt="", answers=("",) * (2 if frame.compares else 1)))

    def encoded(self, question: Question) -> list[int]:
        """Return the tokens of a question, without a label; a prompt that does not fit loses its beginning.

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
                f"answers of {[len(each) for each in question.answers]} characters leave no room",
                why=f"prompt, answers and frame share the judge's context of {self._context} tokens",
                fix="use a judge with a longer context, or shorter answers",
            )
        return [*before, *prompt[max(len(prompt) - room, 0) :], *after]

    def labelled(self, questions: Sequence[list[int]], labels: Sequence[int], ids: Tensor) -> Batch:
        """Return rows with ``tokens`` and a ``loss_mask`` on the last token only, a label.

        Args:
            questions: N encoded questions.
            labels: index of each question's label.
            ids: [N, 3] int64, ids of the rows.
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
                f"the label {label!r} is {len(tokens)} tokens in the judge's tokeniser",
                why="the judge answers with one token, which must be a whole label",
                fix="choose labels of one token each; some tokenisers need a leading space",
            )
        return tokens[0]


class Standings:
    """Results of comparisons, collected by row.

    Args:
        rows: number of rows.
        tie: least distance from 1/2 at which a probability counts.
    """

    def __init__(self, rows: int, tie: float) -> None:
        self._tie = tie
        self._wins, self._said, self._met, self._against, self._bias = torch.zeros(
            5, rows, dtype=torch.float64
        )

    def add(self, pairs: Sequence[tuple[int, int]], found: Preferences) -> None:
        """Add comparisons of rows i and j; a probability is that of i being better.

        Args:
            pairs: N pairs (i, j).
            found: results of the comparisons.
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
        """Return the mean probability of each row to win; an abstention if none of its comparisons counts."""
        return [
            Score(outcome=Outcome.SCORE, value=wins / said) if said else _silent(met)
            for wins, said, met in zip(
                self._wins.tolist(), self._said.tolist(), self._met.tolist(), strict=True
            )
        ]

    def extra(self) -> dict[str, Tensor]:
        """Return ``contradicted``, ``bias`` and ``ties``, [B] float32 each; NaN without a comparison."""
        sums = {"contradicted": self._against, "bias": self._bias, "ties": self._met - self._said}
        return {name: (each / self._met).float() for name, each in sums.items()}


def _silent(met: float) -> Score:
    why = "every comparison is a tie" if met else "the prompt has no other answer to compare with"
    return Score(outcome=Outcome.ABSTAIN, message=why)


def prompt_text(columns: str) -> str:
    """Return the prompt in a row's field ``columns``; a conversation has one line per turn."""
    prompt = json.loads(columns)["prompt"]
    if isinstance(prompt, str):
        return prompt
    turns = ((turn.get("role", ""), turn.get("content", "")) for turn in prompt)
    return "\n".join(f"{role}: {_content(content)}" for role, content in turns)


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content)
