"""Template probe: render an untrusted chat template in a limited child before this process renders it.

    driver ─ template, variables, a chat ─> child: 1 s of processor time, 1 GiB ─┬─ ended ────> rendered here
                                                                                 └─ killed ───> ModelError

A template is a program: it can loop or allocate without end. The child renders the driver's first chat, and a
longer version of it with many turns, in a sandbox like the one of transformers. It checks only that the
template ends within the limits, not its output or its exceptions. A template that misbehaves only on a
certain date or message is not detected.

``python -m rillflow.models.template_probe`` is the child. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rillflow.errors import ModelError
from rillflow.models.limited_child import TOO_MUCH, limit, run_limited

CPU_S = 1
"""Processor time in seconds for all renderings of the child."""
ADDRESS_BYTES = 2**30
"""Address space of the child in bytes."""
GROWTH, LEAST_CHARACTERS = 64, 2**20
"""Limit of a rendered text: this many times the chat's length, or at least this many characters."""
TURNS = 32
"""Turns of the long chat."""
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),
)
"""Exceptions of a template, which is an untrusted program."""


def probe(template: str, variables: Mapping[str, Any], chat: Sequence[Mapping[str, Any]]) -> None:
    """Check that a template ends within the limits.

    Args:
        template: its text.
        variables: its variables besides the messages.
        chat: the first messages to be rendered.

    Raises:
        ModelError: it does not.
    """
    asked = {"template": template, "variables": variables, "chat": list(chat)}
    broken = run_limited("rillflow.models.template_probe", asked, CPU_S)
    if broken:
        raise ModelError(
            f"the chat template exceeds {broken} for one conversation: {template[:60]!r}",
            why="a template that loops or allocates without end would hang the run",
            fix="choose another model, or correct chat_template in its directory",
        )


def main() -> None:
    """Render the chat from standard input, within limits."""
    asked = json.loads(sys.stdin.buffer.read())
    limit(CPU_S, ADDRESS_BYTES)
    chat, variables = asked["chat"], asked["variables"]
    most = max(LEAST_CHARACTERS, GROWTH * len(json.dumps(chat)))
    try:
        compiled = _environment().from_string(asked["template"])
        for turns in (chat, _long(chat)):
            length = 0
            for piece in compiled.generate(messages=turns, documents=None, **variables):
                length += len(piece)
                if length > most:
                    sys.exit(TOO_MUCH)
    except MemoryError:
        sys.exit(TOO_MUCH)
    except TEMPLATE_ERRORS:
        return  # the driver meets the same error and reports it


def _long(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with an answer and its last message repeated many times."""
    answer = {"role": "assistant", "content": "word " * 20}
    return [*chat, *([answer, chat[-1]] * (TURNS // 2))]


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox like the one in which transformers renders templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


class _Generation(Extension):
    """The tag ``generation``, which marks the assistant's text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the tag by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **how})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
