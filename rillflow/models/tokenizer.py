"""Tokenizer: text to tokens and back, without surprises.

    prompt ── encode ─────────────> [begin] text    the model's begin token, where its tokeniser adds one
    chat ──── encode_chat ────────> the model's template, up to where the assistant speaks
    answer ── encode_completion ──> text end        no begin token
    tokens ── decode ─────────────> text            without special tokens

Text from data is only ever text: what spells a special token is cut into ordinary ones, or refused
where a chat template would not. Rows end by their length, never by a token's value, so padding may
be the same token as the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from rillflow.errors import ModelError
from rillflow.models.pretrained import LIBRARY_ERRORS

_AS_WRITTEN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Declared classes that mean: everything is in tokenizer.json."""


class Tokenizer:
    """A model's tokeniser.

    Example:
        tokenizer.decode(tokenizer.encode("17+25=")) == "17+25="

    Args:
        inner: the library's tokeniser.
        stop_tokens: end tokens the model names, besides the tokeniser's own.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, *, stop_tokens: Iterable[int] = ()) -> None:
        own = [] if inner.eos_token_id is None else [int(inner.eos_token_id)]
        self.stop_tokens: frozenset[int] = frozenset([*own, *stop_tokens])
        """Tokens that end an answer."""
        self.vocabulary_size: int = 1 + max(inner.get_vocab().values(), default=-1)
        """One more than the largest token."""
        self._inner = inner
        self._end = own[0] if own else min(self.stop_tokens, default=None)
        added = inner.added_tokens_decoder.values()
        self._special = sorted(
            {*inner.all_special_tokens, *(token.content for token in added if token.special)}
        )
        self._alphabet = _Alphabet.of(inner)
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens; see ``encode_texts``."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of several prompts, each with the model's own begin token where its tokeniser adds one.

        Raises:
            ModelError: a text that is not empty encodes to nothing, or has a character the tokeniser lacks.
        """
        return self._encode(texts, begin=True)

    def encode_completion(self, text: str) -> list[int]:
        """An answer's tokens; see ``encode_completions``."""
        return self.encode_completions([text])[0]

    def encode_completions(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of several answers, each without a begin token and with the end token.

        Raises:
            ModelError: as ``encode_texts``; or the model has no end token.
        """
        if self._end is None:
            raise ModelError(
                "the model has no end token",
                why="an answer to learn from must say where it ends",
                fix="set eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
            )
        return [[*tokens, self._end] for tokens in self._encode(texts, begin=False)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers.

        Raises:
            ModelError: the model has no chat template or the template refuses the messages; a message
                spells a special token.
        """
        if self._inner.chat_template is None:
            raise ModelError(
                "the model has no chat template",
                why="the prompt is a list of messages, and only a template makes one text of them",
                fix="give the prompt as text, or choose a model with a chat template",
            )
        for message in messages:
            self._refuse_special(message)
        plain = [dict(message) for message in messages]
        try:
            text = self._inner.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(f"the chat template refuses messages of {roles}", why=str(error)) from error
        tokens = self._inner(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        if not tokens:
            raise _lost(text)
        return list(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens left out."""
        text: str = self._inner.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token's own text, special tokens too, to show it; a part of a character is shown as U+FFFD."""
        for token in set(tokens) - self._pieces.keys():
            self._pieces[token] = self._inner.decode([token], clean_up_tokenization_spaces=False)
        return [self._pieces[token] for token in tokens]

    def token_of(self, text: str) -> int:
        """The one token a text is: an added token of this name, or text that encodes to one token.

        Raises:
            ModelError: the text is several tokens, or none.
        """
        added: dict[str, int] = self._inner.get_added_vocab()
        if text in added:
            return added[text]
        tokens = self._encode([text], begin=False)[0]
        if len(tokens) != 1:
            raise ModelError(
                f"the text {text!r} is {len(tokens)} tokens",
                why="a row is ended by one token",
                fix="choose a text that the model has a token for",
            )
        return tokens[0]

    def first_difference(self, other: Tokenizer) -> int | None:
        """The smallest token that the two read as different text; None where there is none."""
        mine, theirs = self._inner.get_vocab().items(), other._inner.get_vocab().items()
        return min((token for _, token in mine ^ theirs), default=None)

    def save(self, directory: Path) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained`` reads."""
        self._inner.save_pretrained(directory)

    def _encode(self, texts: Sequence[str], *, begin: bool) -> list[list[int]]:
        if not texts:
            return []
        self._alphabet.check(texts)
        found = self._inner(
            list(texts),
            add_special_tokens=begin,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_special_tokens_mask=True,
            verbose=False,
        )
        rows = []
        for text, tokens, special in zip(
            texts, found["input_ids"], found["special_tokens_mask"], strict=True
        ):
            length = len(tokens)
            while length and special[length - 1]:
                length -= 1  # an end token the tokeniser adds is no part of a prompt
            if text and not length:
                raise _lost(text)
            rows.append(tokens[:length])
        return rows

    def _refuse_special(self, message: Mapping[str, Any]) -> None:
        for special in self._special:
            if special in message["content"] and not special.isspace():
                raise ModelError(
                    f"a message of {message['role']!r} spells the special token {special!r}",
                    why="within a chat template it would be read as the token, and could end or forge a turn",
                    fix="remove it from the data",
                )


class _Alphabet:
    """The characters of a byte-level tokeniser that has not all bytes; others have every character."""

    def __init__(self, symbols: frozenset[str] | None) -> None:
        self._symbols = symbols
        self._is_own = all(len(symbol) == 1 or symbol[0] == "<" for symbol in symbols or ())
        self._known: set[str] = set()
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    @staticmethod
    def of(inner: PreTrainedTokenizerBase) -> _Alphabet:
        """A complete alphabet, unless the tokeniser is byte-level and lacks a byte."""
        if isinstance(inner, PreTrainedTokenizerFast) and isinstance(
            inner.backend_tokenizer.decoder, decoders.ByteLevel
        ):
            symbols = frozenset(inner.get_vocab())
            if not symbols.issuperset(pre_tokenizers.ByteLevel.alphabet()):
                return _Alphabet(symbols)
        return _Alphabet(None)

    def check(self, texts: Iterable[str]) -> None:
        """Refuse a character that would silently be left out."""
        if self._symbols is None:
            return
        for character in sorted(set().union(*texts) - self._known):
            if not self._symbols.issuperset(self._split.pre_tokenize_str(character)[0][0]):
                raise ModelError(
                    f"the tokeniser has no character {character!r}",
                    why="its vocabulary lacks it, and the text would lose it silently",
                    fix="add it to policy.model.new.alphabet, or remove it from the data"
                    if self._is_own
                    else "leave it out, or choose a model whose tokeniser has it",
                )
            self._known.add(character)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The library's tokeniser of a directory or hub name.

    A directory whose tokenizer.json is not claimed by a model's own class is read as it is written:
    ``AutoTokenizer`` would rebuild it as the class of the model's type, and lose what that class lacks.

    Raises:
        ModelError: there is none, or it has no vocabulary.
    """
    try:
        declared = get_tokenizer_config(source).get("tokenizer_class")
        written = declared in _AS_WRITTEN or (
            declared is None and (Path(source) / "tokenizer.json").is_file()
        )
        kind = PreTrainedTokenizerFast if written else AutoTokenizer
        inner = kind.from_pretrained(source, trust_remote_code=False)
    except (*LIBRARY_ERRORS, KeyError, TypeError) as error:
        raise _no_tokenizer(source, str(error).strip().split("\n")[0]) from error
    if len(inner.get_vocab()) <= len(inner.added_tokens_decoder):
        raise _no_tokenizer(source, "no file in it holds a vocabulary")
    return inner


def _no_tokenizer(source: str, why: str) -> ModelError:
    return ModelError(
        f"the model {source} has no tokeniser that can be loaded",
        why=why,
        fix="put tokenizer.json and tokenizer_config.json beside the weights",
    )


def _lost(text: str) -> ModelError:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return ModelError(
        f"the text {shown!r} encodes to no token",
        why="the tokeniser's class does not fit its files, or its vocabulary does not fit the text",
        fix="set tokenizer_class in tokenizer_config.json; TokenizersBackend takes tokenizer.json as it is",
    )
