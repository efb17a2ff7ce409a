"""Template changes: what a chat template makes of an answer to learn, compared with the answer."""

from __future__ import annotations

from rillflow.errors import ModelError

_SHOWN = 30
_MOST = 200


def says(text: str, answer: str) -> bool:
    """Return whether a template's text has an answer in it; white space does not count."""
    return "".join(answer.split()) in "".join(text.split())


def rewritten(before: str, whole: str) -> ModelError:
    """Return the error of a template whose text before an answer depends on the answer."""
    was, became = (text[max(0, len(before) - _SHOWN) :][: 2 * _SHOWN] for text in (before, whole))
    return ModelError(
        f"the chat template renders a prompt differently before an answer: {was!r} became {became!r}",
        why="a training answer must follow the same prompt text as a sampled one",
        fix="try task.template_arguments, or render the rows yourself: task.chat_template_applied = true",
    )


def shortened(answer: str, reply: str) -> ModelError:
    """Return the error of a template that does not write the whole answer."""
    return ModelError(
        f"the chat template writes the answer {_short(answer)} as {_short(reply)}",
        why="only what the template writes is learnt; many templates leave out thoughts before </think>",
        fix="take the removal of thoughts out of the model's chat_template.jinja for training, try "
        "task.template_arguments, or render the rows yourself: task.chat_template_applied = true",
    )


def _short(text: str) -> str:
    return repr(text) if len(text) <= _MOST else f"{text[:_MOST]!r}..."
