"""Contents: an index of the tokens in the KV cache, by which a row finds a cached prefix.

    tokens   [ block of 16 ][ block of 16 ][ rest ]
    names    hash of 1       hash of 1, 2   the whole        ─> place

A place stays in the index until another row overwrites it, whether or not its own row still runs. So samples
of a prompt, prompts with a common system prompt, and later turns of a conversation compute only the tokens
that differ. The hashed names find a candidate; then its tokens are compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rillflow.rollout.native.layout import CachePlace

BLOCK = 16
"""Tokens of a block."""


class Contents:
    """The tokens at every place of the cache."""

    def __init__(self) -> None:
        self._tokens: dict[CachePlace, tuple[int, ...]] = {}
        self._names: dict[CachePlace, set[object]] = {}
        self._places: dict[object, CachePlace] = {}

    def put(self, place: CachePlace, tokens: tuple[int, ...]) -> None:
        """Record that the place holds these tokens; they may extend its present ones."""
        held = self.at(place)
        if not tokens or not held or tokens[: len(held)] != held:
            self.drop(place)
        if not tokens:
            return
        self._tokens[place] = tokens
        self._names.setdefault(place, set()).update(_names(tokens))
        self._places |= dict.fromkeys(_names(tokens), place)

    def drop(self, place: CachePlace) -> None:
        """Forget the tokens of a place."""
        self._tokens.pop(place, None)
        for name in self._names.pop(place, ()):
            if self._places.get(name) == place:
                del self._places[name]

    def at(self, place: CachePlace) -> tuple[int, ...]:
        """Return the tokens of a place; empty if they are unknown."""
        return self._tokens.get(place, ())

    def find(self, tokens: tuple[int, ...]) -> tuple[CachePlace, int] | None:
        """Return a place with a prefix of these tokens, and the prefix's length; None if no name matches."""
        found = self._places.get(tokens)
        for name in _names(tokens) if found is None else ():
            if name not in self._places:
                break
            found = self._places[name]
        return None if found is None else (found, _common(self._tokens[found], tokens))

    def keep(self, rows: Mapping[int, int]) -> None:
        """Drop all places except the first rows of every band; ``rows`` has their number by band."""
        for place in [each for each in self._tokens if each.row >= rows.get(each.band, 0)]:
            self.drop(place)


def _names(tokens: tuple[int, ...]) -> Iterator[object]:
    """Yield the name of each block, which covers all blocks before it, and then the whole tuple."""
    name = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        name = hash((name, tokens[end - BLOCK : end]))
        yield name
    yield tokens


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
