"""HTML whose text cannot become markup: every plain string is escaped on insertion.

el("p", "1 < 2", class_="note") == '<p class="note">1 &lt; 2</p>'
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from rillflow.runs.formatting import visible

_VOID = frozenset({"meta", "br"})


class Html(str):
    """Finished markup, made by ``el`` or written in this package."""

    __slots__ = ()


Child = str | Iterable["Child"]
Attribute = str | float | bool | None


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """Return an element.

    ``class_`` sets the attribute class, and ``data_x`` sets data-x. Attributes that are None or False are
    left out; True gives an attribute without a value. Children are markup (Html), text, or iterables of
    these.
    """
    opening = "".join(f" {_attribute(name, value)}" for name, value in attributes.items() if _is_set(value))
    if tag in _VOID:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{markup(children)}</{tag}>")


def table(rows: Iterable[Iterable[Child]]) -> Html:
    """Return a table of cells, the first row as the head; a table wider than its card scrolls."""
    head, *others = rows
    lines = [el("tr", (el("td", cell) for cell in row)) for row in others]
    shown = el("thead", el("tr", (el("th", word) for word in head))), el("tbody", lines)
    return el("div", el("table", shown), class_="scroll")


def markup(children: Child) -> Html:
    """Join children to markup; everything that is not Html is escaped."""
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(html.escape(visible(children)))
    return Html("".join(markup(child) for child in children))


def cut(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text and the number of missing ones."""
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit:,} more characters"


def _is_set(value: Attribute) -> bool:
    return value is not None and value is not False


def _attribute(name: str, value: Attribute) -> str:
    plain = name.rstrip("_").replace("_", "-")
    return plain if value is True else f'{plain}="{html.escape(visible(str(value)))}"'
