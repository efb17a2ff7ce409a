"""The data plane: put and get against TransferQueue and Ray objects, scheduling, exactly-once delivery.

    python -m venv .tq && .tq/bin/pip install -c constraints.txt TransferQueue    # the peer, once
    python benchmarks/ranks/data_plane.py all --rows 1000000 --write benchmarks/results/data_plane.md
    python benchmarks/ranks/data_plane.py transfer  # with the peer if .tq/bin/python is there
    python benchmarks/ranks/data_plane.py scheduling
    python benchmarks/ranks/data_plane.py exactly-once --kill-every-s 0.25

*transfer*: the shapes of TransferQueue's own performance test in its setting "Small" (1,024 rows, 9 fields,
8,192 values): dense as there, and ragged with the lengths of its nested fields, 1 to 8,192. A put ends when
another process can get the columns of this one. A get ends when a process has them as tensors. For Rillflow
and Ray these are views of shared memory, so the table also lists a get that copies them. Every round checks
the values.

*exactly-once*: groups of rows pass four stages, and each stage adds 1. Producers and consumers are processes.
Consumers are killed at random and restarted. This process counts the rows that arrive.

Each part is measured alone, one after the other; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rillflow.data_plane.instructions import Lease
from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.data_plane.table import Table
from rillflow.records.batch import Field
from rillflow.records.ragged import Ragged
from rillflow_service.client import Client, started

sys.path.append(str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["scheduling", "exactly-once --rows 2000 --producers 1 --consumers 4 --kill-every-s 0.5"]
SLOW = ["transfer --rounds 1 --smaller 64"]  # starts Ray
NEEDS = ["rillflow_service"]

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".tq" / "bin" / "python"
"""The default Python with TransferQueue."""
SMALL = (1024, 9, 8192)
STAGES, GROUP, AT_ONCE = 4, 8, 64
Rounds = dict[str, list[float]]


def columns(rows: int, count: int, length: int, *, is_ragged: bool) -> dict[str, Field]:
    """Return the fields of TransferQueue's performance test."""
    torch.manual_seed(1)
    lengths = torch.linspace(1, length, rows).round().to(torch.int64)
    total = int(lengths.sum())
    if is_ragged:
        return {f"x{each}": Ragged(values=torch.randn(total), lengths=lengths) for each in range(count)}
    return {f"x{each}": torch.randn(rows, length) for each in range(count)}


def schema_of(fields: dict[str, Field]) -> Schema:
    """Return a schema with one stage that reads every column."""
    kinds = {
        name: ColumnType(dtype="float32", ragged=True)
        if isinstance(field, Ragged)
        else ColumnType(dtype="float32", shape=tuple(field.shape[1:]))
        for name, field in fields.items()
    }
    return Schema(columns=kinds, stages=(StageColumns(name="train", reads=tuple(kinds)),))


def values_of(field: Field) -> torch.Tensor:
    return field.values if isinstance(field, Ragged) else field


def ours(fields: dict[str, Field], rounds: int, *, is_remote: bool = False) -> Rounds:
    """Return Rillflow's seconds of put, of get, and of get with a copy."""
    found: Rounds = {"put": [], "get": [], "copied": []}
    rows = len(next(iter(fields.values())))
    with started(capacity_bytes=2**31, listen="127.0.0.1:0") as folder:
        address, token = (folder / "address").read_text(), (folder / "token").read_text()
        writer, reader = (
            Client(address=address, token=token, name=name) if is_remote else Client(folder, name=name)
            for name in ("writer", "reader")
        )
        writer.create("s", schema_of(fields), capacity=4 * rows)
        for turn in range(rounds + 1):
            began = time.perf_counter()
            writer.begin("s", fields, rows=[1] * rows)
            put = time.perf_counter()
            taken = reader.take("s", "train", rows)
            got = time.perf_counter()
            assert taken is not None
            copies = {name: values_of(field).clone() for name, field in taken.fields.items()}
            copied = time.perf_counter()
            assert all(torch.equal(copies[name], values_of(field)) for name, field in fields.items())
            reader.done(taken)
            del taken, copies
            if turn:
                for name, seconds in (("put", put - began), ("get", got - put), ("copied", copied - put)):
                    found[name].append(seconds)
    return found


def ray_objects(fields: dict[str, Field], rounds: int) -> Rounds:
    """Return the same for ``ray.put`` of a dict of arrays and a get in this process: Ray's best case."""
    import ray

    ray.init(num_cpus=1, object_store_memory=2**31, include_dashboard=False, log_to_driver=False)
    found: Rounds = {"put": [], "get": [], "copied": []}
    arrays = {
        name: (values_of(field).numpy(), field.lengths.numpy() if isinstance(field, Ragged) else None)
        for name, field in fields.items()
    }
    for turn in range(rounds + 1):
        began = time.perf_counter()
        reference = ray.put(arrays)
        put = time.perf_counter()
        got_arrays = ray.get(reference)
        got = time.perf_counter()
        copies = {name: torch.tensor(values) for name, (values, _) in got_arrays.items()}
        copied = time.perf_counter()
        assert all(torch.equal(copies[name], values_of(field)) for name, field in fields.items())
        del reference, got_arrays, copies
        if turn:
            for name, seconds in (("put", put - began), ("get", got - put), ("copied", copied - put)):
                found[name].append(seconds)
    ray.shutdown()
    return found


