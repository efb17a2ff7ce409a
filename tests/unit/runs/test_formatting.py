"""Columns are aligned: words left, numbers right, no trailing blanks."""

from __future__ import annotations

from rillflow.runs.formatting import columns


def test_words_are_flush_left_at_both_ends() -> None:
    rows = [("", "pools", "step", "why"), ("1.", "a", "9 ms", ""), ("10.", "a b c", "1.25 s", "late by all")]
    assert columns(rows, left=2, text=1, indent=0) == [
        "     pools    step  why",
        "1.   a        9 ms",
        "10.  a b c  1.25 s  late by all",
    ]
    assert columns(rows, indent=1)[1] == " 1.       a    9 ms"
