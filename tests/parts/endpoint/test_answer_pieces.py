"""The pieces of a streamed answer are the whole answer, and log probabilities name the text's bytes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow_parts.endpoint.openai_answers import Choice
from rillflow_parts.endpoint.openai_protocol import ChatRequest, CompletionRequest, SamplingRequest
from rillflow_parts.endpoint.tool_calls import Plain
from tests.unit.models.token_kinds import byte_level, fallback

KINDS = {made.__name__: made() for made in (fallback, byte_level)}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
TEXT = {"model": "m", "prompt": "x", "logprobs": 1}


def sent(asked: SamplingRequest, tokenizer: Tokenizer, answer: list[int], cuts: set[int]) -> list[Any]:
    """Return the pieces that are sent if the row is looked at after these numbers of tokens."""
    begin = Rollout.start(RowId(0, 0, 0), tokenizer.encode("x y"), "{}")
    choice = Choice(asked, 0, begin, tokenizer, Plain())
    told = []
    for count in sorted(cuts | {len(answer)}):
        finish = Finish.STOP if count == len(answer) else Finish.ABORTED
        row = begin.sampled(answer[:count], [-0.5] * count, 0, finish) if count else begin
        told.append(choice.next(row, is_over=count == len(answer)))
    return told


def answers(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Return answers of any tokens and of characters that take several."""
    words = st.sampled_from(["你", "日", "😀", "é", "ab ", " the", "x"]).map(tokenizer.encode)
    odd = st.integers(0, tokenizer.vocabulary_size - 1).map(lambda token: [token])
    return st.lists(words | words | odd, min_size=1, max_size=8).map(lambda parts: [*chain(*parts)])


@pytest.mark.parametrize("stop", [[], "日", " the"])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_stream_says_what_the_whole_answer_says(kind: str, stop: Any, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    answer = data.draw(answers(tokenizer))
    cuts = data.draw(st.sets(st.integers(0, len(answer) - 1)))
    streamed = ChatRequest.model_validate({**CHAT, "stop": stop, "stream": True})
    whole = ChatRequest.model_validate({**CHAT, "stop": stop})
    (one,) = sent(whole, tokenizer, answer, set())
    many = sent(streamed, tokenizer, answer, cuts)
    assert "".join(each["delta"]["content"] for each in many) == one["message"]["content"]
    assert [*chain(*(each["logprobs"]["content"] for each in many))] == one["logprobs"]["content"]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_have_the_bytes_of_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    text = "the 你日😀é ab"
    answer = tokenizer.encode(text)
    (told,) = sent(ChatRequest.model_validate(CHAT), tokenizer, answer, set())
    content = told["logprobs"]["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == text
    assert {each["token"] for each in content} >= {"\\xe4", "\\xbd", "\\xa0"}, "a byte is not U+FFFD"


@pytest.mark.parametrize("kind", KINDS)
def test_places_count_from_the_beginning_of_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    answer = tokenizer.encode("你 ab")
    for echo in (False, True):
        asked = CompletionRequest.model_validate({**TEXT, "echo": echo, "stream": not echo})
        cuts = set[int]() if echo else {1, 3, 4}
        many = sent(asked, tokenizer, answer, cuts)
        text = "".join(each["text"] for each in many)
        places = [*chain(*(each["logprobs"]["text_offset"] for each in many))]
        start = len("x y") if echo else 0
        assert text == ("x y" if echo else "") + "你 ab"
        assert places[-6:] == [start, start, start, start + 1, start + 2, start + 3]
