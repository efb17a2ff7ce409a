"""Request fields: the bounds of texts, lists and free objects in the requests of every server.

Every field of a request has a bound, and a list stops at its first wrong element; a test of the models holds
this. Errors then cost the same for every request: an error for each element of a list would take minutes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

NAME_CHARS = 1_000
"""Longest name of a model, a session, a user or a checkpoint."""
TEXT_CHARS = 2**24
"""Longest text: that of the largest body. What a model reads of it is bounded by the model's context."""
WHOLE = 2**53
"""Largest whole number that JSON carries in every client."""
NOTE_VALUES = 2**12
"""Most values of a free object, such as a client's notes."""
T = TypeVar("T")


def require_plain(value: T, most: int) -> T:
    """Return a free value that has at most ``most`` values, all of them finite.

    Raises:
        PydanticCustomError: it has more, or one is NaN, infinite, or a whole number beyond 64 bits.
    """
    left: list[Any] = [value]
    count = 0
    while left:
        each = left.pop()
        count += 1
        if count > most:
            raise PydanticCustomError("values", f"it may have at most {most:,} values")
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
        elif isinstance(each, float) and not math.isfinite(each):
            raise PydanticCustomError("finite", "every number must be finite")
        elif isinstance(each, int) and abs(each) >= 2**64:
            raise PydanticCustomError("bits", "whole numbers have at most 64 bits")
    return value


def _noted(value: T) -> T:
    return require_plain(value, NOTE_VALUES)


def _listed(value: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return require_plain(value, 2**16)


Name = Annotated[str, Field(max_length=NAME_CHARS)]
"""A short text."""
Text = Annotated[str, Field(max_length=TEXT_CHARS)]
"""A text that the model may read."""
Notes = Annotated[dict[str, Any], Field(max_length=256), AfterValidator(_noted)]
"""A free object of a client."""
Free = Annotated[Any, AfterValidator(_noted)]
"""A free value of a client."""
Messages = Annotated[list[dict[str, Any]], Field(max_length=2**13, fail_fast=True), AfterValidator(_listed)]
"""Messages, or items of a conversation."""
Tools = Annotated[list[dict[str, Any]], Field(max_length=512, fail_fast=True), AfterValidator(_listed)]
"""Tools of a conversation."""
