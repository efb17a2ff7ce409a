"""Turn tokens: a conversation as tokens in which every turn of the assistant is learnt.

    system user │ assistant │ user │ assistant │      an assistant's turn: the text that the template adds
    not learnt    learnt      not    learnt           for it after the text that opens an answer

A turn is tokenised by itself, as a sampled answer is. A template that renders earlier turns differently once
the conversation goes on, as those that drop thoughts do, is refused: no row has the prompt of every turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rillflow.errors import ModelError
from rillflow.models.template_changes import rewritten, shortened, unsaid
from rillflow.models.tokenizer import Chat, Tokenizer


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """A conversation's tokens."""

    prompt: list[int]
    """Tokens before the first turn of the assistant."""
    answer: list[int]
    """All later tokens."""
    learnt: list[bool]
    """Whether the assistant wrote the token, for each token of the answer."""


def encode_turns(tokenizer: Tokenizer, chats: Sequence[Chat]) -> list[TurnTokens]:
    """Return the tokens of conversations that end with the assistant.

    Raises:
        ModelError: the template changes earlier turns or leaves out a part of one; see also ``encode_chats``.
    """
    texts = [[*_parts(tokenizer, chat)] for chat in chats]
    flat = iter(tokenizer.encode_parts([part for parts in texts for part in parts]))
    return [_joined(tokenizer, [next(flat) for _ in parts]) for parts in texts]


def _parts(tokenizer: Tokenizer, chat: Chat) -> Iterator[str]:
    """Yield the text before an assistant's turn, and the text of the turn, in turn."""
    known = ""
    for place, turn in enumerate(chat.turns):
        if turn["role"] != "assistant":
            continue
        before = tokenizer.rendered(replace(chat, turns=chat.turns[:place]), opens=True)
        whole = tokenizer.rendered(replace(chat, turns=chat.turns[: place + 1]), opens=False)
        for begin, text in ((known, before), (before, whole)):
            if not text.startswith(begin):
                raise _forgets(begin, text)
        if (part := unsaid(whole[len(known) :], turn)) is not None:
            raise shortened(turn, part, whole[len(before) :])
        yield before[len(known) :]
        yield whole[len(before) :]
        known = whole


def _joined(tokenizer: Tokenizer, parts: Sequence[list[int]]) -> TurnTokens:
    """Join the parts; only the last turn gets an end token that the template does not write.

    Some templates end a turn by opening the next one, such as with ``<|user|>``. If this is an end token of
    the model, the turn before it is learnt with it.
    """
    answer, learnt, is_open = list[int](), list[bool](), False
    for place, part in enumerate(parts[1:], 1):
        is_own = place % 2 == 1
        tokens = tokenizer.ended(part) if place == len(parts) - 1 else part
        learnt += [is_own] * len(tokens)
        if is_open and tokens and tokens[0] in tokenizer.stop_tokens:
            learnt[len(answer)] = True
        is_open = is_own and not tokenizer.stop_tokens.intersection(tokens)
        answer += tokens
    return TurnTokens(prompt=parts[0], answer=answer, learnt=learnt)


def _forgets(before: str, whole: str) -> ModelError:
    error = rewritten(before, whole)
    why = "all turns are learnt from one row (task.turns = 'all'), in which each must follow its own prompt"
    return ModelError(
        error.what,
        why=why,
        fix="learn the last turn alone (task.turns = 'last'), or try "
        "task.template_arguments that keep earlier turns unchanged",
    )
