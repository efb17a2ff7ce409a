"""The controller with many ranks: seconds of a call, of a step on 64 processes, and of a step's records.

    python benchmarks/ranks/controller_ranks.py calls        # a call to n ranks, one argument of n parts
    python benchmarks/ranks/controller_ranks.py telemetry  # the records of a step of 1,024 rows x 512 tokens
    python benchmarks/ranks/controller_ranks.py step  # PPO on 64 real ranks of this machine: many minutes

In `calls`, one Ray actor serves all ranks: each place is that actor. The controller does the same work
(describe, pack, submit) as for as many processes. The clock does not count the work of the ranks. Seconds are
CPU seconds of the calling thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.controller.telemetry import write_part
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Metric, Sum
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.roles.reward import reward_metrics
from rillflow.roles.sampler import rollout_metrics
from rillflow.runs.reader import read_metrics, read_rollouts
from rillflow.workers import program
from rillflow.workers.backend import Place, Pool, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.transfer import DP, SPLIT_DP_REDUCE

SMALLEST = ["telemetry"]
SLOW = ["calls --ranks 4", "step --ranks 2"]  # start Ray

WAIT_S = 600.0
ROUNDS = 3
"""Rounds after a warm-up round; a single round from 1,000 ranks on, because the one process is slow."""
RECIPE = """
[run]
seed = 3
threads = 1
rollouts_every = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 200
held_out = 0
[policy]
lr = 1e-3
model.new = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 6
[algorithm]
name = "ppo"
steps = 2
prompts_per_step = 64
samples_per_prompt = 2
[placement]
backend = "ray"
deadline_s = 3000.0
pools.main = RANKS
[evaluate]
problems = 0
"""


class Worker:
    """A role that returns its batch, or counts the rows."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP, writes=("x",))
    def same(self, batch: Batch) -> Batch:
        return batch

    @endpoint(SPLIT_DP_REDUCE, reads=("x",))
    def update(self, batch: Batch) -> dict[str, Metric]:
        return {"rows/all/sum": Sum(value=float(len(batch)))}


def calls(sizes: list[int]) -> Iterator[str]:
    """Yield the rows of the table."""
    from rillflow.workers.ray import RayBackend

    backend = RayBackend(WAIT_S)
    backend.open([Pool(name="a", size=1)])
    try:
        one = backend._ranks[Place("a", 0)]
        backend.submit(Place("a", 0), program.start, "worker", backend.pack(Worker, "what makes a worker"))
        for size in sizes:
            yield _row(backend, one, size)
    finally:
        backend.close()


def _row(backend: Any, one: Any, size: int) -> str:
    backend._ranks = {Place("a", rank): one for rank in range(size)}
    backend.pools = {"a": size}
    group = Group("worker", endpoints_of(Worker), mesh=Mesh.of(dp=size), pool="a", backend=backend)
    ids = row_ids([RowId(0, row, 0) for row in range(2 * size)])
    batch = Batch(ids=ids, fields={"x": torch.ones(len(ids)), "tokens": Ragged.from_rows([[1]] * len(ids))})
    found: dict[str, list[float]] = {"own": [], "anew": [], "process": []}
    sent = 0
    rounds = ROUNDS + 1 if size < 1000 else 1
    for _ in range(rounds):
        held = group.call("same", batch)
        held.wait(WAIT_S)
        for name, called in (("own", "same"), ("anew", "update")):
            before, clock, process = backend.traffic.sent_bytes, time.thread_time(), time.process_time()
            made = group.call(called, held)
            found[name].append(time.thread_time() - clock)
            if name == "anew":
                found["process"].append(time.process_time() - process)
                sent = (backend.traffic.sent_bytes - before) // size
            if rounds > 1:
                made.wait(WAIT_S)
        assert rounds == 1 or made.read(WAIT_S) == {"rows/all/sum": Sum(value=float(len(ids)))}
    shown = " | ".join(
        f"{statistics.median(each):.3f} ({min(each):.3f} .. {max(each):.3f})"
        for each in (each[1:] or each for each in found.values())
    )
    return f"| {size:,} | {shown} | {sent:,} |"


