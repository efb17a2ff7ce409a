"""Ring: frames per second and idle time of an actor by the size of its ring; and the cost of the streams.

    python benchmarks/classic/ring.py all --write benchmarks/results/classic_ring.md
    python benchmarks/classic/ring.py ring --rounds 5
    python benchmarks/classic/ring.py streams --rounds 5

*ring*: one actor process and one policy process, each on a core of its own, shared memory. Each environment
of the ring has one slot. The law is FPS(R) = min(R / (t_env + t_inf), 1 / t_env): t_env is the measured time
of a step, and t_inf = 1 / FPS(1) - t_env everything between two steps of a single environment. *fast* and
*slow* have steps of 0.1 ms and 2 ms, and a policy that answers each batch after 1 ms. The law needs a latency
that does not grow with the load: so each lane has a policy worker of its own, all of them threads of the
policy process. With "1 worker", a request that comes during a batch waits for its end. *Pong* is ALE's, with
the CNN of the Atari papers on one core, where a larger batch takes longer; its law is an upper bound.

*streams*: microseconds from a request of one slot to its answer, and MB/s of fragments of 32 steps of 8
stacks of 4 x 84 x 84 images. The sender writes every element of a fragment, the receiver reads none: so
the figure of shared memory is that of a memory copy. Inline, both ends take turns in one process.

A cell is the mean over rounds with its 95% interval; each round measures all sizes in turn.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from intervals import whole
from measured_at import below_title, line
from stream_parts import (
    TRANSPORTS,
    BusyEnvironment,
    SleepyPolicy,
    StreamWorkload,
    make_actor,
    make_policy_threads,
    make_policy_worker,
)

from rillflow.workers.backend import Backend, Pool
from rillflow.workers.processes import ProcessBackend
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.streams.layout import fragment_of, layout_of
from rillflow_classic.streams.sockets import open_streams
from rillflow_classic.streams.streams import Streams, StreamSpec
from rillflow_classic.worker_set import WorkerSet

SLOW = ["streams --rounds 1 --seconds 0.2", "ring --rounds 1 --seconds 0.5 --sizes 1 2 --workloads fast"]
NEEDS = ["envpool", "rillflow_classic"]
WEIGHTS = {"nothing": np.zeros(1, np.float32)}
WORKLOADS = {
    "fast": StreamWorkload(name="fast", step_s=1e-4, batch_s=1e-3),
    "slow": StreamWorkload(name="slow", step_s=2e-3, batch_s=1e-3),
    "Pong": StreamWorkload(name="Pong", environment="ALE/Pong-v5", network=NetworkConfig(kind="cnn")),
}
FREE = -1
"""Round in which a lane sends what there is room for."""
IMAGES = (32, 8, 4, 84, 84)


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["all", "ring", "streams"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    page = [f"# Ring and streams\n\n{machine()}\n"]
    if asked.part in ("all", "ring"):
        page += [ring_table(WORKLOADS[name], asked) for name in asked.workloads]
    if asked.part in ("all", "streams"):
        page.append(streams_table(asked.rounds, asked.seconds))
    command = f"Command: `python benchmarks/classic/ring.py {' '.join(sys.argv[1:])}`\n"
    text = below_title("\n".join([*page, command]), line())
    if asked.write:
        asked.write.write_text(text, "utf-8")
    print(text)


def ring_table(workload: StreamWorkload, asked: argparse.Namespace) -> str:
    """Return the table of one workload."""
    forms = {size: (size, 1) if workload.network is None and size > 1 else (1,) for size in asked.sizes}
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    steps: list[float] = []
    backend = ProcessBackend()
    backend.open([Pool(name="actors", size=1), Pool(name="policies", size=1)])
    try:
        for _ in range(asked.rounds):
            steps.append(step_s(workload, asked.seconds / 4))
            for ring, workers in [(size, each) for size in forms for each in forms[size]]:
                values = found.setdefault((ring, workers), [])
                values.append(polled(backend, workload, ring, workers, asked.seconds))
    finally:
        backend.close()
    first = asked.sizes[0]
    t_env, alone = median(steps), fmean(fps for fps, _ in found[first, 1])
    t_inf = first / alone - t_env
    rows = [
        f"## {workload.name}: t_env {t_env * 1e3:.2f} ms, t_inf {t_inf * 1e3:.2f} ms\n",
        "| ring | law, frames/s | measured | over ring 1 | actor idle | 1 worker | over ring 1 | idle |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size in asked.sizes:
        law = min(size / (t_env + t_inf), 1 / t_env)
        cells = [f"{size}", f"{law:,.0f}"]
        own, shared = found.get((size, size)), found.get((size, 1))
        for values in (own or shared, shared if own else None):
            if values is None:
                cells += ["", "", ""]
                continue
            speeds = [fps for fps, _ in values]
            idle = fmean(share for _, share in values)
            cells += [whole(speeds), f"{fmean(speeds) / alone:.2f}x", f"{idle:.0%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def step_s(workload: StreamWorkload, seconds: float) -> float:
    """Return the time of one step of one environment."""
    environment = workload.make_environment()
    environment.reset(0)
    actions = np.zeros(workload.slots, np.int64)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        environment.step(actions)
        count += 1
    environment.close()
    return passed / count


def polled(
    backend: Backend, workload: StreamWorkload, ring: int, workers: int, seconds: float
) -> tuple[float, float]:
    """Return frames per second and the idle share of an actor with a ring."""
    weights = weights_of(workload)
    transport = open_streams("shared_memory", workload.spec(ring=ring, workers=workers, weights=weights))
    try:
        actors = WorkerSet(backend, "actors", partial(make_actor, workload, transport, False, 0))
        policies = WorkerSet(backend, "policies", partial(make_policy_threads, workload, transport, 1))
        transport.publish("policy", 0, weights)
        transport.control(is_stopped=False, round_=FREE)
        for budget_s in (seconds / 2, seconds):  # the first is a warm-up
            calls = [policies.call(0, "poll", budget_s), actors.call(0, "poll", budget_s)]
            while not all(call.is_ready for call in calls):
                drain(transport, 0.01)
            report = calls[1].read()
            calls[0].read()
        return report.rows / report.elapsed_s, report.idle_s / report.elapsed_s
    finally:
        transport.close()


def weights_of(workload: StreamWorkload) -> Any:
    """Return the weights of a workload's policy."""
    environment = workload.make_environment()
    policy = workload.make_policy(environment)
    environment.close()
    if workload.network is None:
        return WEIGHTS
    return {name: value.numpy() for name, value in policy.network.state_dict().items()}  # type: ignore[attr-defined]


