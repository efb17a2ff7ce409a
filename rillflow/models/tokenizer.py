"""Tokenizer: text to tokens and back, without surprises.

    prompt ── encode ─────────────> [begin] text    the model's begin token, if its tokeniser adds one
    chat ──── encode_chats ───────> the model's template, up to where the assistant speaks
    answer ── encode_completions ─> text end        no begin token
              encode_replies ─────> the template's text of an answer, to its end
    tokens ── decode ─────────────> text            without special tokens

Text from data never becomes a special token: a special token's text is split into ordinary tokens, or
refused if a chat template would keep it. The exception is text that its author has already rendered with
the template (``is_rendered``). Rows end by their length, never by a token's value, so the padding token may
be the end token.

Imports torch only for tokenisers that a model's own class must load, and transformers only for what
``BareTokenizer`` cannot do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from rillflow.errors import ModelError
from rillflow.models.bare import BareTokenizer
from rillflow.models.probes import chosen_template, probe_template
from rillflow.models.template_changes import rewritten, shortened, unsaid
from rillflow.models.template_clock import at_time
from rillflow.models.token_text import UNREADABLE, Alphabet, TokenPart, TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # the import takes a second or two


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to be rendered by a chat template.

    Example:
        Chat(turns=[{"role": "user", "content": "17+25="}])
    """

    turns: Sequence[Mapping[str, Any]]
    """The messages; contents are text."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools for the assistant, as JSON objects."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as ``enable_thinking``."""


