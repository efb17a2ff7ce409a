"""Local page: how fast it answers for a long run, what it takes, and what it costs a training beside it.

    make      write a run directory: steps, rows of each step
    serve     start `rillflow watch` on it: first answers, building of the index, searches, memory
    report    write its report.html: seconds and memory
    slowdown  train with and without a page that is open, in turns: seconds of a step
    all       everything, with the sizes of the results page

    python benchmarks/services/watch.py all --write benchmarks/results/watch.md     # 10 minutes, 8 GB of disk
    python benchmarks/services/watch.py make /tmp/run --steps 10000 --rows 504
    python benchmarks/services/watch.py serve /tmp/run

The server and its indexing process run as users start them. Memory is the peak of resident memory (VmHWM) of
each process, pages of files included. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlencode

from written_run import RARE, SAMPLES, write_run

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["all --steps 20 --rows 8 --report-steps 0 --rounds 0"]
SLOW = ["all --steps 20 --rows 8 --report-steps 40 --rounds 1 --train-steps 3"]  # trains twice

PROGRAM = "import sys; from rillflow.cli.main import main; sys.exit(main(sys.argv[1:]))"
MIB = 2**20
WAITED_S = 600.0
METRICS = 12
"""Curves of the first answers: as many as a page shows at once."""
QUERIES: Mapping[str, Mapping[str, str]] = {
    "newest rows": {},
    f"`{RARE}`, in 1 of 1,000 answers": {"q": RARE},
    f"`{RARE}`, highest reward first": {"q": RARE, "sort": "-reward"},
    "`therefore`, in half of the answers": {"q": "therefore"},
    "`42`": {"q": "42"},
    "`42`, longest first, reward 1": {"q": "42", "sort": "-length", "reward_min": "1"},
    "one letter, `e`": {"q": "e"},
    "a text that is nowhere": {"q": "not in any answer"},
    "reward 0, no text": {"reward_max": "0", "sort": "length"},
}
TIMES = 5
"""Times that each search is made."""
RECIPE = """
[task]
source = "arithmetic"
digits = 1
operators = "+"
held_out = 0
[policy.model.new]
hidden = 64
layers = 2
heads = 4
kv_heads = 2
context = 16
alphabet = "0123456789+="
[rollout]
max_tokens = 4
[algorithm]
name = "grpo"
prompts_per_step = 32
samples_per_prompt = 8
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running ``rillflow watch``."""

    process: subprocess.Popen[str]
    port: int
    token: str
    started_s: float
    """Seconds from the start of the command to its address."""

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAITED_S)
        headers = {"Authorization": f"Bearer {self.token}"}
        connection.request("GET", f"{path}?{urlencode(parameters)}", headers=headers)
        found = json.loads(connection.getresponse().read())
        connection.close()
        if "error" in found:
            raise RuntimeError(f"{path}: {found['error']}")
        return found

    def peaks(self) -> dict[str, int]:
        """Return the peak bytes of the server and of the indexing process."""
        return {"server": peak(self.process.pid), "indexing": max(map(peak, self.children()), default=0)}

    def processor_s(self) -> float:
        """Return the processor seconds that both have used."""
        return sum(map(processor_s, (self.process.pid, *self.children())))

    def children(self) -> list[int]:
        """Return the child processes."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]


