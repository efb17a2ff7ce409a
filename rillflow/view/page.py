"""Page: one HTML file with style and script inside, so that it needs no network and no server.

title, body ─ page ─> text of a file, light or dark as the reader's screen is
"""

from __future__ import annotations

from rillflow.view import chart
from rillflow.view.html import Html, el
from rillflow.view.style import SCRIPT, STYLE


def page(title: str, body: list[Html]) -> str:
    """The whole file."""
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
    """A headline and what is under it; nothing where there is nothing."""
    return [el("h2", title), *body] if body else []


def _script() -> str:
    return SCRIPT % {
        "left": chart.LEFT,
        "right": chart.WIDTH - chart.RIGHT,
        "top": chart.TOP,
        "bottom": chart.HEIGHT - chart.BOTTOM,
        "width": chart.WIDTH,
    }
