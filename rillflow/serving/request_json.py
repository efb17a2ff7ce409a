"""Request JSON: parse a body within limits that are checked before any value becomes an object.

    bytes ─ UTF-8? ─> marks outside of texts: , [ { ─ few enough, not too deep? ─ json.loads ─> object
                      numpy, about a hundredth of a second for each MiB

A short body can stand for much memory (``[[],[],...``), and the parser holds the interpreter's lock while it
makes it. So the values are counted first.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from reprlib import Repr
from typing import Any

import numpy as np

from rillflow.errors import StreamError

MAX_JSON_DEPTH = 64
"""Largest nesting depth of objects and lists in a request."""
MAX_VALUES = 2**20
"""Most values of a request: a prompt of a million tokens fits, and is parsed in about 0.1 s."""
MAX_CONTAINERS = 2**16
"""Most objects and lists of a request: each takes some hundred bytes of memory."""
MAX_KEYS = 2**12
"""Most keys of one object; an unknown key is an error of its own."""
MAX_ALL_KEYS = 2**17
"""Most keys of all objects together: an object is made of the list of its keys and values."""
_MARKS = b'"[]{},:'
_OTHERS = bytes(code for code in range(256) if code not in _MARKS)
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE = b'"'[0], b","[0], b":"[0], [*b"[{"], [*b"]}"]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def json_object(body: bytes | bytearray, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a body.

    Args:
        body: UTF-8 text.
        max_values: most values.

    Raises:
        StreamError: it is not a JSON object; it is nested too deeply, or has too many values, lists and
            objects, or keys in one object; a key occurs twice; a text is not Unicode.
    """
    body = body.removeprefix(_BYTE_ORDER_MARK)
    _require_small(body, max_values)
    try:
        found = json.loads(body.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"the request is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise StreamError("the request is not a JSON object")
    if _SURROGATE.search(body):
        _require_unicode(found)
    return found


def brief(value: object) -> str:
    """Return a value for an error, at most some hundred characters, whatever its size."""
    return value[:80] if isinstance(value, str) else _SHORT.repr(value)


def _require_small(body: bytes | bytearray, max_values: int) -> None:
    """Raise StreamError for too many values and too deep nesting, before they are parsed."""
    marks = np.frombuffer(
        body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS), dtype=np.uint8
    )
    is_quote = marks == _QUOTE
    marks = marks[~(np.logical_xor.accumulate(is_quote) | is_quote)] if is_quote.any() else marks
    opens, closes = np.isin(marks, _OPEN), np.isin(marks, _CLOSE)
    depth = np.cumsum(opens.astype(np.int32) - closes.astype(np.int32), dtype=np.int32)
    if depth.max(initial=0) > MAX_JSON_DEPTH:
        what = f"the request is nested deeper than {MAX_JSON_DEPTH} levels"
        raise StreamError(what, why="a deeper one is not JSON that every parser reads")
    containers = int(opens.sum())
    values = containers + int((marks == _COMMA).sum())
    fix = "send several requests"
    if values > max_values:
        why = f"the limit is {max_values:,} numbers, texts, lists and objects"
        raise StreamError(f"the request has {values:,} values", why=why, fix=fix)
    if containers > MAX_CONTAINERS:
        why = f"the limit is {MAX_CONTAINERS:,}"
        raise StreamError(f"the request has {containers:,} lists and objects", why=why, fix=fix)
    keys = int((marks == _COLON).sum())
    if keys > MAX_ALL_KEYS:
        raise StreamError(f"the request has {keys:,} keys", why=f"the limit is {MAX_ALL_KEYS:,}", fix=fix)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, after checking that its keys are few and unique."""
    if len(pairs) > MAX_KEYS:
        what = f"an object of the request has {len(pairs):,} keys"
        raise StreamError(what, why=f"the limit is {MAX_KEYS:,}", fix="send a list")
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name in found if names[name] > 1)
        why = "one of the two values would be lost silently"
        raise StreamError(f"the key {brief(twice)!r} occurs twice in one object", why=why, fix="send one")
    return found


def _require_unicode(found: dict[str, Any]) -> None:
    """Raise StreamError for texts that UTF-8 cannot encode."""
    level: list[Any] = [found]
    while level:
        inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        texts = [part for part in inner if isinstance(part, str)]
        texts += [key for each in level if isinstance(each, dict) for key in each]
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise StreamError(
                    f"a string of the request has U+{ord(text[error.start]):04X} at index {error.start}",
                    why="half of a surrogate pair is not a character",
                    fix="send the whole character, as UTF-8 or as both halves",
                ) from None
        level = [part for part in inner if isinstance(part, dict | list)]
