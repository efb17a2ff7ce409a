"""HTML whose text cannot become markup: every plain string is escaped on insertion.

el("p", "1 < 2", class_="note") == '<p class="note">1 &lt; 2</p>'

title, body ─ page ─> one file with its styles and scripts, which needs no network and no server
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rillflow.runs.formatting import visible
from rillflow_parts.report.charts import assets

COLOURS = 24
"""Number of distinct colours on a page."""
CHART = "data-chart"
"""Attribute with the data of a chart."""
_VOID = frozenset({"meta", "br"})


class Html(str):
    """Finished markup, made by ``el`` or written in this package."""

    __slots__ = ()


Child = str | Iterable["Child"]
Attribute = str | float | bool | None


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """Return an element.

    ``class_`` sets the attribute class, and ``data_x`` sets data-x. Attributes that are None or False are
    left out; True gives an attribute without a value; a float has 6 digits. Children are markup (Html), text,
    or iterables of these.
    """
    opening = "".join(f" {_attribute(name, value)}" for name, value in attributes.items() if _is_set(value))
    if tag in _VOID:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{markup(children)}</{tag}>")


def table(rows: Iterable[Iterable[Child]], head: Iterable[Child] = (), *, kind: str | None = None) -> Html:
    """Return a table of cells with a head; a table wider than its card scrolls."""
    names = [el("th", word) for word in head]
    lines = [el("tr", (el("td", cell) for cell in row)) for row in rows]
    shown = [el("thead", el("tr", names))] if names else []
    return el("div", el("table", shown, el("tbody", lines), class_=kind), class_="scroll")


def card(title: str, *body: Child, hint: str = "", last: str | None = None, kind: str = "card") -> Html:
    """Return a card of the page.

    Args:
        title: its heading; may be empty.
        body: its content.
        hint: a sentence below the heading.
        last: the number beside the heading, which the script replaces by the number under the pointer.
        kind: its classes.
    """
    head = [el("h3", title)] if title else []
    if last is not None:
        head = [el("header", head, el("output", last, data_last=last))]
    return el("section", head, [el("p", hint, class_="hint")] if hint else [], body, class_=kind)


def share_bar(shares: Iterable[tuple[str, float, str]]) -> Html:
    """Return a bar of parts: class, share of the whole, and the text under the pointer."""
    parts = (
        el("i", class_=kind, style=f"width:{share:.2%}", title=name) for kind, share, name in shares if share
    )
    return el("div", parts, class_="bar")


def section(title: str, body: list[Html]) -> list[Html]:
    """Return a heading and its content, or an empty list without content."""
    return [el("h2", title), *body] if body else []


def page(title: str, body: list[Html]) -> str:
    """Return the whole HTML file, light or dark by the reader's system setting."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title}: Rillflow"),
        el("style", Html(style())),
    )
    whole = el("html", head, el("body", el("main", body), _scripts(body)), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _scripts(body: list[Html]) -> list[Html]:
    """Return the scripts of a page with charts."""
    if not any(CHART in part for part in body):
        return []
    own = assets.joined([*map(assets.asset, assets.CHARTS), _file("report.js")])
    return [el("script", Html(assets.asset(assets.LIBRARY))), el("script", Html(own), type="module")]


@cache
def style() -> str:
    """Return the style sheet of a page."""
    colours = (f".k{place} {{--kc:hsl({place * 137.5 % 360:g} 45% 52%)}}\n" for place in range(6, COLOURS))
    return assets.style() + _file("report.css") + "".join(colours)


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def markup(children: Child) -> Html:
    """Join children to markup; everything that is not Html is escaped."""
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(html.escape(visible(children)))
    return Html("".join(markup(child) for child in children))


def cut(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text and the number of missing ones."""
    left = len(text) - limit
    return text if left <= 0 else f"{text[:limit]} … {left:,} more character{'s' * (left > 1)}"


def _is_set(value: Attribute) -> bool:
    return value is not None and value is not False


def _attribute(name: str, value: Attribute) -> str:
    plain = name.rstrip("_").replace("_", "-")
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return plain if value is True else f'{plain}="{html.escape(visible(text))}"'
