"""The scripts of the charts do what they say; without Node.js these tests are skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rillflow_parts.report.charts import assets

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def evaluated(folder: Path, module: str, script: str, pages: Sequence[Path] = ()) -> Any:
    """Run a script after a module of the charts, or of a page's scripts, and return what it prints."""
    for file in [*assets.FOLDER.glob("*.js"), *pages]:
        (folder / file.name).write_text(file.read_text("utf-8"))
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "asked.js").write_text(f'import * as module from "./{module}";\n{script}')
    assert NODE is not None
    done = subprocess.run([NODE, str(folder / "asked.js")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("low", "high", "ends"), [(0, 0, [0, 1]), (2, 2, [1.8, 2.2]), (0, 1, [0, 1.05]), (-1, 1, [-1.1, 1.1])]
)
def test_a_curve_that_is_always_0_has_no_negative_axis(
    tmp_path: Path, low: float, high: float, ends: list[float]
) -> None:
    asked = f"yRange.call({{ chart: {{}}, view: {{}} }}, {low}, {high})"
    found = evaluated(tmp_path, "chart.js", f"console.log(JSON.stringify(module.Chart.prototype.{asked}))")
    assert found == pytest.approx(ends)
