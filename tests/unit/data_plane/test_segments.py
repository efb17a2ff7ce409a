"""Shared memory of the data plane: where it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SERVERS = {
    "rillflow.data_plane.server": ["1048576", "--home"],
    "rillflow.service.__main__": [],
}


@pytest.mark.parametrize("module", SERVERS)
def test_another_system_than_linux_is_refused_in_words(tmp_path: Path, module: str) -> None:
    words = ["server", *SERVERS[module], str(tmp_path)]
    code = f"import sys\nfrom {module} import main\nsys.argv, sys.platform = {words!r}, 'darwin'\nmain()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "the data plane does not run on darwin" in found.stderr
    assert "use a Linux machine or container" in found.stderr