def telemetry(rows: int, tokens: int) -> list[str]:
    """Time a rank's work for the records of a step whose rows it all holds, and reading them back."""
    ids = row_ids([RowId(0, row // 8, row % 8) for row in range(rows)])
    field = Ragged(values=torch.randint(0, 1000, (rows * tokens,)), lengths=torch.full((rows,), tokens))
    logprobs = field.with_values(-torch.rand(rows * tokens))
    rollouts = Batch(
        ids=ids,
        fields={
            "tokens": field,
            "loss_mask": field.with_values(field.values >= 0),
            "sampler_logprobs": logprobs,
            "versions": field.with_values(torch.ones(rows * tokens, dtype=torch.int32)),
            "finish": torch.zeros(rows, dtype=torch.int8),
            "columns": Ragged.from_text(['{"prompt": "12+34="}'] * rows),
        },
    )
    scores = Batch(
        ids=ids,
        fields={
            "rewards": torch.rand(rows),
            "valid": torch.ones(rows, dtype=torch.bool),
            "outcome": torch.zeros(rows, dtype=torch.int8),
            "completion": Ragged.from_text(["word " * tokens] * rows),
            "message": Ragged.from_text([""] * rows),
        },
    )
    advantages = scores.with_fields(advantages=torch.rand(rows))
    found: dict[str, list[float]] = {"measured": [], "written": [], "read": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rollouts" / "step-000001-0001-of-0001.safetensors"
        for _ in range(ROUNDS + 1):
            clock = [time.perf_counter()]
            rollout_metrics(rollouts)
            reward_metrics(scores)
            clock.append(time.perf_counter())
            write_part(str(file), 1.0, ["", "", "advantages"], rollouts, scores, advantages)
            clock.append(time.perf_counter())
            assert len(read_rollouts(Path(folder), 1)) == rows
            clock.append(time.perf_counter())
            for name, start, stop in zip(found, clock, clock[1:], strict=False):
                found[name].append(stop - start)
        size = file.stat().st_size
    shown = [f"| {name} | {1e3 * statistics.median(each[1:]):.0f} ms |" for name, each in found.items()]
    return [*shown, f"| the file | {size / 2**20:.1f} MiB |"]


def step(ranks: int) -> list[str]:
    """Run two steps of PPO on this many processes; return their seconds and the driver's CPU seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RECIPE.replace("RANKS", str(ranks)))
        run = folder / "run"
        began, processor = time.perf_counter(), time.process_time()
        loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(run))}"])
        launch(loaded, quiet=True)
        wall, driver = time.perf_counter() - began, time.process_time() - processor
        seconds = [each.metrics["run/step_seconds/mean"].value for each in read_metrics(run)]
        rows = len(read_rollouts(run, 2))
    return [f"| {ranks} | {rows} | {seconds[0]:.1f} s | {seconds[1]:.1f} s | {driver:.1f} s | {wall:.0f} s |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("calls", "telemetry", "step"))
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[64, 256, 1024], help="of calls; of step the first"
    )
    arguments = parser.parse_args()
    told = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}"
    print(f"{told}, torch {version('torch')}, ray {version('ray')}\n")
    if arguments.what == "calls":
        print("| ranks, and parts | as the rows lie | shared out anew | all threads | bytes a message |")
        print("|---|---|---|---|---|")
        for row in calls(arguments.ranks):
            print(row, flush=True)
    elif arguments.what == "telemetry":
        print("| 1,024 rows x 512 tokens | |", "|---|---|", *telemetry(1024, 512), sep="\n")
    else:
        print(
            "| ranks | rows | first step | second step | driver's processor | wall, start and end with it |"
        )
        print("|---|---|---|---|---|---|", *step(arguments.ranks[0]), sep="\n")


if __name__ == "__main__":
    main()
