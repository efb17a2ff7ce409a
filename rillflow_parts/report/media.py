"""Media: the pictures and videos of a run, embedded in its report.

RUN/media/NAME.webp ─ base64 ─> an element of the page, under its name
"""

from __future__ import annotations

import base64
from pathlib import Path

from rillflow.runs import layout
from rillflow.runs.formatting import size
from rillflow_parts.report.html import Html, card, el

MOST_BYTES = 16 * 2**20
"""Largest file that the report embeds."""
TYPES = {
    ".gif": "image/gif",
    ".jpg": "image/jpeg",
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".webm": "video/webm",
    ".webp": "image/webp",
}
"""Media types by the end of a file's name; other files are ignored."""


def draw_media(run: Path) -> list[Html]:
    """Return a card for every file in ``RUN/media``, in the order of their names."""
    folder = run / layout.MEDIA
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    shown = [_card(file) for file in files if file.suffix in TYPES and file.is_file()]
    return [el("div", shown, class_="grid-cards")] if shown else []


def _card(file: Path) -> Html:
    title = file.stem.replace("-", " ")
    if file.stat().st_size > MOST_BYTES:
        told = f"{file} has {size(file.stat().st_size)}, too much for this page."
        return card(title, el("p", told, class_="hint"))
    kind = TYPES[file.suffix]
    source = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
    if kind.startswith("video/"):
        return card(title, el("video", src=source, controls=True, loop=True, style="max-width:100%"))
    return card(title, el("img", src=source, alt=title, style="max-width:100%"))
