"""A run outlives its screen, and every ending signal at any moment saves: no finished step is lost."""

from __future__ import annotations

import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.conftest import SUMS, Tiny
from tests.flows.warm import CONTEXT

STEPS = 8
REST = f"""
steps = {STEPS}
{SUMS}[evaluate]
problems = 4
every = 4
"""
REWARD = """
import time
from pathlib import Path

def reward(prompts, completions, **_):
    if not Path(__file__).with_name("quick").exists():
        time.sleep(0.05)
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
LIMIT_S = 300.0
NOTE = "note: standard output cannot be written any more"
APART = ("placement.pools={ main = 1, answers = 1 }", 'placement.roles={ sampler = "answers" }')
PLACES = {
    "inline": (),
    "process": ("placement.backend=process", *APART),
    "ray": ("placement.backend=ray", *APART),
}
"""Settings of each backend; the sampler has a rank of its own."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory of the same recipe that nothing disturbed."""
    tiny = Tiny(tmp_path_factory.mktemp("undisturbed"))
    tiny.write(REST, REWARD)
    (tiny.folder / "quick").touch()
    assert tiny.run("whole") == 0
    return tiny.folder / "whole"


@pytest.fixture
def tiny(tiny: Tiny, undisturbed: Path) -> Tiny:
    tiny.write(REST, REWARD)
    (tiny.folder / "whole").symlink_to(undisturbed)
    return tiny


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How a command starts."""

    output: str = os.devnull
    """File, pipe or terminal of its standard output; empty: closed."""
    error: str = os.devnull
    """The same for its error output."""
    encoding: str = "utf-8"
    """Encoding of both."""
    ignored: Sequence[int] = ()
    """Signals that it ignores."""
    signal_at: str = ""
    """Function, as ``module:name``, before whose call it gets ``number``."""
    call: int = 1
    """Number of that call."""
    number: int = 0
    """The signal."""


def _begun(words: list[str], screen: Screen, environment: dict[str, str]) -> None:
    """Run a command in a session of its own; a terminal becomes its controlling terminal."""
    os.setsid()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores both
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for number in screen.ignored:
        signal.signal(number, signal.SIG_IGN)
    for descriptor, file in ((1, screen.output), (2, screen.error)):
        os.close(descriptor)
        if file:
            way = os.O_RDWR if file.startswith("/dev/pts") else os.O_WRONLY  # or it controls nothing
            opened = os.open(file, way | os.O_CREAT | os.O_APPEND)
            if opened != descriptor:  # a closed descriptor stays closed
                os.dup2(opened, descriptor)
                os.close(opened)
    if not screen.output:
        os.close(0)
    sys.stdout, sys.stderr = (
        open(each, "w", encoding=screen.encoding, closefd=False, buffering=1) if file else None  # noqa: SIM115
        for each, file in ((1, screen.output), (2, screen.error))
    )
    if screen.signal_at:
        _signal_at(screen)
    from rillflow.cli.main import main

    sys.exit(main(words))


def _signal_at(screen: Screen) -> None:
    """Send this process the signal when it calls the function."""
    module, _, name = screen.signal_at.partition(":")
    owner: Any = import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function, calls = getattr(owner, name), [0]

    @wraps(function)
    def signalled(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == screen.call:
            os.kill(os.getpid(), screen.number)
        return function(*arguments, **named)

    setattr(owner, name, signalled)


@contextmanager
def started(tiny: Tiny, name: str, screen: Screen, *settings: str) -> Iterator[Any]:
    """Start ``rillflow run``; nothing of it outlives the block."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = ["run", str(tiny.recipe), "--dir", str(tiny.folder / name), *words]
    process = CONTEXT.Process(target=_begun, args=(command, screen, dict(os.environ)))
    process.start()
    there = psutil.Process(process.pid)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for each in [*there.children(recursive=True), there]:
                each.kill()
        process.join()


def ended(process: Any) -> int:
    """Return the exit code of a command."""
    process.join(LIMIT_S)
    assert process.exitcode is not None, "it did not end"
    return int(process.exitcode)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert process.exitcode is None and time.monotonic() < until
        time.sleep(0.01)