def processor_s(process: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak(process: int) -> int:
    """Return the peak of a process's resident memory in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@contextmanager
def served(run: Path, cache: Path) -> Iterator[Server]:
    """Start the page of a run."""
    began = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, "watch", str(run), "--port", "0", "--cache", str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", process.stdout.readline())
        assert found is not None
        yield Server(process=process, port=int(found[1]), token=found[2], started_s=time.monotonic() - began)
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A call that was made."""

    seconds: float
    found: Any


def timed(call: Callable[[], Any]) -> Timed:
    """Make a call."""
    began = time.monotonic()
    found = call()
    return Timed(seconds=time.monotonic() - began, found=found)


def serve(run: Path) -> list[str]:
    """Measure a page of a run; return the lines of its section."""
    cache = Path(tempfile.mkdtemp())
    try:
        with served(run, cache) as server:
            return _measured(server, run, cache)
    finally:
        shutil.rmtree(cache)


def _measured(server: Server, run: Path, cache: Path) -> list[str]:
    listed = timed(lambda: server.get("/api/runs"))
    name = listed.found[0]["run"]
    summary = timed(lambda: server.get(f"/api/runs/{name}"))
    plain = [each["name"] for each in summary.found["metrics"] if each["reduction"] != "histogram"]
    asked = {"runs": name, "metrics": ",".join(plain[:METRICS])}
    curves, again = (timed(lambda: server.get("/api/curves", **asked)) for _ in range(2))
    first_s = listed.seconds + summary.seconds + curves.seconds
    timeline = timed(lambda: server.get("/api/timeline", run=name))
    rows, built_s = _indexed(server, name, summary.found["steps"])
    size, stored = (
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / MIB
        for folder in (cache, run / "rollouts")
    )
    lines = [
        "| until | seconds |",
        "|---|---:|",
        f"| the command prints its address | {server.started_s:.2f} |",
        f"| the first answers, nothing read before: runs, summary, {METRICS} curves | {first_s:.2f} |",
        f"| the same curves again | {again.seconds:.2f} |",
        f"| the timeline of 4 steps | {timeline.seconds:.2f} |",
        f"| the index of {rows:,} rows is built, in the background | {built_s:.1f} |",
        "",
        f"Index: {size:,.0f} MiB for {stored:,.0f} MiB of rollouts.",
        "",
        f"| search, {TIMES} times | rows | median s | longest s | total is exact |",
        "|---|---:|---:|---:|---|",
    ]
    for told, query in QUERIES.items():
        made = [timed(partial(server.get, "/api/rollouts", run=name, **query)) for _ in range(TIMES)]
        taken, found = [each.seconds for each in made], made[-1].found
        exact = "yes" if found["is_total_exact"] else "no"
        times = f"{statistics.median(taken):.2f} | {max(taken):.2f}"
        lines.append(f"| {told} | {found['total']:,} | {times} | {exact} |")
    peaks = ", ".join(f"{who} {held / MIB:.0f} MiB" for who, held in server.peaks().items())
    return [*lines, "", f"Peak of resident memory: {peaks}."]


def _indexed(server: Server, name: str, steps: int) -> tuple[int, float]:
    """Wait until all steps are indexed; return the rows and the seconds."""
    began = time.monotonic()
    while (told := server.get("/api/rollouts", run=name, limit=1)["indexed"])["to_step"] < steps:
        time.sleep(0.2)
    return told["rows"], time.monotonic() - began


def report(run: Path) -> list[str]:
    """Write the report of a run; return the lines of its section."""
    status = "print(open('/proc/self/status').read())"
    code = f"import sys; from rillflow.cli.main import main; main(sys.argv[1:]); {status}"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run)], capture_output=True, text=True, check=True
    )
    seconds = time.monotonic() - began
    held = 1024 * int(re.findall(r"VmHWM:\s+(\d+)", done.stdout)[0])
    size = (run / "report.html").stat().st_size
    files = sum(file.stat().st_size for file in run.glob("*.jsonl"))
    return [
        "| bytes of lines, MiB | seconds | peak of resident memory, MiB | report.html, KiB |",
        "|---:|---:|---:|---:|",
        f"| {files / MIB:,.0f} | {seconds:.1f} | {held / MIB:.0f} | {size / 1024:,.0f} |",
    ]


