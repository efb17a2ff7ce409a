"""Run the smallest round of every benchmark: the real code with tiny sizes, and no results page.

    benchmarks/AREA/NAME.py   SMALLEST = ["ladder --stages tiny"]   arguments of runs of seconds
                              SLOW = ["pools --rounds 1"]          of runs above about 3 s of processor time
                              NEEDS = ["ray"]                      modules that a plain installation lacks

    name ─ read_round, no import ─> Round ─ run_command ─> one forked process per command line ─> output

    python benchmarks/smallest.py                        # SMALLEST of every benchmark, or SLOW if it has none
    python benchmarks/smallest.py weights classic/ring   # of an area, and of one benchmark
    python benchmarks/smallest.py --slow training/head   # the longer command lines

A new process needs seconds to import PyTorch and Rillflow. One fork server imports both once, and each
command line runs in a fork of it. A command line may therefore set threads, signals and the environment, and
start processes. ``tests/architecture/test_benchmarks.py`` runs SMALLEST in the everyday tests and SLOW in the
slow ones.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import resource
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

FOLDER = Path(__file__).parent
PRELOADED = ["torch", "transformers", "rillflow.app.launch", "rillflow.rollout.native.engine"]
PRELOADED += ["rillflow_classic.run", "envpool"]  # ignored where they are not installed
LIMIT_S = 600.0
"""Time limit of one command line in seconds: many times its duration on an idle machine."""
LOG = "output.txt"
_ALL = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclass(frozen=True, kw_only=True)
class Round:
    """The smallest round of one benchmark."""

    path: Path
    """The benchmark's file."""
    commands: list[list[str]]
    """The arguments of each command line of the everyday tests."""
    slow: list[list[str]]
    """The arguments of each command line of the slow tests."""
    missing: list[str]
    """Needed modules that are not installed."""


def found(folder: Path = FOLDER) -> dict[str, Path]:
    """Return the runnable modules of a folder's areas by AREA/NAME; a ``__main__.py`` is not a benchmark."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.glob("*/*.py"))
        if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text("utf-8")
    }


def shown(path: Path) -> str:
    """Return a benchmark's path for messages and command lines."""
    inner = path.relative_to(FOLDER) if path.is_relative_to(FOLDER) else path.name
    return f"benchmarks/{inner}"


def read_round(path: Path) -> Round:
    """Read a benchmark's round without importing it; raise LookupError if it states none."""
    stated = dict(_constants(path))
    commands, slow = ([shlex.split(line) for line in stated.get(kind, [])] for kind in ("SMALLEST", "SLOW"))
    if not commands and not slow:
        raise LookupError(
            f"{shown(path)} states no smallest round, so no test runs it: "
            f"add SMALLEST = [...], the arguments of runs that end in seconds"
        )
    missing = [each for each in stated.get("NEEDS", []) if importlib.util.find_spec(each) is None]
    return Round(path=path, commands=commands, slow=slow, missing=missing)


def _constants(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the module-level constants that describe a round."""
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="SMALLEST" | "NEEDS" | "SLOW" as name)]):
                yield name, ast.literal_eval(node.value)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One command line that ended with exit code 0."""

    said: str
    """Its standard output and standard error."""
    processor_s: float
    """CPU time of its process and of all child processes that it waited for."""


def run_command(path: Path, command: list[str], folder: Path) -> Ran:
    """Run one command line in its own process group, then kill the group.

    Raises:
        RuntimeError: the command line failed or took too long; the message ends with its output.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answer, given = context.Pipe(duplex=False)
    process = context.Process(target=_call_main, args=(path, command, folder, given))
    process.start()
    given.close()
    process.join(LIMIT_S)
    is_late = process.is_alive()
    assert process.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    log = folder / LOG
    said = log.read_text("utf-8", "replace") if log.exists() else ""
    line = shlex.join(["python", shown(path), *command])
    if is_late or process.exitcode:
        why = f"not done after {LIMIT_S:.0f} s" if is_late else f"exit code {process.exitcode}"
        raise RuntimeError(f"{line}: {why}\n{said[-4000:]}")
    return Ran(said=said, processor_s=answer.recv())


def _call_main(path: Path, command: list[str], folder: Path, given: Connection) -> None:
    """Call a benchmark's ``main`` as its command line does, in its own process group."""
    os.setsid()
    with (folder / LOG).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in order with standard error
    sys.argv = [str(path), *command]
    sys.path.insert(0, str(path.parent))
    os.chdir(folder)
    try:
        sys.exit(importlib.import_module(path.stem).main())
    finally:
        given.send(sum(sum(resource.getrusage(whose)[:2]) for whose in _ALL))


def main() -> int:
    """Run the rounds; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="areas or benchmarks; all if left out")
    parser.add_argument("--slow", action="store_true", help="the command lines of the slow tests")
    asked, failed = parser.parse_args(), 0
    paths = found()
    areas = {name.partition("/")[0] for name in paths}
    if unknown := set(asked.names) - paths.keys() - areas:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(paths)}")
    chosen = [name for name in paths if not asked.names or {name, name.partition("/")[0]} & set(asked.names)]
    for name in chosen:
        small = read_round(paths[name])
        if small.missing:
            print(f"{name:28} left out: {', '.join(small.missing)} not installed", flush=True)
            continue
        began, processor_s, told = time.monotonic(), 0.0, "ok"
        for command in small.slow if asked.slow else small.commands or small.slow:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    processor_s += run_command(small.path, command, Path(folder)).processor_s
                except RuntimeError as error:
                    failed, told = failed + 1, f"FAILED\n{error}"
        seconds = time.monotonic() - began
        print(f"{name:28} {seconds:6.1f} s, {processor_s:6.1f} s of processor time  {told}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