def drain(source: Streams, wait_s: float) -> int:
    """Take and release what has come; return its number."""
    received = source.take(wait_s)
    for each in received:
        each.release()
    return len(received)


def streams_table(rounds: int, seconds: float) -> str:
    """Return the table of requests and fragments on every transport."""
    asked: dict[str, list[float]] = {kind: [] for kind in TRANSPORTS}
    sent: dict[str, list[float]] = {kind: [] for kind in TRANSPORTS}
    for _ in range(rounds):
        for kind in TRANSPORTS:
            asked[kind].append(request_us(kind, seconds))
            sent[kind].append(megabytes(kind, seconds))
    rows = [
        "## Streams\n",
        "| transport | us per request | MB/s of fragments |",
        "|---|---:|---:|",
    ]
    rows += [f"| {kind} | {whole(asked[kind])} | {whole(sent[kind])} |" for kind in TRANSPORTS]
    return "\n".join([*rows, ""])


def request_us(kind: str, seconds: float) -> float:
    """Return microseconds from a request to its answer; over processes if the transport can."""
    workload = StreamWorkload(name="request")
    spec = workload.spec(ring=1, workers=1, weights=WEIGHTS)
    transport = open_streams(kind, spec)
    transport.publish("policy", 0, WEIGHTS)
    client, observations = transport.end("actor", 0), np.zeros((1, 4), np.float32)
    is_inline = kind == "inline"
    backend: Backend | None = None if is_inline else ProcessBackend()
    try:
        if backend is None:
            worker = make_policy_worker(workload, transport, -1, 0)
        else:
            backend.open([Pool(name="policies", size=1)])
            workers = WorkerSet(backend, "policies", partial(make_policy_worker, workload, transport, 1))
            workers.call(0, "poll", 2 * seconds + 10)
        warm_until, count, began = time.perf_counter() + seconds / 4, 0, 0.0
        while True:
            client.post("policy", 0, observations, None)
            if is_inline:
                worker.turn()
            while client.actions("policy", 0) is None:
                client.wait(1.0)
            now = time.perf_counter()
            count += 1
            if now < warm_until:
                count, began = 0, now
            elif count and now - began > seconds:
                return (now - began) / count * 1e6
    finally:
        transport.control(is_stopped=True, round_=FREE)
        if backend is not None:
            backend.close()
        transport.close()


def megabytes(kind: str, seconds: float) -> float:
    """Return MB/s of fragments from one process, or thread, to this one."""
    steps, slots, *image = IMAGES
    layout = layout_of(SleepyPolicy(0.0), BusyEnvironment(slots, 4, 0.0), slots)
    layout = replace(layout, request=np.dtype([("observations", "u1", (slots, *image))]))
    spec = StreamSpec(actors=1, steps=steps, layouts={"policy": layout})
    transport = open_streams(kind, spec)
    transport.control(is_stopped=False, round_=FREE)
    nbytes = layout.fragment(steps).itemsize
    backend: Backend | None = None if kind == "inline" else ProcessBackend()
    try:
        if backend is None:
            sender = Sender(transport.end("actor", 0))
            began, count = time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds:
                sender.send_one()
                count += drain(transport, 0.0)
            return nbytes * count / passed / 1e6
        backend.open([Pool(name="senders", size=1)])
        senders = WorkerSet(backend, "senders", partial(make_sender, transport))
        call = senders.call(0, "send", 1.5 * seconds)
        drain(transport, 10.0)
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            count += drain(transport, 0.1)
        while not call.is_ready:
            drain(transport, 0.01)
        return nbytes * count / passed / 1e6
    finally:
        if backend is not None:
            backend.close()
        transport.close()


class Sender:
    """Writes and sends fragments as fast as there is room."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def send_one(self) -> bool:
        """Send a fragment if there is room."""
        reserved = self._sink.reserve(0)
        if reserved is None:
            return False
        for array in reserved["policy"].values():
            array[...] = 1
        self._sink.put(0, {"policy": fragment_of(reserved["policy"])}, FREE)
        return True

    def send(self, seconds: float) -> None:
        """Send for a while."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if not self.send_one():
                self._sink.wait(0.1)


def make_sender(transport: Any, index: int) -> Sender:
    """Return a sender in a worker's process."""
    return Sender(transport.end("actor", index))


def machine() -> str:
    """Return the machine, and how busy it was before the measurement."""
    return (
        f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores; load average "
        f"of the 15 minutes before the start: {os.getloadavg()[2]:.1f}."
    )


if __name__ == "__main__":
    main()
