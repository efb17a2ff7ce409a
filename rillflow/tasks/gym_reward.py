"""Reward of reasoning-gym tasks: the data set's own score of an answer.

It is loaded by path in a child process, and imports nothing from Rillflow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import reasoning_gym

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors that some data sets raise for an answer of unexpected form; such an answer is wrong."""


def reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    **columns: object,
) -> list[float]:
    """Return one score per completion, from 0 to 1; surrounding whitespace does not count.

    The answer is the last one between ``<answer>`` and ``</answer>``, or else the whole completion.
    """
    del columns
    return [
        _score(_answer(_text(text)), {"question": _text(prompt), "answer": right, "metadata": about})
        for prompt, text, right, about in zip(prompts, completions, answer, metadata, strict=True)
    ]


def _text(value: Any) -> str:
    """Return a text, or the content of a conversation's last message."""
    return value if isinstance(value, str) else str(value[-1]["content"])


def _answer(text: str) -> str:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (found[-1] if found else text).strip()


def _score(text: str, entry: dict[str, Any]) -> float:
    score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    try:
        return float(score(text, entry))
    except _UNREADABLE:
        return 0.0
