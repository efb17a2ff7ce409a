"""Shared memory of the data plane: where it runs, and when it is free again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rillflow.errors import StreamError
from rillflow_service.segments import Memory

SERVERS = {
    "rillflow_service.server": ["1048576", "--home"],
    "rillflow_service.__main__": [],
}


@pytest.mark.parametrize("module", SERVERS)
def test_another_system_than_linux_is_refused_in_words(tmp_path: Path, module: str) -> None:
    words = ["server", *SERVERS[module], str(tmp_path)]
    code = f"import sys\nfrom {module} import main\nsys.argv, sys.platform = {words!r}, 'darwin'\nmain()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "the data plane does not run on darwin" in found.stderr
    assert "use a Linux machine or container" in found.stderr


def reserved() -> int:
    """Return the bytes of this process's segments."""
    files = {
        (found := fd.stat()).st_ino: found.st_blocks * 512
        for fd in Path("/proc/self/fd").iterdir()
        if fd.exists() and "memfd:rillflow" in str(fd.readlink())
    }
    return sum(files.values())


def test_a_removed_segment_that_nobody_reads_is_free_at_once() -> None:
    before, memory = reserved(), Memory()
    memory.create(0, 2**21)
    assert memory.has(0) and reserved() - before >= 2**21
    memory.remove(0)
    assert not memory.has(0) and reserved() - before == 0
    with pytest.raises(StreamError, match="segment 0"):
        memory.opened(0, is_shared=False)


def test_a_removed_segment_stays_until_its_reader_lets_go_and_the_next_one_comes() -> None:
    before, memory = reserved(), Memory()
    memory.create(0, 2**21)
    memory.opened(0, is_shared=True)[:3] = b"abc"
    seen = memory.opened(0, is_shared=False)
    memory.remove(0)
    assert bytes(seen[:3]) == b"abc" and reserved() - before >= 2**21
    del seen
    memory.create(1, 4096)
    assert reserved() - before == 4096


def test_what_a_private_view_changes_nobody_else_sees() -> None:
    memory = Memory()
    memory.create(7, 4096)
    memory.create(8, 4096)
    memory.opened(7, is_shared=False)[0] = 9
    assert memory.opened(7, is_shared=True)[0] == 0
    memory.opened(8, is_shared=True)[0] = 9
    assert memory.opened(8, is_shared=False)[0] == 9 and memory.opened(7, is_shared=True)[0] == 0