class Tokenizer:
    """A model's tokeniser.

    Example:
        tokenizer.decode(tokenizer.encode("17+25=")) == "17+25="

    Args:
        inner: transformers' tokeniser, or a bare one.
        stop_tokens: the model's end tokens besides the tokeniser's own.
    """

    def __init__(
        self, inner: PreTrainedTokenizerBase | BareTokenizer, *, stop_tokens: Iterable[int] = ()
    ) -> None:
        own = [] if inner.eos_token_id is None else [int(inner.eos_token_id)]
        self.stop_tokens: frozenset[int] = frozenset([*own, *stop_tokens])
        """Tokens that end an answer."""
        vocabulary = inner.get_vocab()
        self.vocabulary_size: int = 1 + max(vocabulary.values(), default=-1)
        """The largest token + 1."""
        self._inner = inner
        self._end = own[0] if own else min(self.stop_tokens, default=None)
        added = inner.added_tokens_decoder.values()
        special = {*inner.all_special_tokens, *(token.content for token in added if token.special)}
        texts = sorted((text for text in special if text.strip()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._unsaid = frozenset(vocabulary[text] for text in special if text in vocabulary)
        self._alphabet = Alphabet(inner)
        self._token_text = TokenText(inner)
        self._probed: dict[str, ModelError | None] = {}
        self._encoding = Lock()
        self._clock: datetime | None = None

    def at(self, clock: datetime | None) -> Tokenizer:
        """Return the tokeniser with a chat template that reads this time as now; None: the machine's."""
        other = copy(self)
        other._clock, other._encoding = clock, self._encoding  # one object of the library, one lock
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process gets: everything but the lock."""
        return {name: value for name, value in vars(self).items() if name != "_encoding"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it, with a lock of this process."""
        vars(self).update(state)
        self._encoding = Lock()

    def encode(self, text: str) -> list[int]:
        """Return a prompt's tokens; see ``encode_texts``."""
        return self.encode_texts([text])[0]

    @property
    def begin(self) -> int | None:
        """The begin token that the tokeniser puts before every text; None if it adds none."""
        found = self._read([""], begin=True, splits=True)["input_ids"][0]
        return found[0] if found else None

    def encode_texts(self, texts: Sequence[str], *, is_rendered: bool = False) -> list[list[int]]:
        """Return the tokens of prompts, each with the model's begin token if its tokeniser adds one.

        Args:
            texts: the prompts.
            is_rendered: whether the chat template wrote them: then special tokens in the text are read as
                such, and a begin token in the text is not added again.

        Raises:
            ModelError: a non-empty text encodes to nothing, or has a character the tokeniser lacks.
        """
        return self._encode(texts, begin=True, is_rendered=is_rendered)

    def encode_completions(self, texts: Sequence[str], *, is_rendered: bool = False) -> list[list[int]]:
        """Return the tokens of answers, each without begin token and with the end token.

        Args:
            texts: the answers.
            is_rendered: as in ``encode_texts``; an answer that already has an end token gets no other.

        Raises:
            ModelError: as ``encode_texts``; or the model has no end token.
        """
        return [*map(self.ended, self._encode(texts, begin=False, is_rendered=is_rendered))]

    def encode_chats(self, chats: Sequence[Chat]) -> list[list[int]]:
        """Return the tokens of conversations, up to where the assistant answers.

        Raises:
            ModelError: the model has no chat template, the template refuses the messages, or a message
                contains a special token.
        """
        texts = [self.rendered(chat, opens=True) for chat in chats]
        return self._encode(texts, begin=False, is_rendered=True)

    def rendered(self, chat: Chat, *, opens: bool) -> str:
        """Return a conversation as the template's text; with ``opens``, including the beginning of an answer.

        Raises:
            ModelError: as ``encode_chats``.
        """
        if self._library.chat_template is None:
            raise ModelError(
                "the model has no chat template",
                why="the rows are messages, and only a chat template turns messages into text",
                fix="give text (a judge: frame.chat = false), or choose a model with a chat template",
            )
        self._refuse_special(chat)
        from rillflow.models.probe_child import TEMPLATE_ERRORS  # imports jinja2

        template = self._probed_template(chat, opens=opens)
        refusals = list[Exception]()
        for turns in _alternatives(chat.turns):
            try:
                text: str = self._library.apply_chat_template(
                    [dict(turn) for turn in turns],
                    tools=chat.tools,
                    tokenize=False,
                    add_generation_prompt=opens,
                    **at_time(template, self._clock, chat.arguments),
                    **chat.arguments,
                )
                return text
            except TEMPLATE_ERRORS as error:
                refusals.append(error)
        roles = ", ".join(turn["role"] for turn in chat.turns)
        why = str(refusals[0]) or type(refusals[0]).__name__
        raise ModelError(f"the chat template refuses messages of {roles}", why=why) from refusals[0]

    def _probed_template(self, chat: Chat, *, opens: bool) -> str:
        """Return a chat's template; its first chat is rendered in a limited child before."""
        library = self._library
        template = chosen_template(library, chat.tools)
        if template not in self._probed:
            given = {"tools": chat.tools, "add_generation_prompt": opens, **chat.arguments}
            self._probed[template] = None
            try:
                probe_template(template, {**library.special_tokens_map, **given}, chat.turns)
            except ModelError as error:
                self._probed[template] = error
        if refused := self._probed[template]:  # fails at once for the other rows
            raise ModelError(refused.what, why=refused.why, fix=refused.fix)
        return template

    def encode_replies(
        self, chats: Sequence[Chat], answers: Sequence[str | Mapping[str, Any]]
    ) -> list[list[int]]:
        """Return the tokens of an answer to each conversation, with the template's text at its end.

        If the template writes none of the model's end tokens after an answer, one is added.

        Args:
            chats: the conversations.
            answers: texts, or the assistant's messages with thoughts or calls.

        Raises:
            ModelError: as ``encode_chats`` and ``encode_completions``; or the template changes the
                conversation's text once it is answered, or leaves out a part of the answer.
        """
        texts = [self._reply(chat, answer) for chat, answer in zip(chats, answers, strict=True)]
        return [*map(self.ended, self._encode(texts, begin=False, is_rendered=True))]

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of parts of rendered conversations, without begin and end token.

        Raises:
            ModelError: as ``encode_texts``.
        """
        return self._encode(texts, begin=False, is_rendered=True)

    def encode_more(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """Return the tokens of a text in the middle of a row, without begin and end token.

        Raises:
            ModelError: as ``encode_texts``.
        """
        return self._encode([text], begin=False, is_rendered=is_rendered)[0]

    def to_end(self, tokens: list[int]) -> list[int]:
        """Return an answer's tokens up to and including its first end token."""
        ends = (place for place, token in enumerate(tokens, 1) if token in self.stop_tokens)
        return tokens[: next(ends, None)]

    def special_in(self, text: str) -> str | None:
        """Return the first special token in a text; None if there is none."""
        found = self._special.search(text)
        return None if found is None else found[0]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens; ``special`` keeps special tokens, except end tokens."""
        kept = [token for token in tokens if token not in self.stop_tokens] if special else list(tokens)
        text: str = self._inner.decode(
            kept, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def without_special(self, text: str) -> str:
        """Return a text without the special tokens that it spells."""
        return self._special.sub("", text)

    @property
    def chat_template(self) -> str:
        """Text of the chat template, of all of them if there are several; empty if there is none."""
        found = self._library.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    @property
    def has_response_template(self) -> bool:
        """Whether the tokeniser says how a message is read from an answer."""
        return bool(self._library.init_kwargs.get("response_template"))

    def parsed(self, answer: str, prompt: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the message that an answer is, by the tokeniser's ``response_template``.

        Raises:
            ModelError: the answer does not fit the template.
        """
        try:
            found: dict[str, Any] = self._library.parse_response(answer, prefix=prompt, tools=[*tools])
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError("the answer does not fit response_template", why=str(error)) from None
        return found

    def settled_text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the beginning of ``decode`` that no later token changes."""
        skipped = self.stop_tokens if special else self._unsaid
        text = self.decode(tokens[: self._token_text.settled(tokens, skipped)], special=special)
        return text.rstrip(UNREADABLE)  # half a character

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's own text for display, special tokens too; partial characters become U+FFFD."""
        return [each.decode("utf-8", "replace") for each in self.token_bytes(tokens, special=True)]

    def token_bytes(self, tokens: Sequence[int], *, special: bool = False) -> list[bytes]:
        """Return the UTF-8 bytes that each token adds in the middle of ``decode``."""
        parts = zip(tokens, self._token_text.bytes_of(tokens), strict=True)
        return [content if special or token not in self._unsaid else b"" for token, content in parts]

    def parts(self, tokens: Sequence[int]) -> list[TokenPart]:
        """Return what each token adds to ``decode``; special tokens add nothing to later places."""
        return self._token_text.parts(tokens, self._unsaid)

    def token_of(self, text: str) -> int | None:
        """Return the single token of a text, added or encoded; None if it encodes to several.

        Raises:
            ModelError: the text encodes to no token.
        """
        for token, added in self._inner.added_tokens_decoder.items():
            if added.content == text:
                return int(token)
        tokens = self._encode([text], begin=False)[0]
        if not tokens:
            raise ModelError(f"the text {text!r} encodes to no token", why="a stop string must have a token")
        return tokens[0] if len(tokens) == 1 else None

    def reads_as(self, other: Tokenizer) -> bool:
        """Return whether rows of ``other`` are valid here: same tokens, template and end tokens."""
        is_same = self.first_difference(other) is None and self.stop_tokens == other.stop_tokens
        return is_same and self._library.chat_template == other._library.chat_template

    def first_difference(self, other: Tokenizer, *, is_ordinary: bool = False) -> int | None:
        """Return the smallest token with different text in the two; None if there is none.

        Args:
            other: the other tokeniser.
            is_ordinary: leave out the tokens that either has added to its vocabulary.
        """
        mine, theirs = self._inner.get_vocab().items(), other._inner.get_vocab().items()
        added = {*self._inner.added_tokens_decoder, *other._inner.added_tokens_decoder} if is_ordinary else ()
        return min((token for _, token in mine ^ theirs if token not in added), default=None)

    def save(self, directory: Path) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained`` reads.

        Raises:
            OSError: they cannot be written.
        """
        try:
            self._library.save_pretrained(directory)
        except Exception as error:  # tokenizers has no exception type of its own for disk errors
            if (refused := re.search(r"os error (\d+)", str(error))) is None:
                raise
            raise OSError(int(refused[1]), str(error)) from error

    @property
    def _library(self) -> PreTrainedTokenizerBase:
        """The same tokeniser of transformers, with all its methods."""
        return self._inner.library if isinstance(self._inner, BareTokenizer) else self._inner

    def _encode(self, texts: Sequence[str], *, begin: bool, is_rendered: bool = False) -> list[list[int]]:
        if not texts:
            return []
        self._alphabet.check([self._special.sub("", text) for text in texts] if is_rendered else texts)
        found = self._read(texts, begin=begin, splits=not is_rendered)
        rows = []
        for text, tokens, special in zip(
            texts, found["input_ids"], found["special_tokens_mask"], strict=True
        ):
            length = len(tokens)
            while length and special[length - 1]:
                length -= 1  # an end token that the tokeniser adds is not part of a prompt
            # Does the text already contain the begin token that the tokeniser adds?
            start = int(is_rendered and special[:1] == [1] and tokens[:1] == tokens[1:2])
            if text and not length:
                raise _lost(text)
            rows.append(tokens[start:length])
        return rows

    def _read(self, texts: Sequence[str], *, begin: bool, splits: bool) -> Mapping[str, list[list[int]]]:
        """Call the tokeniser; one thread at a time, because ``splits`` is a state of the library's object."""
        with self._encoding:
            found: Mapping[str, list[list[int]]] = self._inner(
                list(texts),
                add_special_tokens=begin,
                split_special_tokens=splits,
                return_attention_mask=False,
                return_token_type_ids=False,
                return_special_tokens_mask=True,
                verbose=False,
            )
        return found

    def ended(self, answer: list[int]) -> list[int]:
        """Return an answer's tokens with an end token, if they have none.

        Raises:
            ModelError: the model has no end token.
        """
        if self._end is None:
            raise ModelError(
                "the model has no end token",
                why="a training answer must end with an end token",
                fix="set eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
            )
        return answer if self.stop_tokens.intersection(answer) else [*answer, self._end]

    def _reply(self, chat: Chat, answer: str | Mapping[str, Any]) -> str:
        """Return the text that the template adds to a conversation for the assistant's answer."""
        before = self.rendered(chat, opens=True)
        turn = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        whole = self.rendered(replace(chat, turns=[*chat.turns, turn]), opens=False)
        if not whole.startswith(before):
            raise rewritten(before, whole)
        reply = whole[len(before) :]
        if unsaid(reply, turn) is not None:
            opening = before.removeprefix(self.rendered(chat, opens=False))
            if (part := unsaid(opening + reply, turn)) is not None:
                raise shortened(turn, part, reply)
        return reply

    def _refuse_special(self, chat: Chat) -> None:
        parts: list[tuple[str, object]] = [(f"a message of {turn['role']!r}", turn) for turn in chat.turns]
        for name, part in [*parts, ("a tool", chat.tools or ()), ("a template variable", chat.arguments)]:
            for special in filter(None, map(self.special_in, _strings(part))):
                raise ModelError(
                    f"{name} contains the text of the special token {special!r}",
                    why="a rendered conversation would contain the token, which could end or forge a turn",
                    fix="remove it from the data",
                )


def _alternatives(turns: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the turns, and then those with the arguments of calls as JSON text, which some templates need."""
    yield turns
    if any(turn.get("tool_calls") for turn in turns):
        yield [
            {**turn, "tool_calls": [_with_text(call) for call in turn["tool_calls"]]}
            if turn.get("tool_calls")
            else turn
            for turn in turns
        ]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), dict):
        return call
    written = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": written} if "function" in call else written


def _strings(value: object) -> Iterator[str]:
    """Yield every text in nested plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in (*value, *(value.values() if isinstance(value, Mapping) else ())):
            yield from _strings(part)


def require_rows(tokenizer: Tokenizer, rows: int) -> None:
    """Refuse a tokeniser with more tokens than the embedding has rows.

    Raises:
        ModelError: it names both numbers.
    """
    if tokenizer.vocabulary_size > rows:
        raise ModelError(
            f"the tokeniser has {tokenizer.vocabulary_size} tokens and the model's embedding {rows} rows",
            why="the model cannot read tokens beyond its embedding",
            fix="use the tokeniser the model was trained with, or call resize_token_embeddings",
        )


def _lost(text: str) -> ModelError:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return ModelError(
        f"the text {shown!r} encodes to no token",
        why="the tokeniser's class does not fit its files, or its vocabulary does not fit the text",
        fix="set tokenizer_class in tokenizer_config.json; TokenizersBackend takes tokenizer.json as it is",
    )


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Tokeniser and context that rows are encoded for."""

    tokenizer: Tokenizer
    """The model's tokeniser."""
    context: int
    """The longest row in tokens."""

    def reads_as(self, other: ModelInput) -> bool:
        """Return whether rows encoded for ``other`` are valid here."""
        return self.context == other.context and self.tokenizer.reads_as(other.tokenizer)
