"""Failing writes: disk full, file too large, short writes; earlier content stays intact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rillflow.errors import RunDirectoryError
from rillflow.runs import durable
from rillflow.runs.reader import read_metrics

FILL = """
import resource, sys
from pathlib import Path
from rillflow.errors import RunDirectoryError
from rillflow.runs.durable import append, replace
from rillflow.runs.run_directory import RunDirectory
from rillflow.records.metrics import Sum

run = RunDirectory.open(Path(sys.argv[1]), {})
file = run.path / "rollouts" / "step-000001-0001-of-0001.safetensors"
notes = run.path / "notes.txt"
replace(file, [b"a"])
append(notes, b"short\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
step = 0
try:
    while True:
        step += 1
        run.log_metrics(step, "grpo", {"rollout/tokens/sum": Sum(value=float(step))})
except RunDirectoryError as error:
    print(error)
long = {"text": "y" * 5000}
large = b"y" * 5000
for act in (
    lambda: replace(file, [large]),
    lambda: append(notes, large),
    lambda: run.write_json("config.json", long),
):
    try:
        act()
    except RunDirectoryError as error:
        print(error)
print(step)
"""


def test_when_no_more_can_be_written_the_earlier_lines_and_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    *text, last = done.stdout.splitlines()
    records = read_metrics(path)
    assert (path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert [record.step for record in records] == list(range(1, int(last)))
    assert len(records) > 5
    for name in ("digests.jsonl", "step-000001-0001-of-0001.safetensors"):  # digests before their files
        assert any(line.startswith("cannot write") and name in line for line in text), name
    assert sum("are free on its disk" in line for line in text) == 4
    assert sum("free disk space" in line for line in text) == 4
    assert (path / "rollouts" / "step-000001-0001-of-0001.safetensors").read_text() == "a"
    assert (path / "notes.txt").read_text() == "short\n"
    assert (path / "config.json").read_text() == "{}\n"
    assert not list(path.rglob("*.tmp"))


def test_a_full_device_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl: No space left on device") as caught:
        durable.append(tmp_path / "metrics.jsonl", b"{}\n")
    assert "are free on its disk" in caught.value.why
    assert "to resume" in caught.value.fix


def test_free_space_is_that_of_the_nearest_folder_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunDirectoryError, match="Not a directory") as caught:
        durable.append(tmp_path / "file" / "run" / "metrics.jsonl", b"{}\n")
    assert "are free on its disk" in caught.value.why


def test_an_interrupted_replacement_leaves_the_old_content_and_no_draft(tmp_path: Path) -> None:
    def chunks() -> object:
        yield b"half"
        raise KeyboardInterrupt

    file = tmp_path / "summary.json"
    durable.replace(file, [b"old"])
    with pytest.raises(KeyboardInterrupt):
        durable.replace(file, chunks())  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_no_descriptor_is_left_open_by_success_or_failure(tmp_path: Path) -> None:
    def count() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = count()
    for _ in range(20):
        durable.append(tmp_path / "a", b"line\n")
        durable.replace(tmp_path / "b", [b"x"])
        with pytest.raises(RunDirectoryError):
            durable.append(tmp_path / "none" / "a", b"line\n")
        with pytest.raises(RunDirectoryError):
            durable.replace(tmp_path, [b"x"])
    assert count() == before
