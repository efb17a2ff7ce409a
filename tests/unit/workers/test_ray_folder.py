"""The folder of a cluster of our own, and the errors of Ray's start; none of it needs Ray."""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.ray_folder import MOST_FOLDER_BYTES, folder_choice, private_folder, start_error

SOCKET_BYTES = 107
"""Longest path of a Unix socket (man 7 unix: 108 bytes with the final zero)."""


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)


def test_the_longest_allowed_folder_has_room_for_rays_longest_socket() -> None:
    session = f"session_2026-12-31_23-59-59_999999_{2**22}"
    socket = f"{'x' * MOST_FOLDER_BYTES}/rf-abcdefgh/r/{session}/sockets/plasma_store"
    assert len(socket) == SOCKET_BYTES


def test_a_long_tmpdir_gives_way_to_a_short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("slurm_jobdir_" * 9)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    assert len(str(folder_choice())) <= MOST_FOLDER_BYTES
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "r").is_dir()
    assert [*long.iterdir()] == []
    (folder / "r").rmdir()
    folder.rmdir()


def test_the_folder_lies_where_rays_own_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="s", dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        assert private_folder().parent == Path(short)


def test_a_link_counts_with_the_length_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.chdir(tmp_path)
    Path("s").symlink_to(long)
    monkeypatch.setenv("RAY_TMPDIR", "s")
    with pytest.raises(ClusterError, match=r"has a path of \d+ bytes, and Ray's sockets allow 29"):
        folder_choice()


@pytest.mark.parametrize("name", ["x" * 100, "not_there", "file"])
def test_a_folder_of_ray_tmpdir_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", name)
    with pytest.raises(ClusterError, match="RAY_TMPDIR") as caught:
        folder_choice()
    assert name in caught.value.why and "set RAY_TMPDIR" in caught.value.fix
    assert 'placement.backend = "process"' in caught.value.fix


def test_a_tmpdir_that_is_not_there_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert folder_choice() == Path("/tmp")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes"),
            "RAY_TMPDIR",
        ),
        (RuntimeError("Could not determine home directory."), "set HOME"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/.ray"), "set HOME"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/root/.ray"), "set HOME"),
        (OSError(errno.ENOSPC, "No space left on device"), "free space in /x"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit"),
        (ValueError("Attempting to cap object store memory usage at 5 bytes"), "begin with RAY_"),
        (AssertionError(), "begin with RAY_"),
        (Exception("The current node timed out during startup."), "load"),
    ],
)
def test_every_error_of_a_start_says_what_to_change(error: Exception, named: str) -> None:
    told = start_error(error, Path("/x/rf-1"))
    assert named in told.fix and type(error).__name__ in told.why
    assert told.what == "Ray did not start on this machine" and "without Ray" in told.fix


def test_the_last_lines_of_rays_logs_are_part_of_the_reason(tmp_path: Path) -> None:
    logs = tmp_path / "r" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("one\nNo space left on device\n\n")
    assert (
        start_error(Exception("late"), tmp_path).why == "Exception: late; raylet.err: No space left on device"
    )
