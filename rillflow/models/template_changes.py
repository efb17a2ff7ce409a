"""Template changes: what a chat template makes of an answer to learn, compared with the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from rillflow.errors import ModelError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's thoughts in the known chat templates."""
_SHOWN = 30
_MOST = 200


def unsaid(text: str, turn: Mapping[str, Any]) -> str | None:
    """Return a part of an assistant's turn that a template's text lacks, or None.

    The parts are the content, the thoughts and the names of called functions; white space does not count.
    """
    written = "".join(text.split())
    return next((part for part in _parts(turn) if "".join(part.split()) not in written), None)


def _parts(turn: Mapping[str, Any]) -> Iterator[str]:
    yield turn.get("content") or ""
    for key in THOUGHTS:
        yield turn.get(key) or ""
    for call in turn.get("tool_calls") or ():
        name = (call.get("function") or call).get("name")
        yield name if isinstance(name, str) else ""


def rewritten(before: str, whole: str) -> ModelError:
    """Return the error of a template whose text before an answer depends on the answer."""
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)))
    start = max(0, num_same - _SHOWN)
    was, became = (text[start : start + 2 * _SHOWN] for text in (before, whole))
    return ModelError(
        f"the chat template renders a prompt differently before an answer: {was!r} became {became!r}",
        why="a training answer must follow the same prompt text as a sampled one",
        fix="try task.template_arguments, or render the rows yourself: task.chat_template_applied = true",
    )


def shortened(turn: Mapping[str, Any], part: str, reply: str) -> ModelError:
    """Return the error of a template that does not write a part of an answer."""
    is_content = part == turn.get("content")
    what = (
        f"writes the answer {_short(part)}"
        if is_content
        else f"leaves out {_short(part)}: it writes the answer"
    )
    return ModelError(
        f"the chat template {what} as {_short(reply)}",
        why="only what the template writes is learnt; many templates leave out thoughts, and some calls",
        fix="let the model's chat_template.jinja write it, try "
        "task.template_arguments, or render the rows yourself: task.chat_template_applied = true",
    )


def _short(text: str) -> str:
    return repr(text) if len(text) <= _MOST else f"{text[:_MOST]!r}..."
