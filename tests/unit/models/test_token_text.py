"""The bytes of tokens are those of the text, and a settled text never changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.models.tokenizer import Tokenizer
from rillflow.rollout.engine import Stops
from tests.unit.models.token_kinds import END, byte_level, fallback, word_piece

KINDS = {made.__name__: made() for made in (fallback, byte_level, word_piece)}
TEXTS = ("你日😀é", "ab 日 the 😀!", "é", "a\n\nb", "the", " the a", "日本", "naïve 😀😀 x")


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Return any tokens, so also bytes that are no character; end tokens among them."""
    return st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=14)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_settled_text_is_the_beginning_of_every_longer_text(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    tokens = data.draw(tokens_of(tokenizer))
    for special in (False, True):
        whole, last = tokenizer.decode(tokens, special=special), ""
        for count in range(len(tokens) + 1):
            settled = tokenizer.settled_text(tokens[:count], special=special)
            assert whole.startswith(settled) and settled.startswith(last)
            last = settled


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["fallback", "byte_level"])
def test_a_text_settles_with_its_last_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    tokens = tokenizer.encode(text)
    more = tokenizer.encode("z")
    assert tokenizer.settled_text([*tokens, *more]) == tokenizer.decode([*tokens, *more])
    if kind == "byte_level":
        assert tokenizer.settled_text(tokens) == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_bytes_and_places_of_tokens_are_those_of_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    tokens = data.draw(tokens_of(tokenizer))
    text = tokenizer.decode(tokens)
    parts = tokenizer.parts(tokens)
    said = [part for token, part in zip(tokens, parts, strict=True) if token not in tokenizer.stop_tokens]
    joined = b"".join(part.content for part in said)
    assert "\ufffd" in text or joined == text.encode()
    for count, part in enumerate(said):
        before = b"".join(part.content for part in said[:count])
        if "\ufffd" not in text:
            whole_characters = len(before.decode("utf-8", "ignore"))
            assert part.begin == whole_characters
    places = [part.begin for part in parts]
    assert places == sorted(places) and all(place <= len(text) for place in places)


def test_a_run_of_bytes_that_is_no_text_has_a_place_for_each_byte() -> None:
    tokenizer = KINDS["fallback"]
    run = [*tokenizer.encode("你"), tokenizer.encode("é")[0]]
    tokens = [*tokenizer.encode("a"), *run, *tokenizer.encode("b")]
    assert tokenizer.decode(tokens) == "a" + 4 * "\ufffd" + "b"
    assert [part.begin for part in tokenizer.parts(tokens)] == [0, 1, 2, 3, 4, 5]


def test_the_space_before_a_word_belongs_to_its_token() -> None:
    tokenizer = KINDS["fallback"]
    the, after = (tokenizer._inner.get_vocab()[piece] for piece in ("▁the", "ab"))
    assert tokenizer.pieces([the, after]) == [" the", "ab"]
    assert [part.content for part in tokenizer.parts([the, the])] == [b"the", b" the"]


@pytest.mark.parametrize("kind", ["fallback", "byte_level"])
@pytest.mark.parametrize("stop", ["日", "é", "😀", " the", "the", "b!", "!b", "\n\n", "naïve"])
@given(data=st.data())
def test_a_row_ends_with_the_token_that_completes_a_text(kind: str, stop: str, data: st.DataObject) -> None:
    """Another stop text is longer, so that the searched tail may begin within a character."""
    tokenizer = KINDS[kind]
    text = data.draw(st.text("ab! 日é你😀\n", max_size=8)).replace(stop, "") + stop
    before = tokenizer.encode("z" + text)
    stops = Stops((stop, "a stop text that is never there"), tokenizer)
    ends = [
        count
        for count in range(1, len(before) + 1)
        if stops.ends(before[max(0, count - stops.longest) : count])
    ]
    said = [tokenizer.decode(before[:count]) for count in range(1, len(before) + 1)]
    first = next(count for count, each in enumerate(said, 1) if stop in each)
    assert (ends and ends[0] == first) or stops.longest == 0
    assert END not in text
