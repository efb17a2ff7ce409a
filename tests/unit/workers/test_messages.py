"""Messages: the option that an error names as too large, or as one that cannot be serialised."""

from __future__ import annotations

from rillflow.workers.messages import heaviest


def size(value: bytes) -> int:
    """Return the bytes of a value; raise TypeError for one that cannot be serialised."""
    return len(memoryview(value))


def test_the_largest_option_is_named() -> None:
    assert heaviest({"few": b"12", "many": b"1234", "none": b""}, size) == " 'many'"


def test_an_option_that_cannot_be_serialised_is_named_however_large_the_others_are() -> None:
    for options in ({"lock": 0.5, "many": b"1234"}, {"many": b"1234", "lock": 0.5}):
        assert heaviest(options, size) == " 'lock'"


def test_a_value_that_is_no_table_of_options_has_no_name() -> None:
    assert heaviest(b"1234", size) == ""
