"""Token text: the bytes that each token adds, and the part of a text that later tokens cannot change.

byte-level       "Ġæ" ──> b" \\xe6"           each character of the piece is a byte
byte fallback    "<0xE6>" ──> b"\\xe6"        a run that is no UTF-8 reads as U+FFFD for each byte
others           text of the token after an ordinary letter, so that a leading space is kept
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import decoders, pre_tokenizers

from rillflow.errors import ModelError
from rillflow.models.bare import BareTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # the import takes a second or two

UNREADABLE = "\ufffd"
"""Character that a decoder writes for bytes that are no character."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Piece of a token for one byte, where the tokeniser falls back to bytes."""


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """What one token adds to a text."""

    content: bytes
    """UTF-8 bytes of the token; a character may be spread over several tokens."""
    begin: int
    """Place in the text of the first character that the token is part of."""


def escaped(content: bytes) -> str:
    """Return the text of a token; bytes that are no character as ``\\xe6``, as OpenAI's protocol has them."""
    return content.decode("utf-8", "backslashreplace")


class TokenText:
    """Bytes of a tokeniser's tokens.

    Args:
        inner: transformers' tokeniser, or a bare one.
    """

    def __init__(self, inner: PreTrainedTokenizerBase | BareTokenizer) -> None:
        self._inner = inner
        decoder = inner.backend_tokenizer.decoder if inner.is_fast else None
        self._is_byte_level = _decodes(decoder, b'"ByteLevel"')
        self._falls_back = decoder is None or _decodes(decoder, b'"ByteFallback"')
        self._known: dict[int, bytes] = {}

    def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the UTF-8 bytes that each token adds in the middle of a text; a partial character's, too."""
        for token in set(tokens) - self._known.keys():
            self._known[token] = self._bytes(token)
        return [self._known[token] for token in tokens]

    def settled(self, tokens: Sequence[int], skipped: frozenset[int]) -> int:
        """Return how many tokens have a text that no later token changes.

        A run of byte tokens is one unit: its last byte decides whether all of it is characters.

        Args:
            tokens: the text so far.
            skipped: tokens that the text leaves out; they do not end a run of bytes.
        """
        end = len(tokens)
        if not self._falls_back:
            return end
        begin = end
        while begin and (tokens[begin - 1] in skipped or self._is_byte(tokens[begin - 1])):
            begin -= 1
            end = begin if tokens[begin] not in skipped else end
        return end

    def parts(self, tokens: Sequence[int], skipped: frozenset[int]) -> list[TokenPart]:
        """Return what each token adds to the text of all these tokens.

        Args:
            tokens: the whole text.
            skipped: tokens that the text leaves out.
        """
        found, count, is_first = list[TokenPart](), 0, True
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        readable = self._readable(tokens, skipped)
        for token, own, is_readable in zip(tokens, self.bytes_of(tokens), readable, strict=True):
            if is_first and token not in skipped:  # a text may begin without its first word's space
                alone, is_first = self._decode([token]), False
                own = own if UNREADABLE in alone else alone.encode()
            found.append(TokenPart(content=own, begin=count))
            if token not in skipped:
                count += len(reader.decode(own)) if is_readable else 1
        return found

    def _readable(self, tokens: Sequence[int], skipped: frozenset[int]) -> list[bool]:
        """Return for each token whether its bytes are read as UTF-8: false in a run of bytes that is none."""
        found, run = [True] * len(tokens), list[int]()
        if not self._falls_back:
            return found
        for place, token in [*enumerate(tokens), (len(tokens), -1)]:
            if place < len(tokens) and (token in skipped or self._is_byte(token)):
                run += [] if token in skipped else [place]
                continue
            try:
                b"".join(self.bytes_of([tokens[each] for each in run])).decode()
            except UnicodeDecodeError:
                for each in run:
                    found[each] = False
            run = []
        return found

    def _bytes(self, token: int) -> bytes:
        piece = self._pieces_by_token.get(token, "")
        if self._is_byte_level:
            mapped = [_BYTES.get(character) for character in piece]
            return piece.encode() if None in mapped else bytes(each for each in mapped if each is not None)
        if self._falls_back and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        if self._letter is None:
            return self._decode([token]).encode()
        return self._decode([self._letter, token])[1:].encode()

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self._pieces_by_token.get(token, "")) is not None

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._inner.decode(tokens, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _pieces_by_token(self) -> dict[int, str]:
        return {token: piece for piece, token in self._inner.get_vocab().items()}

    @cached_property
    def _letter(self) -> int | None:
        """A token whose text is one letter wherever it stands."""
        vocabulary = self._inner.get_vocab()
        return next((vocabulary[each] for each in "aAeEtT01" if each in vocabulary), None)


class Alphabet:
    """The characters of a byte-level tokeniser that lacks some bytes; others have every character."""

    def __init__(self, inner: PreTrainedTokenizerBase | BareTokenizer) -> None:
        is_bytes = inner.is_fast and isinstance(inner.backend_tokenizer.decoder, decoders.ByteLevel)
        self._symbols = frozenset(inner.get_vocab() if is_bytes else ())
        self._is_whole = not is_bytes or self._symbols.issuperset(pre_tokenizers.ByteLevel.alphabet())
        self._is_own = all(len(symbol) == 1 or symbol[0] == "<" for symbol in self._symbols)
        self._known: set[str] = set()
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def check(self, texts: Iterable[str]) -> None:
        """Refuse a character that the tokeniser would silently drop."""
        if self._is_whole:
            return
        for character in sorted(set().union(*texts) - self._known):
            if not self._symbols.issuperset(self._split.pre_tokenize_str(character)[0][0]):
                raise ModelError(
                    f"the tokeniser has no character {character!r}",
                    why="the text would lose the character silently",
                    fix="add it to policy.model.new.alphabet, or remove it from the data"
                    if self._is_own
                    else "remove it, or choose a model whose tokeniser has it",
                )
            self._known.add(character)


def _decodes(decoder: object, part: bytes) -> bool:
    """Return whether a decoder, or a part of it, is of this kind."""
    return isinstance(decoder, decoders.Decoder) and part in decoder.__getstate__()


def _byte_table() -> dict[str, int]:
    """Return the byte of each character of byte-level pieces: printable bytes stand for themselves."""
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    hidden = [byte for byte in range(256) if chr(byte) not in alphabet]
    shown = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    return shown | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_table()
