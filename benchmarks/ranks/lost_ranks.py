"""Lost ranks: seconds until a killed, stopped or cut-off rank is detected, and until its replacement answers.

    python benchmarks/ranks/lost_ranks.py --write benchmarks/results/lost_ranks.md

One machine   a cluster that the driver starts, two ranks; one is killed, then stopped
Two nodes     network namespaces of this machine (``tests/distributed/machines.py``); the rank on the other
              node is killed and stopped, then its link is cut for some seconds, then cut for good

SEEN       from the fault until a call that runs on the rank raises
REPLACED   from ``Backend.replace`` until the new process answers its first call
ENDED      from the fault until the old process is gone
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

SMALLEST = []
SLOW = ["--rounds 1 --heartbeat 2 --only one"]  # starts Ray

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tests" / "distributed"
WAIT_S = 200.0
SHORT_CUT_S = 12.0
"""Seconds of the short cut: longer than the heartbeat, shorter than Ray's timeout for a dead node."""


def number(site: Any) -> int:
    """Return the process id of the rank."""
    del site
    return os.getpid()


def sleep(site: Any) -> None:
    """Sleep for an hour, longer than every benchmark."""
    del site
    time.sleep(3600)


class Ranks:
    """Two ranks, the second on another node if there is one; faults hit the second."""

    def __init__(self, address: str | None, heartbeat_s: float) -> None:
        from rillflow.workers.backend import Pool
        from rillflow.workers.start import ray_backend

        self.backend = ray_backend(WAIT_S, address, start_s=WAIT_S, heartbeat_s=heartbeat_s)
        self.backend.open([Pool(name="a", size=1), Pool(name="b", size=1)])
        nodes = {place: node.address for place, node in self.backend.nodes.items()}
        self.place = max(self.backend.epochs, key=lambda place: (nodes.get(place, ""), place))

    def answer(self) -> int:
        """Call the rank and return its process id."""
        return int(self.backend.read_all(self.backend.submit(self.place, number), WAIT_S)[0])

    def seen(self, fault: Callable[[int], None]) -> tuple[int, float, float, str]:
        """Cause a fault; return process id, time of the fault, seconds until detection, and the message."""
        from rillflow.workers.backend import RankLost

        process = self.answer()
        running = self.backend.submit(self.place, sleep)
        time.sleep(1.0)
        fault(process)
        began = time.monotonic()
        try:
            self.backend.read_all(running, WAIT_S)
        except RankLost as lost:
            return process, began, time.monotonic() - began, lost.what
        raise AssertionError("the call has ended")

    def replaced(self) -> float:
        """Replace the rank; return the seconds until the new process answers."""
        began = time.monotonic()
        self.backend.replace([self.place]).read(WAIT_S)
        self.answer()
        return time.monotonic() - began


def ended(process: int, began: float) -> float:
    """Return the seconds until a process is gone."""
    while Path(f"/proc/{process}").exists() and time.monotonic() - began < WAIT_S:
        time.sleep(0.02)
    return time.monotonic() - began


def link(state: str) -> None:
    """Cut the other node's link, or restore it."""
    subprocess.run(["ip", "link", "set", "v2", state], check=True)


def faults(address: str | None, heartbeat_s: float, rounds: int) -> Iterator[str]:
    """Yield the rows of the table."""
    where = "one machine" if address is None else "two nodes"
    ranks = Ranks(address, heartbeat_s)
    kinds = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    for name, how in kinds.items():
        found: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            process, began, seen_s, _ = ranks.seen(lambda pid, how=how: os.kill(pid, how))  # type: ignore[misc]
            found.append((seen_s, ended(process, began), ranks.replaced()))
        yield (
            f"| {where}: {name} | "
            + " | ".join(
                f"{statistics.median(each):.1f} ({min(each):.1f} .. {max(each):.1f})"
                for each in zip(*found, strict=True)
            )
            + " |"
        )
    if address is not None:
        process, began, seen_s, _ = ranks.seen(lambda _: link("down"))
        time.sleep(max(0.0, began + SHORT_CUT_S - time.monotonic()))
        link("up")
        gone_s = ended(process, began)
        yield f"| {where}: cut for {SHORT_CUT_S:g} s | {seen_s:.1f} | {gone_s:.1f} | {ranks.replaced():.1f} |"
        process, began, seen_s, said = ranks.seen(lambda _: link("down"))
        assert "cannot be reached" in said, said
        yield f"| {where}: cut for good | {seen_s:.1f} | {ended(process, began):.1f} | not on this node |"
    before = time.monotonic()
    ranks.backend.close()
    yield f"| {where}: close | | {time.monotonic() - before:.1f} | |"


def two_nodes(heartbeat_s: float, rounds: int) -> list[str]:
    """Return the rows of two nodes."""
    from machines import PORT, machines, ray_up

    env = {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder, machines(Path(folder)) as (first, other):
        ray_up(first, env=env)
        ray_up(other, first, env=env)
        words = ["--inside", f"{first.address}:{PORT}", "--heartbeat", str(heartbeat_s)]
        said = first.run("python", __file__, *words, "--rounds", str(rounds), env=env, wait_s=900)
    return [line for line in said.splitlines() if line.startswith("| two")]


def main() -> None:
    """Measure every fault; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heartbeat", type=float, default=5.0, help="placement.heartbeat_s")
    parser.add_argument("--only", choices=["one", "two"], help="one machine, or two nodes")
    parser.add_argument("--inside", help="used by the script itself: the cluster's address")
    given = parser.parse_args()
    sys.path.insert(0, str(HARNESS))
    if given.inside:
        for row in faults(given.inside, given.heartbeat, given.rounds):
            sys.stdout.write(row + "\n")
        return
    rows = [] if given.only == "two" else [*faults(None, given.heartbeat, given.rounds)]
    rows += [] if given.only == "one" else two_nodes(given.heartbeat, given.rounds)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray"))
    from measured_at import below_title, line

    setting = (
        f"placement.heartbeat_s = {given.heartbeat:g}, {given.rounds} rounds, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, {versions}"
    )
    page = f"""# Lost ranks

`python benchmarks/ranks/lost_ranks.py --write benchmarks/results/lost_ranks.md`, {setting}.
The faults are described at the head of the script.

Seconds, median and range: until a running call raises; until the old process is gone; from the request of a
replacement until it answers, most of it the imports of the new process. Nodes are network namespaces.

| fault | seen | old process gone | replaced |
|---|---|---|---|
{chr(10).join(rows)}
"""
    text = below_title(page, line())
    if given.write:
        given.write.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
