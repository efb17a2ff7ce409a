"""Every word of the glossary occurs in the code of the package, of a part or of a plugin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FIELD_TERMS = {r"$\mu$", r"$\pi_{old}$", r"$\pi$", "int8 base", "4-bit base"}
"""Symbols and words of papers, which the code writes out in another way."""


def words(page: str) -> list[str]:
    """Return the words of the glossary's tables; a cell may hold several."""
    cells = re.findall(r"^\| ([^|]+?) \| (?!meaning)", page, re.MULTILINE)
    return [word for cell in cells if cell != "word" for word in cell.split(", ")]


def unused(glossary: list[str], code: str) -> list[str]:
    """Return the words that the code has in no form: with spaces, underscores or hyphens, one or several."""
    plain = re.sub(r"[_-]", " ", code.lower())
    return [word for word in glossary if not re.search(rf"\b{re.escape(word.lower())}s?\b", plain)]


def test_every_word_of_the_glossary_occurs_in_the_code(
    root: Path, package: list[Any], parts: list[Any], plugins: list[Any]
) -> None:
    code = "\n".join((root / source.path).read_text("utf-8") for source in (*package, *parts, *plugins))
    glossary = [word for word in words((root / "docs/glossary.md").read_text("utf-8")) if word != "---"]
    assert len(glossary) >= 50
    assert set(unused(glossary, code)) == FIELD_TERMS


def test_a_word_that_the_code_no_longer_has_is_found() -> None:
    assert words("| word | meaning |\n|---|---|\n| flat group | x |\n| sweep, case | y |\n") == [
        "flat group",
        "sweep",
        "case",
    ]
    assert unused(["flat group", "sweep", "lane"], "reward/flat_groups\nclass Sweep") == ["lane"]