def assert_finished(tiny: Tiny) -> str:
    """Check that a run made all steps with the numbers of an undisturbed one; return its log."""
    tiny.assert_same("whole", "late")
    assert (tiny.folder / "late/finished.json").exists()
    log = tiny.folder / "late/output.log"
    return log.read_text() if log.exists() else ""


def assert_saved(tiny: Tiny) -> None:
    """Check that no finished step was lost, and that the same command goes on."""
    made = steps_of(tiny.folder / "late")
    assert 0 < made < STEPS and tiny.steps_kept("late")[-1] == made
    assert (tiny.folder / "late/report.html").is_file()
    (tiny.folder / "quick").touch()
    assert tiny.run("late") == 0
    assert_finished(tiny)


def read_lines(pipe: Path, count: int) -> list[bytes]:
    """Read some lines of a pipe, as ``head`` does, and close it."""
    with pipe.open("rb") as lines:
        return [lines.readline() for _ in range(count)]


def backends(*everyday: str) -> list[Any]:
    """Return the backends as parameters, slow ones except for those of every day."""
    needs = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
    marks = {place: () if place in everyday else (pytest.mark.slow, needs) for place in PLACES}
    return [pytest.param(place, marks=marks[place]) for place in PLACES]


@pytest.mark.parametrize("place", backends("inline"))
def test_a_run_outlives_the_reader_of_its_pipe(tiny: Tiny, place: str) -> None:
    pipe, error = tiny.folder / "pipe", tiny.folder / "error"
    os.mkfifo(pipe)
    with started(tiny, "late", Screen(output=str(pipe), error=str(error)), *PLACES[place]) as process:
        assert len(read_lines(pipe, 3)) == 3
        assert ended(process) == 0, error.read_text()
    log = assert_finished(tiny)
    said = error.read_text()
    assert said.count(NOTE) == 1 and str(tiny.folder / "late/output.log") in said
    assert log.startswith(f"{NOTE} (Broken pipe)") and f"grpo {STEPS}/{STEPS}" in log


