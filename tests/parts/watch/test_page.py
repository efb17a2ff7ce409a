"""The scripts of the live page do what they say, and name nothing that the shared charts lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow_parts.watch import __file__ as watch_file
from tests.parts.report.charts.test_assets import OWN, require_exports, require_plain
from tests.parts.report.charts.test_scripts import NODE, evaluated

PAGE = Path(watch_file).with_name("page")
SCRIPTS = [*PAGE.glob("*.js")]


def test_every_import_names_something_that_its_module_exports() -> None:
    require_exports([*OWN, *SCRIPTS])


def test_no_script_makes_markup_or_code_of_a_text() -> None:
    assert len(SCRIPTS) > 8
    require_plain([*SCRIPTS, *PAGE.glob("*.html")])


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
def test_seeds_of_a_case_have_one_tick_and_all_runs_another(tmp_path: Path) -> None:
    runs = ["sweep/a/seed-0", "sweep/a/seed-1", "sweep/b/seed-0", "alone"]
    script = f"""
const list = Object.create(module.RunList.prototype);
list.tick = (name, runs) => [name, runs];
console.log(JSON.stringify(list.ticks({json.dumps(runs)}.map((run) => ({{ run }})))));
"""
    assert evaluated(tmp_path, "run_list.js", script, SCRIPTS) == [["all", runs], ["sweep/a", runs[:2]]]
