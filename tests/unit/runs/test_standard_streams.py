"""Standard streams whose reader, disk or terminal fails; real pipes, files and processes."""

from __future__ import annotations

import itertools
import os
import pty
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rillflow.runs import standard_streams
from rillflow.runs.standard_streams import OutputFile


def read_all(descriptor: int, found: list[bytes]) -> None:
    """Read until the writers have gone."""
    while piece := os.read(descriptor, 65536):
        found.append(piece)


@pytest.fixture
def pipe() -> tuple[int, int]:
    """Return the ends of a pipe, closed by the test."""
    return os.pipe()


def test_a_command_that_works_outlives_its_reader(pipe: tuple[int, int]) -> None:
    read, write = pipe
    output = OutputFile(write, goes_on=True)
    assert output.write(b"one\n") == 4 and output.failure is None
    os.close(read)
    assert output.write(b"two\n") == 4
    assert isinstance(output.failure, BrokenPipeError)
    assert os.fstat(write).st_rdev == Path(os.devnull).stat().st_rdev, "what starts now does not fail by it"
    assert output.write(b"three\n") == 6
    output.end()
    with pytest.raises(BrokenPipeError):
        os.write(write, b"the program has its own descriptor back")
    os.close(write)


def test_a_command_that_only_prints_ends_with_its_reader(pipe: tuple[int, int]) -> None:
    read, write = pipe
    output = OutputFile(write, goes_on=False)
    os.close(read)
    with pytest.raises(BrokenPipeError) as caught:
        output.write(b"one\n")
    assert output.failure is caught.value
    os.close(write)


def test_a_full_disk_is_a_failure() -> None:
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123  a device
        output = OutputFile(full.fileno(), goes_on=True)
        assert output.write(b"one\n") == 4
        assert output.failure is not None and output.failure.strerror == "No space left on device"
        output.end()


def test_a_reader_that_takes_nothing_stops_nobody_and_gets_everything_later(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_streams, "STALL_S", 0.05)
    read, write = pipe
    output, lines = OutputFile(write, goes_on=True), [b"%06d" % n + b"." * 500 + b"\n" for n in range(400)]
    for line in lines:
        output.write(line)
    assert output.failure is None
    found = list[bytes]()
    reader = threading.Thread(target=read_all, args=(read, found))
    reader.start()
    output.end()
    os.close(write)
    reader.join(60)
    assert b"".join(found) == b"".join(lines)
    os.close(read)


def test_what_is_kept_for_a_reader_is_bounded_and_the_gap_is_told(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_streams, "STALL_S", 0.0)
    monkeypatch.setattr(standard_streams, "MOST_BYTES", 5000)
    read, write = pipe
    output = OutputFile(write, goes_on=True)
    for _ in range(100):
        output.write(b"x" * 1000)
    found = list[bytes]()
    reader = threading.Thread(target=read_all, args=(read, found))
    reader.start()
    output.end()
    os.close(write)
    reader.join(60)
    shown = b"".join(found)
    kept = shown.count(b"x")
    assert b"x" * kept + b"[%d bytes of output are left out here" % (100_000 - kept) in shown
    os.close(read)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_terminal_that_is_stopped_or_gone_stops_nobody(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_streams, "STALL_S", 0.05)
    master, slave = pty.openpty()
    output = OutputFile(slave, goes_on=True)
    output.write(b"one\n")
    if is_stopped:
        os.write(master, b"\x13")  # Ctrl-S
        output.write(b"two\n")
        assert output.failure is None
        os.write(master, b"\x11")  # Ctrl-Q
        output.end()
        expected, shown = b"one\r\ntwo\r\n", b""
        while len(shown) < len(expected) and select.select([master], [], [], 60)[0]:
            shown += os.read(master, 100)  # a terminal passes its bytes on in pieces
        assert shown == expected
        os.close(master)
    else:
        os.close(master)
        output.write(b"two\n")
        assert output.failure is not None and output.failure.strerror == "Input/output error"
        output.end()
    os.close(slave)


PROGRAM = """
import os, socket, subprocess, sys
from rillflow.runs.standard_streams import guarded_streams
with guarded_streams(goes_on=True):
    print("one")
    print("two", file=sys.stderr)
    assert sys.stdin.read() == ""
    ends = socket.socketpair()
    assert min(end.fileno() for end in ends) > 2
    words = [sys.executable, "-c", "print(input())"]
    child = subprocess.run(words, input="three", capture_output=True, text=True)
    open({done!r}, "w").write(child.stdout)
"""


@pytest.mark.parametrize("closed", [c for n in range(1, 4) for c in itertools.combinations(range(3), n)])
def test_closed_descriptors_are_dev_null(closed: tuple[int, ...], tmp_path: Path) -> None:
    done = tmp_path / "done"
    words = " ".join(f"{each}{'<' if each == 0 else '>'}&-" for each in closed)
    command = f'exec "{sys.executable}" -c "$PROGRAM" {words}'
    ended = subprocess.run(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PROGRAM": PROGRAM.format(done=str(done))},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert done.read_text() == "three\n"
    assert (ended.stdout, ended.stderr) == ("" if 1 in closed else "one\n", "" if 2 in closed else "two\n")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", b"r\\xfcn \\u241b \\ud800"),
        ("latin-1", b"r\xfcn \\u241b \\ud800"),
        ("utf-8", "rün ␛ ".encode() + b"\\ud800"),
        ("ascii:replace", b"r?n ? ?"),
    ],
)
def test_characters_that_the_encoding_lacks_are_escaped(encoding: str, shown: bytes) -> None:
    program = (
        "from rillflow.runs.standard_streams import guarded_streams\n"
        "with guarded_streams(goes_on=False):\n"
        "    print('r\\xfcn \\u241b \\ud800')\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=True)
    assert done.stdout == shown + b"\n"


def test_a_wait_for_a_reader_happens_once(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a run with a stopped screen would wait in each of its steps."""
    polls = list[float]()

    class Poll:
        def register(self, *_: int) -> None: ...

        def poll(self, wait_ms: float) -> list[int]:
            polls.append(wait_ms)
            return []

    monkeypatch.setattr(standard_streams.select, "poll", Poll)
    output = OutputFile(pipe[1], goes_on=True)
    for _ in range(3):
        output.write(b"x")
    assert polls == [1000 * standard_streams.STALL_S, 0.0, 0.0]
    for each in pipe:
        os.close(each)