def slowdown(rounds: int, steps: int) -> list[str]:
    """Train in turns without and with an open page; return the lines of the section."""
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "run.toml").write_text(RECIPE)
        ratios, plain_s, used = list[float](), list[float](), list[float]()
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            found = {is_watched: _trained(folder, number, steps, is_watched) for is_watched in order}
            ratios.append(found[True].step_s / found[False].step_s)
            plain_s.append(found[False].step_s)
            used.append(found[True].used)
    finally:
        shutil.rmtree(folder)
    spread = 1.96 * statistics.stdev(ratios) / math.sqrt(rounds) if rounds > 1 else math.nan
    mean, step_s = statistics.mean(ratios) - 1, statistics.median(plain_s)
    return [
        f"{rounds} pairs of runs of {steps} steps, {step_s:.3f} s each. Beside one of a pair",
        "a page is open: every 2 s it takes all curves, and every 5 s it searches. Server and indexing",
        f"together used {statistics.mean(used):.1%} of one core.",
        "",
        "| longer steps with the page, mean | 95% interval |",
        "|---:|---|",
        f"| {mean:+.2%} | {mean - spread:+.2%} to {mean + spread:+.2%} |",
    ]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run."""

    step_s: float
    """Median seconds of a step."""
    used: float
    """Processor seconds of the page for each second of the training; NaN without a page."""


def _trained(folder: Path, number: int, steps: int, is_watched: bool) -> Trained:
    """Train one run, with or without a page."""
    run = folder / f"{number}-{'watched' if is_watched else 'alone'}"
    run.mkdir()
    settings = [f"algorithm.steps={steps}", f"run.seed={number}", "run.threads=1"]
    words = ["run", str(folder / "run.toml"), "--quiet", "--dir", str(run)]
    words += [word for each in settings for word in ("--set", each)]
    command = [sys.executable, "-c", PROGRAM, *words]
    train = partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
    used = math.nan
    if is_watched:
        ended = Event()
        with served(folder, folder / "cache") as server:
            page = Thread(target=_look, args=(server, run.name, ended))
            page.start()
            before, took_s = server.processor_s(), timed(train).seconds
            used = (server.processor_s() - before) / took_s
            ended.set()
            page.join()
    else:
        train()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [line["metrics"]["run/step_seconds/mean"]["mean"] for line in lines]
    return Trained(step_s=statistics.median(taken[1:] or taken), used=used)


def _look(server: Server, run: str, ended: Event) -> None:
    """Use a page as a person does who leaves it open."""
    searched = 0.0
    while not ended.wait(2.0):
        with suppress(RuntimeError, OSError):  # the run is not there yet
            metrics = server.get(f"/api/runs/{run}")["metrics"]
            names = [each["name"] for each in metrics if each["reduction"] != "histogram"]
            server.get("/api/curves", runs=run, metrics=",".join(names))
            if time.monotonic() - searched > 5:
                server.get("/api/rollouts", run=run, q="1")
                searched = time.monotonic()


def everything(arguments: argparse.Namespace) -> list[str]:
    """Measure all with temporary runs; return the lines of the page."""
    rows = arguments.rows // SAMPLES * SAMPLES
    lines = [
        "# The local page of runs",
        "",
        measured_at.line(),
        "",
        f"Command: `python benchmarks/services/watch.py all`; {len(os.sched_getaffinity(0))} cores of a "
        f"{platform.machine()}, Python {platform.python_version()}. The runs are written by",
        "`benchmarks/services/written_run.py`: real files of a training that did not happen.",
        "",
    ]
    folder = Path(tempfile.mkdtemp(dir=arguments.scratch))
    try:
        write_run(folder / "run", arguments.steps, arguments.rows)
        lines += [f"## A run of {arguments.steps:,} steps and {arguments.steps * rows:,} rollouts", ""]
        lines += [*serve(folder / "run"), ""]
        shutil.rmtree(folder / "run")
        if arguments.report_steps:
            write_run(folder / "long", arguments.report_steps, SAMPLES)
            lines += [f"## The report of {arguments.report_steps:,} steps", "", *report(folder / "long"), ""]
    finally:
        shutil.rmtree(folder)
    if arguments.rounds:
        lines += ["## A training beside it", "", *slowdown(arguments.rounds, arguments.train_steps), ""]
    return lines


def made(arguments: argparse.Namespace) -> list[str]:
    """Write a run directory."""
    write_run(arguments.run, arguments.steps, arguments.rows)
    return [f"{arguments.run}: {arguments.steps:,} steps"]


def main() -> None:
    """Measure one part or all, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("make", "serve", "report", "slowdown", "all"))
    parser.add_argument("run", type=Path, nargs="?", help="the run directory of make, serve and report")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=504, help="rows of each step")
    parser.add_argument("--report-steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of trainings")
    parser.add_argument("--train-steps", type=int, default=60)
    parser.add_argument("--scratch", type=Path, help="folder for the temporary runs")
    parser.add_argument("--write", type=Path, help="also write the page here")
    arguments = parser.parse_args()
    if arguments.part in ("make", "serve", "report") and arguments.run is None:
        parser.error(f"{arguments.part} needs a run directory")
    parts: Mapping[str, Any] = {
        "make": lambda: made(arguments),
        "serve": lambda: serve(arguments.run),
        "report": lambda: report(arguments.run),
        "slowdown": lambda: slowdown(arguments.rounds, arguments.train_steps),
        "all": lambda: everything(arguments),
    }
    lines: Sequence[str] = parts[arguments.part]()
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
