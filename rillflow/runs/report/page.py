"""Page: one HTML file with inline style and script, so that it needs no network and no server.

title, body ─ page ─> HTML text, light or dark by the reader's system setting
"""

from __future__ import annotations

from rillflow.runs.report import chart
from rillflow.runs.report.html import Html, el
from rillflow.runs.report.style import SCRIPT, STYLE


def page(title: str, body: list[Html]) -> str:
    """Return the whole HTML file."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title}: Rillflow"),
        el("style", Html(STYLE)),
    )
    whole = el("html", head, el("body", el("main", body), el("script", Html(_script()))), lang="en")
    return f"<!doctype html>\n{whole}\n"


def section(title: str, body: list[Html]) -> list[Html]:
    """Return a heading and its content, or an empty list without content."""
    return [el("h2", title), *body] if body else []


def _script() -> str:
    return SCRIPT % {
        "left": chart.LEFT,
        "right": chart.WIDTH - chart.RIGHT,
        "top": chart.TOP,
        "bottom": chart.HEIGHT - chart.BOTTOM,
        "width": chart.WIDTH,
    }
