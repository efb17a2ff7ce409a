"""check reports that a reward executes text, and the isolation of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.isolation.sandbox import SENTENCES, Level

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)


def test_check_names_the_level_of_the_code_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "code" / "run.toml"
    assert main(["check", str(recipe), "--dir", str(tmp_path / "run")]) == 0
    begin = "note: code_tests.py:code_tests runs text or starts processes (code_tests.py:"
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(begin))
    assert any(note.endswith(f"{level}: {SENTENCES[level]}") for level in (Level.FULL, Level.SHARED_USER))
