"""Settings and metrics that the guides name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rillflow.app.plugin_sections import plugin_changes
from rillflow.app.resume import MAY_CHANGE
from rillflow.app.sections import recipe_class
from rillflow.config.schema import walk

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ["first_day", "lora_to_vllm", "resume", "settings_that_matter", "from_trl", "from_verl"]
KNOWN = {key.dotted for key in walk(recipe_class())}
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


def test_the_first_day_names_the_sections_of_the_quickstarts_recipe() -> None:
    recipe = (DOCS.parent / "recipes/arithmetic/run.toml").read_text()
    text = (DOCS / "first_day.md").read_text().partition("## 2. ")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    shown = [name for row in rows for name in re.findall(r"`\[([\w.]+)\]`", row)]
    assert shown == re.findall(r"^\[([\w.]+)\]$", recipe, re.M)


def test_the_page_of_resume_names_settings_that_may_change() -> None:
    text = (DOCS / "resume.md").read_text().partition("## What may change")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row)]
    assert len(named) >= 25
    assert [name for name in named if name not in {*MAY_CHANGE, *plugin_changes()}] == []


def test_the_scan_can_fail() -> None:
    text = "`policy.lr`, `policy.rate = 1` and `policy/losss/mean`\n| `x` | `policy.eta` | `run.none` |\n"
    assert sorted(unknown(text)) == ["policy.eta", "policy.rate", "policy/losss/mean", "run.none"]
    assert list(unknown(text, 2)) == ["policy.eta"]
