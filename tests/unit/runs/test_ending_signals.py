"""Ending signals: who handles them, which later one is a second one, and which handlers stay."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rillflow.isolation.child_process import start_python
from rillflow.runs.ending_signals import (
    ENDING,
    REPEAT_S,
    RepeatedSignals,
    SignalHandler,
    handled,
    install,
    signal_name,
)

USUAL = ("HUP", "INT", "QUIT", "ABRT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "XCPU", "TERM", "IO", "PWR")


def ran(program: str, *, limit: int = 0) -> str:
    """Return the output of a program in a process of its own."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        preexec_fn=limited if limit else None,
        check=True,
    )
    return done.stdout


def test_every_signal_that_ends_a_process_is_handled_except_faults() -> None:
    assert {f"SIG{name}" for name in USUAL} <= {signal_name(number) for number in ENDING}
    assert {signal.SIGRTMIN, signal.SIGRTMIN + 3, signal.SIGRTMAX} <= {*ENDING}
    assert signal_name(signal.SIGRTMIN + 3) == "SIGRTMIN+3"
    left = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD, signal.SIGURG, signal.SIGTSTP)
    assert not {*ENDING} & {*left}


def test_signals_that_nobody_handles_are_received_and_the_handlers_come_back() -> None:
    before, received = {number: signal.getsignal(number) for number in ENDING}, list[int]()
    others = {signal.SIGABRT}  # pytest's fault handler
    free = [
        number for number, handler in before.items() if handler == signal.SIG_DFL and number not in others
    ]
    with handled(received.append):
        for number in free:
            signal.raise_signal(number)
    assert received == free and {signal.SIGHUP, signal.SIGUSR2, signal.SIGRTMAX} <= {*free}
    assert {number: signal.getsignal(number) for number in ENDING} == before


def test_what_is_ignored_or_handled_by_a_program_stays() -> None:
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    usr1 = signal.signal(signal.SIGUSR1, lambda *_: None)
    term = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with handled(lambda _: pytest.fail("it is not ours")):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            assert isinstance(signal.getsignal(signal.SIGTERM), SignalHandler), (
                "the program's end is the run's"
            )
    finally:
        for number, handler in ((signal.SIGHUP, hup), (signal.SIGUSR1, usr1), (signal.SIGTERM, term)):
            signal.signal(number, handler)


def test_a_handler_of_a_library_in_c_stays() -> None:
    program = (
        "import faulthandler, signal\n"
        "from rillflow.runs.ending_signals import SignalHandler, install\n"
        "faulthandler.register(signal.SIGUSR2)\n"
        "print({signal.SIGUSR1, signal.SIGUSR2} & install(SignalHandler(print)).keys() == {signal.SIGUSR1})\n"
    )
    assert ran(program) == "True\n"


def test_another_handler_of_this_module_takes_over() -> None:
    received = list[str]()
    with (
        handled(lambda _: received.append("command")),
        handled(lambda _: received.append("run")),
    ):
        signal.raise_signal(signal.SIGUSR1)
    assert received == ["run"]


TERM, INT, QUIT, HUP, USR1, XCPU = (
    getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "QUIT", "HUP", "USR1", "XCPU")
)


@pytest.mark.parametrize(
    ("signals", "ends"),
    [
        ([(TERM, 0.0), (TERM, 0.5)], [False, False]),
        ([(TERM, 0.0), (TERM, REPEAT_S)], [False, True]),
        ([(INT, 0.0), (INT, 0.1)], [False, True]),
        ([(HUP, 0.0), (HUP, 0.1), (HUP, 2.0)], [False, False, True]),
        ([(USR1, 0.0), (TERM, 30.0), (TERM, 40.0)], [False, False, True]),
        ([(USR1, 0.0), (INT, 30.0)], [False, True]),
        ([(TERM, 0.0), (QUIT, 0.1)], [False, True]),
        ([(INT, 0.0), (TERM, 5.0)], [False, True]),
        ([(TERM, 0.0), (HUP, 5.0)], [False, False]),
        ([(XCPU, 0.0), (XCPU, 1.0), (XCPU, 2.0), (TERM, 3.0)], [False, False, False, False]),
    ],
)
def test_which_later_signal_ends_at_once(signals: list[tuple[int, float]], ends: list[bool]) -> None:
    now_s = [0.0]
    repeated = RepeatedSignals(lambda: now_s[0])
    found = []
    for number, at_s in signals:
        now_s[0] = at_s
        found.append(repeated.add(number))
    assert found == ends


CHILD = """
import os, signal, subprocess, sys, time
from pathlib import Path
Path({ready!r}).touch()
while not Path({go!r}).exists():
    time.sleep(0.01)
other = subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode
Path({done!r}).write_text(str(other))
"""


def test_a_child_of_a_run_outlives_signals_and_its_programs_do_not(tmp_path: Path) -> None:
    """They come before it is ready, too: it has them blocked from its first moment."""
    ready, go, done = (tmp_path / name for name in ("ready", "go", "done"))
    told = list[int]()
    with handled(told.append):
        child = start_python(CHILD.format(ready=str(ready), go=str(go), done=str(done)), descriptors=[])
        for number in ENDING:
            child.send_signal(number)
        while not ready.exists():
            assert child.poll() is None
            time.sleep(0.01)
        for number in ENDING:
            child.send_signal(number)
        go.touch()
        assert child.ends_within(60) and child.poll() == 0
    assert done.read_text() == str(-signal.SIGTERM)
    assert {*told} == {signal.SIGXCPU}, "its limit of processor time is the run's"


def test_a_limit_of_processor_time_gives_a_warning_before_the_end() -> None:
    program = (
        "import resource, signal\n"
        "from rillflow.controller.interrupt import Interruption, RunStage\n"
        "with Interruption() as asked:\n"
        "    asked.stage = RunStage.TRAINING\n"
        "    while not asked.requested:\n"
        "        pass\n"
        "    print(signal.Signals(asked.number).name)\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU))\n"
    )
    assert ran(program, limit=6) == "SIGXCPU\n(6, 6)\n"


def test_outside_the_main_thread_nothing_is_installed() -> None:
    found = list[object]()
    thread = threading.Thread(target=lambda: found.append(install(SignalHandler(print))))
    thread.start()
    thread.join(60)
    assert found == [{}]
