"""Bodies are counted before they are parsed, and an error costs the same for every size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the door is the extra `service`")

from rillflow.errors import StreamError
from rillflow.serving import request_json
from rillflow.serving.request_json import MAX_CONTAINERS, MAX_KEYS, MAX_VALUES, brief, json_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def count(value: object) -> int:
    """Return the number of values, without keys."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_every_object_is_parsed_as_it_is_and_its_values_are_counted(
    value: dict[str, object], is_ascii: bool
) -> None:
    try:
        body = json.dumps(value, ensure_ascii=is_ascii).encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair
    assert json_object(body) == value
    values = count(value)
    assert json_object(body, max_values=2 * values) == value
    with pytest.raises(StreamError, match="values"):
        json_object(body, max_values=values // 2 - 1)


TOO_MUCH = {
    "values": (b'{"a": [' + b"0," * MAX_VALUES + b"0]}", "the request has 1,048,578 values"),
    "lists": (b'{"a": [' + b"[]," * MAX_CONTAINERS + b"0]}", "lists and objects"),
    "depth": (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested deeper than 64 levels"),
    "keys": (json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)), 1)).encode(), "has 4,097 keys"),
    "all keys": (b'{"a": [' + b'{"a":1,"b":2,"c":3},' * 50_000 + b"0]}", "has 150,001 keys"),
    "twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
    "surrogate": (b'{"a": ["\\ud800"]}', "has U\\+D800 at index 0"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "the request is not JSON"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "the request is not JSON"),
    "list": (b"[1]", "not a JSON object"),
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_body_beyond_a_limit_is_refused(kind: str) -> None:
    body, words = TOO_MUCH[kind]
    with pytest.raises(StreamError, match=words):
        json_object(body)


def test_marks_in_texts_do_not_count() -> None:
    value = {"a": 'x,[{"\\' * 10**5, '"': "\\"}
    assert json_object(json.dumps(value).encode(), max_values=3) == value


def test_nothing_is_parsed_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_json, "json", None)
    with pytest.raises(StreamError, match="values"):
        json_object(b'{"prompt": [' + b"0.5," * 2**21 + b"1]}")


def test_a_shown_value_is_short() -> None:
    deep: list[object] = []
    for _ in range(50):
        deep = [deep, "x" * 1000, 10**4000]
    assert len(brief(deep)) < 2000 and brief("x" * 10**6) == "x" * 80 and brief([1]) == "[1]"
