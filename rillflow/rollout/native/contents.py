"""Contents: the tokens whose keys and values lie in the cache, found again by a row that begins alike.

    tokens   [ block of 16 ][ block of 16 ][ rest ]
    names    hash of 1       hash of 1, 2   the whole        ─> place

A place is known until another row's keys are written there, whether its row still runs or has left. So
samples of a prompt, prompts with one system prompt, and the next turn of a conversation are read as far
as they differ. Names find a candidate; what counts is how many tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rillflow.rollout.native.layout import CachePlace

BLOCK = 16
"""Tokens of a block."""


class Contents:
    """What every place holds."""

    def __init__(self) -> None:
        self._tokens: dict[CachePlace, tuple[int, ...]] = {}
        self._names: dict[CachePlace, set[object]] = {}
        self._places: dict[object, CachePlace] = {}

    def put(self, place: CachePlace, tokens: tuple[int, ...]) -> None:
        """From now on the place holds these; they may go on what it held."""
        held = self.at(place)
        if not tokens or not held or tokens[: len(held)] != held:
            self.drop(place)
        if not tokens:
            return
        self._tokens[place] = tokens
        self._names.setdefault(place, set()).update(_names(tokens))
        self._places |= dict.fromkeys(_names(tokens), place)

    def drop(self, place: CachePlace) -> None:
        """What the place holds is not known any more."""
        self._tokens.pop(place, None)
        for name in self._names.pop(place, ()):
            if self._places.get(name) == place:
                del self._places[name]

    def at(self, place: CachePlace) -> tuple[int, ...]:
        """What the place holds; nothing when that is not known."""
        return self._tokens.get(place, ())

    def find(self, tokens: tuple[int, ...]) -> tuple[CachePlace, int] | None:
        """A place that begins like these tokens, and for how many; the longest beginning that has a name."""
        found = self._places.get(tokens)
        for name in _names(tokens) if found is None else ():
            if name not in self._places:
                break
            found = self._places[name]
        return None if found is None else (found, _common(self._tokens[found], tokens))

    def keep(self, rows: Mapping[int, int]) -> None:
        """All places are gone but so many rows of every band."""
        for place in [each for each in self._tokens if each.row >= rows.get(each.band, 0)]:
            self.drop(place)


def _names(tokens: tuple[int, ...]) -> Iterator[object]:
    """The names of every block with all before it, and last of the whole."""
    name = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        name = hash((name, tokens[end - BLOCK : end]))
        yield name
    yield tokens


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens the two begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
