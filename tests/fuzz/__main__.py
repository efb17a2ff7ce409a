"""Send hostile requests beside a polite client, and report its largest delay and the server's memory.

    python -m tests.fuzz --seed 1 --seconds 60

Each server runs in its own process on the loopback device. The polite client is timed without an attacker
first, because a busy machine delays it too.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.attacks import ATTACKS, sent_until
from tests.fuzz.servers import Polite, serving

PLUGINS = {"training": "rillflow_training_service", "streams": "rillflow_service"}
WORKERS = 4
"""Attacks at once."""
PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a server did in a round."""

    server: str
    """Name of the server."""
    attacks: int
    """Attacks that were sent."""
    alone_s: float
    """Largest delay of the polite client without an attacker."""
    beside_s: float
    """Largest delay of the polite client beside attacks."""
    during: str
    """Attacks that ran at the time of the largest delay."""
    idle_bytes: int
    """Memory of the server before the attacks."""
    peak_bytes: int
    """Largest memory of the server."""
    ended_s: float
    """Seconds from SIGTERM to its end, with attacks under way."""

    def __str__(self) -> str:
        ratio = self.beside_s / max(self.alone_s, 1e-3)
        peak, idle = self.peak_bytes / 2**20, self.idle_bytes / 2**20
        return (
            f"{self.server}, {self.attacks} attacks\n"
            f"  polite client: {self.beside_s:.2f} s during {self.during}; {self.alone_s:.2f} s alone, "
            f"ratio {ratio:.1f}\n"
            f"  memory: {peak:.0f} MiB at most, {idle:.0f} MiB idle; ended {self.ended_s:.1f} s after SIGTERM"
        )


def fuzzed(name: str, folder: Path, *, seed: int, seconds: float) -> Round:
    """Attack a server for some seconds; return what was measured.

    Raises:
        AssertionError: the polite client was refused, or the server ended.
    """
    with serving(name, folder) as (server, polite):
        alone_s = max(_delays(polite, min(seconds, 5.0)))
        idle = server.memory("VmRSS")
        until = time.monotonic() + seconds
        # Attacks run in processes of their own: making their bodies must not delay the polite client.
        with ProcessPoolExecutor(WORKERS, get_context("fork")) as pool:
            workers = [
                pool.submit(sent_until, until, ATTACKS[name], server.target, f"{seed} {worker}")
                for worker in range(WORKERS)
            ]
            worst, at = 0.0, 0.0
            while time.monotonic() < until:
                if (delay := polite.once()) > worst:
                    worst, at = delay, time.monotonic()
                time.sleep(PAUSE_S)
            assert server.process.poll() is None, "the server has ended"
            peak, ended_s = server.memory("VmHWM"), server.ended_s()
        log = [each for worker in workers for each in worker.result()]
        during = sorted({each.name for each in log if each.begin_s < at and each.end_s > at - worst})
        return Round(
            server=name,
            attacks=len(log),
            alone_s=alone_s,
            beside_s=worst,
            during=", ".join(during) or "no attack",
            idle_bytes=idle,
            peak_bytes=peak,
            ended_s=ended_s,
        )


def _delays(polite: Polite, seconds: float) -> list[float]:
    until, found = time.monotonic() + seconds, [polite.once()]
    while time.monotonic() < until:
        found.append(polite.once())
        time.sleep(PAUSE_S)
    return found


def main() -> None:
    """Attack each server that is installed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each server")
    parser.add_argument("--server", choices=[*ATTACKS], action="append", help="default: all")
    asked = parser.parse_args()
    names = asked.server or [
        name for name in ATTACKS if name not in PLUGINS or importlib.util.find_spec(PLUGINS[name])
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            sys.stdout.write(f"{fuzzed(name, Path(folder), seed=asked.seed, seconds=asked.seconds)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
