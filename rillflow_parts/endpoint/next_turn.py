"""Next turn: the tokens between a sampled answer and the next one, as the chat template writes them.

    row        prompt │ answer as sampled │ end of the turn, later messages, beginning of the next answer
    template   before │ body              │ end of the turn, later messages, beginning of the next answer
               equal    says the same       encoded: the only part that is

Sampled tokens are never tokenised again. A template that writes the text before the answer differently once
there are later messages, or leaves a part of the answer out, is refused. One difference says nothing and is
accepted: an empty block of thoughts that a template writes before the newest answer alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rillflow.errors import ModelError
from rillflow.models.tokenizer import Chat, Tokenizer

_SHOWN = 30
_NO_THOUGHTS = re.compile(r"<think>\s*</think>\s*\Z")


@dataclass(frozen=True, kw_only=True)
class Next:
    """The beginning of the next answer."""

    text: str
    """The template's text of the whole conversation, up to the next answer."""
    tokens: list[int]
    """Tokens between the sampled answer and the next answer."""


def encode_next(
    tokenizer: Tokenizer,
    before: str,
    answer: str,
    later: Chat,
    *,
    is_ended: bool,
    agrees: Callable[[str], bool],
) -> Next:
    """Return the template's tokens between a sampled answer and the next answer.

    Args:
        tokenizer: tokeniser of the model.
        before: the template's text up to the answer, as it was rendered for it.
        answer: the answer's text.
        later: the conversation with the answer and all later messages.
        is_ended: whether an end token was sampled; otherwise it is among the returned tokens.
        agrees: whether the template's text of the answer says what was sampled.

    Raises:
        ModelError: as ``Tokenizer.encode_chats``; or the template changes earlier text of the conversation.
    """
    text, begin = tokenizer.rendered(later, opens=True), len(before)
    if not text.startswith(before):
        empty = _NO_THOUGHTS.search(before)
        if empty is None or not text.startswith(before[: empty.start()]):
            raise _changed_past(before, text)
        begin = empty.start()
    rest = text[begin:]
    marks = [piece for piece in tokenizer.pieces([*tokenizer.stop_tokens]) if piece in rest]
    if marks:
        place, mark = min((rest.index(mark), mark) for mark in marks)
        body, rest = rest[:place], rest[place + len(mark) * is_ended :]
    else:
        body = rest[: len(answer)]
        rest = rest[len(answer) :]
    if not agrees(body):
        raise _changed_past(before + answer, before + body)
    return Next(text=text, tokens=tokenizer.encode_more(rest, is_rendered=True))


def _changed_past(before: str, now: str) -> ModelError:
    place = next((at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
    was, became = (text[max(0, place - _SHOWN) :][: 2 * _SHOWN] for text in (before, now))
    return ModelError(
        f"the chat template rewrites an earlier turn: {was!r} became {became!r}",
        why="a conversation is one row: the policy's tokens stay as sampled, after the text that it saw",
        fix="use a template, or its variables (task.template_arguments), that keeps earlier turns unchanged",
    )
