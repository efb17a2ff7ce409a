"""The example of the static executor's page runs, and prints what the page shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/static_executor.md"


def test_the_example_prints_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    example = tmp_path / "example.py"
    example.write_text(found[1], "utf-8")
    runpy.run_path(str(example))
    assert capsys.readouterr().out == found[2]
