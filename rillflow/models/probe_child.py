"""Probe child: the limited process that renders an untrusted template or loads an untrusted tokeniser.

standard input ─ JSON ─> limits ─> work ─> exit code 0, or TOO_MUCH; the kernel kills it at its limit

``python -m rillflow.models.probe_child NAME``; see ``probes``. The sandbox of templates is like the one in
which transformers renders them. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rillflow.models.probes import CPU_S, TOO_MUCH

ADDRESS_BYTES = {"template": 2**30, "tokenizer": 2 * 2**30}
"""Address space of each child in bytes."""
GROWTH, LEAST_CHARACTERS = 64, 2**20
"""Limit of a rendered text: this many times the chat's length, or at least this many characters."""
TURNS = 32
"""Turns of the long chat."""
TOKEN_GROWTH, LEAST_TOKENS = 16, 2**12
"""Limit of a text's tokens: this many per byte, or at least this many."""
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),
)
"""Exceptions of a template, which is an untrusted program."""


def main() -> None:
    """Do the work of the probe that the command line names, within its limits."""
    name = sys.argv[1]
    asked = json.loads(sys.stdin.buffer.read())
    _limit(CPU_S[name], ADDRESS_BYTES[name])
    try:
        is_within = _WORK[name](asked)
    except MemoryError:
        is_within = False
    except Exception:  # noqa: BLE001  the driver meets the same error and reports it
        return
    if not is_within:
        sys.exit(TOO_MUCH)


def _limit(cpu_s: int, address_bytes: int) -> None:
    """Limit the further processor time and the address space of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_s, spent + cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render(asked: Mapping[str, Any]) -> bool:
    """Return whether the renderings of the chat, as it is and with many turns, are short enough."""
    chat = asked["chat"]
    most = max(LEAST_CHARACTERS, GROWTH * len(json.dumps(chat)))
    answer = {"role": "assistant", "content": "word " * 20}
    compiled = _environment().from_string(asked["template"])
    for turns in (chat, [*chat, *([answer, chat[-1]] * (TURNS // 2))]):
        length = 0
        for piece in compiled.generate(messages=turns, documents=None, **asked["variables"]):
            length += len(piece)
            if length > most:
                return False
    return True


def _encode(asked: Mapping[str, Any]) -> bool:
    """Return whether every text has few enough tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(asked["file"])
    return all(
        len(tokenizer.encode(text, add_special_tokens=False).ids)
        <= max(LEAST_TOKENS, TOKEN_GROWTH * len(text.encode()))
        for text in asked["texts"]
    )


_WORK: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {"template": _render, "tokenizer": _encode}


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
