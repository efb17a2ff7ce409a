"""Settings and metrics that the guides name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rillflow.app.recipe import Recipe
from rillflow.config.schema import walk

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ["start", "your_own", "curves", "does_not_learn", "from_trl", "from_verl"]
KNOWN = {key.dotted for key in walk(Recipe)}
SECTIONS = {name.partition(".")[0] for name in KNOWN}
METRICS = set(re.findall(r"`([a-z_]+/[a-zA-Z_@]+/[a-z_]+)`", (DOCS / "metrics.md").read_text()))
CODE = re.compile(r"`([^`\n]+)`")


def unknown(text: str, ours: int | None = None) -> Iterator[str]:
    """Yield settings and metrics that do not exist; ``ours`` is the column of tables that has settings."""
    for line in text.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        is_table = line.startswith("|") and len(cells) > 3
        for code in CODE.findall(cells[ours] if is_table and ours else "" if ours else line):
            name = code.partition("=")[0].strip()
            if re.fullmatch(r"[a-z_]+/[a-z_]+/[a-z_]+", name) and name not in METRICS:
                yield name
            if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) and name.partition(".")[0] in SECTIONS:
                yield from [name] if name not in KNOWN else []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_setting_and_metric_of_a_guide_exists(guide: str) -> None:
    text = (DOCS / f"{guide}.md").read_text()
    assert sorted(set(unknown(text, 2 if guide.startswith("from_") else None))) == []


def test_the_scan_can_fail() -> None:
    text = "`policy.lr`, `policy.rate = 1` and `policy/losss/mean`\n| `x` | `policy.eta` | `run.none` |\n"
    assert sorted(unknown(text)) == ["policy.eta", "policy.rate", "policy/losss/mean", "run.none"]
    assert list(unknown(text, 2)) == ["policy.eta"]
