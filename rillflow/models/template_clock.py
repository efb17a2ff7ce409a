"""Template clock: let a chat template read a given time as now.

    strftime_now('%d %b %Y') ── a macro of this name before the template ──> '28 Nov 2026'

transformers gives templates the machine's time and passes them no functions, so that a macro takes the place
of its function. The macro gets the text of each directive, such as ``%d``, that the template spells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

CLOCK = "strftime_now"
"""Function by which a chat template reads the time."""
_TEXTS = "rillflow_clock"
"""Variable with the text of each directive."""
_DIRECTIVE = re.compile(r"%[-_0^#]?[A-Za-z%]")
_MACRO = (
    "{%- macro " + CLOCK + "(format) -%}{%- set said = namespace(text=format) -%}"
    "{%- for directive, text in " + _TEXTS + ".items() -%}"
    "{%- set said.text = said.text.replace(directive, text) -%}{%- endfor -%}"
    "{{- said.text -}}{%- endmacro -%}"
)


def at_time(template: str, clock: datetime | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``apply_chat_template`` for which the template reads a time as now.

    Args:
        template: text of the template.
        clock: the time; None: the machine's.
        arguments: variables of the template, which may hold a format.
    """
    if clock is None or CLOCK not in template:
        return {}
    directives = sorted({*_DIRECTIVE.findall(template), *_DIRECTIVE.findall(str(arguments))} - {"%%"})
    texts = {directive: clock.strftime(directive) for directive in directives}
    return {"chat_template": _MACRO + template, _TEXTS: texts}
