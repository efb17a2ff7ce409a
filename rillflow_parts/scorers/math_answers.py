"""Math answers: compare the final answer of a completion with the right one, by math-verify.

    completion ─ after "####", in \boxed{}, in $...$, or the last number ─┐
    column answer ─ after "####", else all of it ─────────────────────────┴─ math-verify ─> 1, 0, or None

math-verify limits its time by SIGALRM, which reaches only a process's main thread. A reward's child calls
functions there. Code that no signal interrupts, such as a power of huge numbers, ends with the child at
``reward.timeout_s``.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify

LIMIT_S = 2
"""Longest time in seconds to read an answer, and to compare two; SIGALRM counts whole seconds."""
MARK = "####"
"""Mark before the final answer in GSM8K, and in answers that imitate it."""
_LAST_CHARACTERS = 2000
"""Part of a completion that is read: its result is at the end, and the parser is slow on long texts."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # else it logs every interruption


def math_verify(
    completions: Sequence[str | Sequence[Mapping[str, Any]]], answer: Sequence[object]
) -> list[float | Exception | None]:
    """Return 1 for an answer equal to the right one, 0 for another or for none.

    The entry is None if the right answer is empty or cannot be read, and a TimeoutError if the comparison
    takes too long.

    Args:
        completions: [B], each a text or a list of one assistant message.
        answer: [B], each the right answer: a text, a number, or a list of accepted ones.
    """
    return [_score(_text(each), right) for each, right in zip(completions, answer, strict=True)]


def _score(completion: str, answer: object) -> float | Exception | None:
    accepted = [str(each) for each in (answer if isinstance(answer, list) else [answer]) if each is not None]
    golds = {_final(each): gold for each in accepted if (gold := _gold(each))}
    if not golds:
        return None
    said = _final(completion)[-_LAST_CHARACTERS:]
    if said in golds:
        return 1.0
    began = time.monotonic()
    read = parse(said, parsing_timeout=LIMIT_S)
    if MARK in completion:  # a list such as 1,2 has two readings
        read = [*_as_mathematics(said), *read]
    if any(verify(list(gold), read, timeout_seconds=LIMIT_S) for gold in golds.values()):
        return 1.0
    if time.monotonic() - began >= LIMIT_S:  # math-verify only logs that it was interrupted
        return TimeoutError(f"math-verify was interrupted after {LIMIT_S} s")
    return 0.0


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """Return a right answer as math-verify reads it; empty if it cannot."""
    text = _final(answer)
    return _as_mathematics(text) or tuple(parse(text, parsing_timeout=LIMIT_S))


def _as_mathematics(text: str) -> tuple[Any, ...]:
    """Return the reading of a text as a formula, unless it says itself where its formula stands."""
    has_place = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    return tuple(parse(text if has_place else f"${text}$", parsing_timeout=LIMIT_S))


def _final(text: str) -> str:
    """Return the line after the last ``####``, or the whole text."""
    _, mark, after = text.rpartition(MARK)
    return after.strip().split("\n")[0].strip() if mark else text.strip()


def _text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