def terminal() -> tuple[int, str]:
    """Return a terminal's end and its name; nobody has it open."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    os.close(slave)
    return master, name


def show(master: int) -> None:
    """Read what a terminal shows until it is closed."""
    with suppress(OSError):
        while os.read(master, 65536):
            pass


def hung_up(tiny: Tiny, screen: Screen, master: int, *settings: str) -> int:
    """Start a run on a terminal, close the terminal after three steps, and return the exit code."""
    with started(tiny, "late", screen, *settings) as process:
        os.set_blocking(master, False)

        def shown() -> bool:
            with suppress(BlockingIOError, OSError):
                os.read(master, 65536)
            return steps_of(tiny.folder / "late") >= 3

        wait_for(shown, process)
        os.close(master)
        return ended(process)


@pytest.mark.parametrize("place", backends())
def test_a_run_that_ignores_sighup_outlives_its_terminal(tiny: Tiny, place: str) -> None:
    master, name = terminal()
    screen = Screen(output=name, error=name, ignored=[signal.SIGHUP])
    assert hung_up(tiny, screen, master, *PLACES[place]) == 0
    log = assert_finished(tiny)
    assert f"{NOTE} (Input/output error)" in log
    assert "note: standard error cannot be written any more (Input/output error)" in log


@pytest.mark.parametrize("place", backends("inline"))
def test_a_terminal_that_closes_saves_the_run(tiny: Tiny, place: str) -> None:
    """The kernel sends SIGHUP to the session of the terminal."""
    master, name = terminal()
    code = hung_up(tiny, Screen(output=name, error=name), master, *PLACES[place])
    log = (tiny.folder / "late/output.log").read_text()
    assert code == 128 + signal.SIGHUP, log
    assert "as requested by SIGHUP" in log, "nobody can read it on the terminal"
    assert_saved(tiny)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        pytest.param("/dev/full", "/dev/full", marks=pytest.mark.slow),
        pytest.param("", "", marks=pytest.mark.slow),
        ("/dev/full", ""),
        pytest.param("", "/dev/full", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("place", backends("inline"))
def test_a_run_needs_no_output_at_all(tiny: Tiny, place: str, output: str, error: str) -> None:
    with started(tiny, "late", Screen(output=output, error=error), *PLACES[place]) as process:
        assert ended(process) == 0
    log = assert_finished(tiny)
    assert (f"{NOTE} (No space left on device)" in log) == (output == "/dev/full")


@pytest.mark.slow
def test_a_stopped_terminal_does_not_stop_a_run(tiny: Tiny) -> None:
    """Ctrl-S; a run shows what it kept after Ctrl-Q, and a signal saves it meanwhile."""
    master, name = terminal()
    os.write(master, b"\x13")
    with started(tiny, "late", Screen(output=name, error=name)) as process:
        wait_for(lambda: steps_of(tiny.folder / "late") >= 3, process)
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: (tiny.folder / "late/report.html").exists(), process)
        os.write(master, b"\x11")
        reader = threading.Thread(target=show, args=(master,), daemon=True)
        reader.start()
        assert ended(process) == 128 + signal.SIGTERM
    assert_saved(tiny)


@pytest.mark.slow
def test_an_output_that_lacks_a_character_fails_nothing(tiny: Tiny) -> None:
    said = tiny.folder / "said"
    with started(tiny, "rün", Screen(output=str(said), error=str(said), encoding="ascii")) as process:
        assert ended(process) == 0
    assert "r\\xfcn/report.html" in said.read_text("ascii")


MOMENTS = {
    "its start": ("rillflow.app.build:Build.__init__", 1),
    "an evaluation": ("rillflow.controller.loop:Loop._evaluate", 2),
    "a save": ("rillflow.controller.loop:save_in", 1),
    "a step": ("rillflow.controller.loop:Loop._open", 3),
}
SIGNALS = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "XCPU", "TERM", "ABRT", "RTMIN")
EVERYDAY = {("HUP", "its start"), ("XCPU", "a save")}


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        pytest.param(name, moment, marks=() if (name, moment) in EVERYDAY else pytest.mark.slow)
        for name in SIGNALS
        for moment in MOMENTS
    ],
)
def test_a_signal_at_any_moment_saves_the_run(tiny: Tiny, name: str, moment: str) -> None:
    number = int(getattr(signal, f"SIG{name}"))
    where, call = MOMENTS[moment]
    said = tiny.folder / "said"
    screen = Screen(output=str(said), error=str(said), signal_at=where, call=call, number=number)
    with started(tiny, "late", screen) as process:
        assert ended(process) == 128 + number, said.read_text()
    assert ("Ctrl-C" if name == "INT" else f"SIG{name}") in said.read_text()
    if moment == "its start":
        assert "nothing had started" in said.read_text() and not steps_of(tiny.folder / "late")
    else:
        assert_saved(tiny)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_in_the_report_lets_a_finished_run_end_well(tiny: Tiny, name: str) -> None:
    number = int(getattr(signal, f"SIG{name}"))
    screen = Screen(signal_at="rillflow.app.launch:_write_report", number=number)
    with started(tiny, "late", screen) as process:
        assert ended(process) == 0
    assert_finished(tiny)


@pytest.mark.slow
@pytest.mark.parametrize("place", backends())
@pytest.mark.parametrize("name", [name for name in SIGNALS if name not in ("INT", "ABRT")])
def test_a_signal_to_all_processes_of_a_job_saves_the_run(tiny: Tiny, place: str, name: str) -> None:
    """Slurm sends its signals to every process of a job, and repeats some: SIGXCPU comes every second.

    Ray's processes have a handler of their own for SIGABRT, and end by it.
    """
    number, said = int(getattr(signal, f"SIG{name}")), tiny.folder / "said"
    with started(tiny, "late", Screen(output=str(said), error=str(said)), *PLACES[place]) as process:
        wait_for(lambda: steps_of(tiny.folder / "late") >= 3, process)
        every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for _ in range(1 if name == "QUIT" else 2):  # a second one is a person's: end at once
            for each in every:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
        assert ended(process) == 128 + number, said.read_text()
    assert_saved(tiny)