def transfer_queue(python: str, shape: tuple[int, int, int], rounds: int, kind: str) -> dict[str, Any]:
    """Return the same for TransferQueue, measured in its own environment."""
    script = Path(__file__).parent / "peers/queue_storage.py"
    command = [python, str(script), *map(str, (*shape, rounds)), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def transfer(asked: argparse.Namespace) -> list[str]:
    """Return the table of puts and gets."""
    rows, count, length = SMALL[0] // asked.smaller, SMALL[1], SMALL[2]
    lines = ["| columns | system | put, s | get, s | get with a copy, s | put, GB/s | get, GB/s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    if not asked.transferqueue_python:
        print(f"without TransferQueue: there is no {PEER.relative_to(ROOT)}", file=sys.stderr)
    for kind in asked.columns:
        fields = columns(rows, count, length, is_ragged=kind == "ragged")
        size = sum(values_of(field).nbytes for field in fields.values()) / 1e9
        measured: list[tuple[str, dict[str, Any]]] = [("Rillflow", ours(fields, asked.rounds))]
        measured.append(("Rillflow over TCP", ours(fields, asked.rounds, is_remote=True)))
        measured.append((f"Ray {version('ray')} objects", ray_objects(fields, asked.rounds)))
        if asked.transferqueue_python:
            peer = transfer_queue(asked.transferqueue_python, (rows, count, length), asked.rounds, kind)
            said = ", ".join(f"{name} {found}" for name, found in peer["versions"].items())
            measured.append((said, {**peer, "copied": peer["get"]}))
        for name, found in measured:
            put, get, copied = (statistics.median(found[each]) for each in ("put", "get", "copied"))
            rates = f"{size / put:.2f} | {size / get:.2f}"
            lines.append(
                f"| {kind}, {size:.2f} GB | {name} | {put:.3f} | {get:.4f} | {copied:.3f} | {rates} |"
            )
        if asked.transferqueue_python:
            own, peer = measured[0][1], measured[-1][1]
            ratios = {
                name: statistics.median(peer[theirs]) / statistics.median(own[name])
                for name, theirs in (("put", "put"), ("get", "get"), ("copied", "get"))
            }
            told = f"{ratios['put']:.1f}x | {ratios['get']:.0f}x | {ratios['copied']:.1f}x"
            lines.append(f"| {kind} | **Rillflow against TransferQueue** | {told} | | |")
    return lines


def scheduling(asked: argparse.Namespace) -> list[str]:
    """Time taking a batch from 100,000 groups: in the table alone, and through a client."""
    del asked
    schema = Schema(
        columns={"x": ColumnType(dtype="int64")}, stages=(StageColumns(name="train", reads=("x",)),)
    )
    table = Table(schema, capacity=100_000)
    table.begin(100_000, holder="task", now=0.0)
    inside: list[float] = []
    for _ in range(200):
        began = time.perf_counter()
        lease = next(
            each
            for each in table.take("train", 256, holder="a", now=0.0, deadline=9.0)
            if isinstance(each, Lease)
        )
        inside.append(time.perf_counter() - began)
        table.done(lease.number, lease.ids, now=0.0)
    asked_for: list[float] = []
    with started(capacity_bytes=2**26) as folder, Client(folder, name="a") as client:
        client.create("s", schema, capacity=100_000)
        client.begin("s", {"x": torch.arange(100_000)}, rows=[1] * 100_000)
        for _ in range(200):
            began = time.perf_counter()
            taken = client.take("s", "train", 256)
            asked_for.append(time.perf_counter() - began)
            assert taken is not None
            client.done(taken)
    return [
        "| 256 of 100,000 ready groups | median, ms | 99 of 100 within, ms |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(found) * 1e3:.3f} | {np.quantile(found, 0.99) * 1e3:.3f} |"
            for name, found in (
                ("the table's `take`", inside),
                ("a client's `take`, columns and all", asked_for),
            )
        ),
    ]


def work(folder: str, stage: str) -> None:
    """Consume: add 1 and write, until the end of the stream."""
    number = int(stage.removeprefix("add"))
    with Client(Path(folder), name=stage) as client:
        while (taken := client.take("s", stage, AT_ONCE)) is not None:
            total = taken.fields[f"total{number - 1}"]
            assert isinstance(total, torch.Tensor)
            client.done(taken, {f"total{number}": total + 1})


def produce(folder: str, first: int, groups: int) -> None:
    """Produce groups of rows that carry their own row numbers."""
    with Client(Path(folder), name="producer") as client:
        for start in range(first, first + groups, AT_ONCE):
            count = min(AT_ONCE, first + groups - start)
            row = torch.arange(start * GROUP, (start + count) * GROUP)
            client.begin("s", {"row": row, "total0": row * 10}, rows=[GROUP] * count)


def start(function: Callable[..., None], *what: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function, args=what)
    process.start()
    return process


def exactly_once(asked: argparse.Namespace) -> list[str]:
    """Return a table of lost and doubled rows, with a line for each kill interval."""
    head = "| rows | producers | consumers, stages | killed | lost | doubled | wrong | rows/s | left over |"
    return [head, "|---" * 9 + "|", *(passed(asked, every_s) for every_s in asked.kill_every_s)]


def passed(asked: argparse.Namespace, kill_every_s: float) -> str:
    """Pass rows through the stages and return the line of the table."""
    numbers = range(1, STAGES + 1)
    stages = [
        StageColumns(
            name=f"add{each}", reads=(f"total{each - 1}",), writes=(f"total{each}",), order="ready_first"
        )
        for each in numbers
    ]
    stages.append(StageColumns(name="count", reads=("row", f"total{STAGES}"), order="ready_first"))
    kind = ColumnType(dtype="int64")
    names = ("row", *(f"total{each}" for each in range(STAGES + 1)))
    schema = Schema(columns=dict.fromkeys(names, kind), stages=tuple(stages))
    groups, each = asked.rows // GROUP, asked.rows // GROUP // asked.producers
    seen, wrong, kills = np.zeros(asked.rows, np.int64), 0, 0
    draw = random.Random(1)
    began = last_kill = time.monotonic()
    with started(capacity_bytes=2**30) as folder, Client(folder, name="count") as client:
        client.create("s", schema, capacity=8192)
        shares = [
            (place * each, each if place < asked.producers - 1 else groups - place * each)
            for place in range(asked.producers)
        ]
        producers = [start(produce, str(folder), first, count) for first, count in shares]
        roles = [f"add{1 + place % STAGES}" for place in range(asked.consumers)]
        consumers = [start(work, str(folder), role) for role in roles]
        is_closed = False
        while True:
            if not is_closed and not any(producer.is_alive() for producer in producers):
                client.finish("s")
                is_closed = True
            if time.monotonic() - last_kill > kill_every_s and not is_closed:
                victim = draw.randrange(len(consumers))
                consumers[victim].kill()
                consumers[victim].join()
                consumers[victim] = start(work, str(folder), roles[victim])
                kills, last_kill = kills + 1, time.monotonic()
            taken = client.take("s", "count", 4 * AT_ONCE, wait_s=60.0)
            if taken is None:
                break
            row, total = taken.fields["row"], taken.fields[f"total{STAGES}"]
            assert isinstance(row, torch.Tensor) and isinstance(total, torch.Tensor)
            np.add.at(seen, row.numpy(), 1)
            wrong += int((total != row * 10 + STAGES).sum())
            client.done(taken)
        status = client.status("s")
        for process in (*producers, *consumers):
            process.join()
        failed = sum(process.exitcode != 0 for process in (*producers, *consumers))
    took = time.monotonic() - began
    lost, doubled = int((seen == 0).sum()), int((seen > 1).sum())
    return (
        f"| {groups * GROUP:,} in groups of {GROUP} | {asked.producers} | {asked.consumers}, {STAGES} "
        f"| {kills} | {lost} | {doubled} | {wrong} | {groups * GROUP / took:,.0f} "
        f"| {status['begun'] - status['oldest']} groups, {failed} failed processes |"
    )


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "transfer": transfer,
    "scheduling": scheduling,
    "exactly-once": exactly_once,
}
TITLES = {"transfer": "Put and get", "scheduling": "Scheduling", "exactly-once": "Exactly once"}
HEAD = """# The data plane

`python benchmarks/ranks/data_plane.py {words}`, {versions}.

Each part runs alone; figures are medians of {rounds} rounds after one that is not counted. TransferQueue runs
in an environment of its own (`python -m venv .tq && .tq/bin/pip install -c constraints.txt TransferQueue`),
with two storage units on a Ray of eight claimed CPUs: on two, it waits without an end for a CPU for each of
its three actors. The head of the script describes the parts.

"""


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, "all"))
    there = str(PEER) if PEER.exists() else ""
    parser.add_argument(
        "--transferqueue-python", default=there, help="the Python of an environment that has it"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--columns", nargs="+", choices=("dense", "ragged"), default=("dense", "ragged"))
    parser.add_argument("--smaller", type=int, default=1, help="a part of the rows of a transfer")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--consumers", type=int, default=8)
    parser.add_argument("--kill-every-s", type=float, nargs="+", default=[2.0, 0.25])
    parser.add_argument("--write", type=Path, help="the page to write")
    asked = parser.parse_args()
    lines = list[str]()
    for part in PARTS if asked.part == "all" else (asked.part,):
        found = PARTS[part](asked)
        print("\n".join(found), flush=True)
        lines += [f"## {TITLES[part]}", "", *found, ""]
    versions = (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )
    words = shlex.join(sys.argv[1:])
    print(f"\n`python benchmarks/ranks/data_plane.py {words}`; {versions}")
    if asked.write:
        page = HEAD.format(words=words, versions=versions, rounds=asked.rounds)
        asked.write.write_text(below_title(page + "\n".join(lines).rstrip("\n") + "\n", line()), "utf-8")


if __name__ == "__main__":
    main()
