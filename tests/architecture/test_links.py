"""Every relative link of every Markdown file resolves to an existing file and heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "plugins", "recipes", "benchmarks", "examples", "clusters")
PAGES = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINED = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def prose(text: str) -> str:
    """Return a page without its code."""
    return re.sub(r"(`+)(?:(?!\1).)+\1", "", FENCE.sub("", text))


def targets(text: str) -> Iterator[str]:
    """Yield the targets of links that stay in the repository."""
    text = prose(text)
    for target in (*INLINE.findall(text), *DEFINED.findall(text)):
        if not OUTSIDE.match(target):
            yield target


def anchors(text: str) -> set[str]:
    """Return the names of a page's headings, as GitHub makes them, and of its HTML anchors."""
    text = FENCE.sub("", text)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^ {0,3}#{1,6}\s+(.*?)\s*#*$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        while (numbered := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(numbered)
    return found


def broken(page: Path, text: str) -> list[str]:
    """Return a page's broken links."""
    found = []
    for target in targets(text):
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert broken(page, page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[gone](gone.md)", ["gone.md"]),
        ('[here](other.md#a-heading-1 "title") ![there](other.md)', []),
        ("[`code` and [brackets]](other.md#no-heading)", ["other.md#no-heading"]),
        ("[own](#own-one)\n\n# Own `one`!", []),
        ("[own](#own-two)\n\n# Own one", ["#own-two"]),
        ("[far](https://example.org/gone#x) <mailto:a@b.c>", []),
        ("`[code](gone.md)`\n```\n[code](gone.md)\n# No heading\n```\n[x](#no-heading)", ["#no-heading"]),
        ("[by name]\n\n[by name]: gone.md", ["gone.md"]),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "other.md").write_text("# A heading\n\n## A [heading](x.md)\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert broken(page, text) == found
