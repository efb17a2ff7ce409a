"""Template probe: render a stranger's chat template in a limited child before this process renders it.

    driver ─ template, variables, a chat ─> child: 1 s of processor time, 1 GiB ─┬─ ended ────> rendered here
                                                                                 └─ killed ───> ModelError

A template is a program: it can loop or allocate without end. The child renders the first chat that the driver
is about to render, and that chat with many turns, in a sandbox like the one of transformers. What a template
writes or raises does not matter here; that it ends within the bounds does. A template that waits for a
certain date or message to misbehave is not found.

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
"""Processor time of the child for all of its renderings."""
ADDRESS_BYTES = 2**30
"""Address space of the child."""
GROWTH, LEAST_CHARACTERS = 64, 2**20
"""A text may be so many times as long as its chat, or at least so many characters."""
TURNS = 32
"""Turns of the long chat."""
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),
)
"""What a template raises, which is a program of a stranger's."""


def probe(template: str, variables: Mapping[str, Any], chat: Sequence[Mapping[str, Any]]) -> None:
    """Show that a template ends within the bounds.

    Args:
        template: its text.
        variables: what it is given beside the messages.
        chat: the first messages that it will be given.

    Raises:
        ModelError: it does not.
    """
    asked = {"template": template, "variables": variables, "chat": list(chat)}
    broken = run_limited("rillflow.models.template_probe", asked, CPU_S)
    if broken:
        raise ModelError(
            f"the chat template exceeds {broken} for one conversation: {template[:60]!r}",
            why="a template that loops or allocates without end would stop whoever renders it",
            fix="choose another model, or mend chat_template in its directory",
        )


def main() -> None:
    """Render what standard input says, within limits."""
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
        return  # whoever renders it meets the same, and says so


def _long(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with its last message and an answer said again and again."""
    answer = {"role": "assistant", "content": "word " * 20}
    return [*chat, *([answer, chat[-1]] * (TURNS // 2))]


def _environment() -> ImmutableSandboxedEnvironment:
    """A sandbox like the one in which transformers renders templates."""
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
        """Take the tag off; its body stays."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **how})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
