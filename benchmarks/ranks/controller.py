"""The controller against bare Ray: a call to four ranks, 64 MiB between groups, two pools at once.

    ours    Group.call ─> 4 RankProcess ─> Pending.wait     one group returns a batch, another receives it
    bare    4 x actor.method.remote ─> ray.get              ray.put ─> ray.get; from actors to actors

    python benchmarks/ranks/controller.py                                    # about three minutes
    python benchmarks/ranks/controller.py --verl-python .verl/bin/python     # an environment that has verl
    python benchmarks/ranks/controller.py --write benchmarks/results/controller.md

All of them take turns in one process on one cluster; verl has its own process and cluster. Figures are
medians of the rounds. A step of PPO with scripted roles and 64 MiB of rollouts follows. It reports the bytes
that pass through the controller's process in three ways: the backend's count, the kernel's count for its TCP
sockets, and the object-store memory that the process reads.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from controller_roles import Critic, Policy, Reference, Reward

from rillflow.algorithms import ppo
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.workers.backend import Backend, Pool, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.start import ray_backend, settle
from rillflow.workers.transfer import DP

SMALLEST = []
SLOW = ["--rounds 1"]  # starts eight ranks on Ray

settle()  # before Ray is imported
import ray  # noqa: E402  # isort: skip

RANKS, CALLS, MIB = 4, 100, 64
WAIT_S = 300.0
TOKEN_BYTES = 8 + 1 + 4 + 4
"""Bytes of a token of a rollout: id, loss mask, log probability and version."""
MARK = "verl_controller:"


class Worker:
    """A role that does nothing, returns a large batch, receives one, or sleeps."""

    def __init__(self, site: Site) -> None:
        del site
        self._made = torch.ones(1, MIB * 2**20 // 4 // RANKS)

    @endpoint(DP)
    def nothing(self, batch: Batch) -> Batch:
        return batch

    @endpoint(DP, writes=("big",))
    def make(self, batch: Batch) -> Batch:
        return Batch(ids=batch.ids, fields={"big": self._made})

    @endpoint(DP)
    def take(self, batch: Batch) -> int:
        return int(batch.dense("big")[0, 0])

    @endpoint(DP)
    def sleep(self, batch: Batch, *, seconds: float) -> Batch:
        time.sleep(seconds)
        return batch


@ray.remote(num_cpus=0)
class Bare:
    """The same role as a plain Ray actor."""

    def __init__(self) -> None:
        self._made = torch.ones(MIB * 2**20 // 4 // RANKS).numpy()

    def nothing(self, batch: Any) -> Any:
        return batch

    def make(self, batch: Any) -> Any:
        del batch
        return self._made

    def take(self, array: Any) -> int:
        return int(array[0])


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Bytes and seconds of one step of PPO."""

    rollout_bytes: int
    """Bytes of the rollouts."""
    counted_bytes: int
    """Bytes through the controller, by the backend's count."""
    socket_bytes: int
    """Bytes through all TCP connections of this process, by the kernel's count."""
    mapped_bytes: int
    """Bytes of object-store memory that this process first reads in the step."""
    seconds: float
    """Seconds of the step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11, help="rounds after the first (11)")
    parser.add_argument("--verl-python", metavar="PYTHON", help="an interpreter that has verl")
    parser.add_argument("--write", metavar="FILE", help="where the table goes, besides the screen")
    arguments = parser.parse_args()
    backend = ray_backend(WAIT_S)
    backend.open([Pool(name="a", size=RANKS), Pool(name="b", size=RANKS)])
    try:
        groups = [group_on(backend, "worker", Worker, pool, RANKS) for pool in ("a", "b")]
        with verl(arguments.verl_python) as peer:
            rows = measured(groups, arguments.rounds, peer)
        step = scripted_step(backend, {"a": RANKS, "b": RANKS}, rollout_bytes=MIB * 2**20)
        step()
        passed = step()
    finally:
        backend.close()
    text = report(rows, passed, arguments.rounds)
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)


def group_on(backend: Backend, name: str, kind: type, pool: str, ranks: int) -> Group:
    """Start a role on every rank of a pool and return its group."""
    group = Group(name, endpoints_of(kind), mesh=Mesh.of(dp=ranks), pool=pool, backend=backend)
    group.start(kind)
    return group


def measured(groups: list[Group], rounds: int, peer: Callable[[str], None] | None) -> list[str]:
    """Measure everything and return the rows of the table."""
    first, second = groups
    small = Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(RANKS)]), fields={"x": torch.ones(RANKS)}
    )
    actors = [Bare.remote() for _ in range(2 * RANKS)]
    givers, takers = actors[:RANKS], actors[RANKS:]
    piece = {"ids": small.ids[:1].numpy(), "x": small.dense("x")[:1].numpy()}
    tensor = torch.ones(MIB * 2**20 // 4)
    array = tensor.numpy()

    def call() -> None:
        for _ in range(CALLS):
            first.call("nothing", small).wait(WAIT_S)

    def bare_call() -> None:
        for _ in range(CALLS):
            ray.get([actor.nothing.remote(piece) for actor in givers])

    def pass_on() -> None:
        second.call("take", first.call("make", small)).wait(WAIT_S)

    def put_and_get() -> None:
        ray.get(ray.put(array))

    def tensor_to_a_rank() -> None:
        ray.get(takers[0].take.remote(ray.put(tensor)))

    def bare_pass() -> None:
        made = [actor.make.remote(piece) for actor in givers]
        ray.get([actor.take.remote(part) for actor, part in zip(takers, made, strict=True)])

    def one_pool() -> None:
        first.call("sleep", small, seconds=1.0).wait(WAIT_S)

    def two_pools() -> None:
        pending = [group.call("sleep", small, seconds=1.0) for group in groups]
        for each in pending:
            each.wait(WAIT_S)

    ways = {"call": call, "bare call": bare_call, "pass": pass_on, "bare pass": bare_pass}
    ways |= {"put and get": put_and_get, "tensor": tensor_to_a_rank}
    ways |= {"two pools": two_pools, "one pool": one_pool}
    if peer is not None:
        ways |= {"verl call": lambda: peer("call"), "verl pass": lambda: peer("pass")}
    return table(timed(ways, rounds))


def timed(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, measured in turn; a first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if index:
                found[name].append(time.perf_counter() - began)
    return found


def table(found: dict[str, list[float]]) -> list[str]:
    """Return table rows that compare ours with the others: median, and least and most in brackets."""
    ours = {"call": f"a call to {RANKS} ranks", "pass": f"{MIB} MiB from {RANKS} ranks to {RANKS} others"}
    others = {"bare call": "call", "verl call": "call", "bare pass": "pass", "put and get": "pass"}
    others |= {"tensor": "pass", "verl pass": "pass"}
    named = {
        "bare call": "bare Ray, the same calls",
        "bare pass": "bare Ray, the same actors' calls",
        "put and get": "bare Ray, ray.put and ray.get here",
        "tensor": "bare Ray, a tensor by ray.put, got on one rank",
        "verl call": "verl's single controller",
        "verl pass": "verl's single controller",
        "one pool": "one pool alone",
    }
    others["one pool"], ours["two pools"] = "two pools", "a second of sleep on two pools at once"
    count = {"call": CALLS}
    rows = []
    for name, compared in others.items():
        if name not in found:
            continue
        mine, theirs = (
            [second * 1e3 / count.get(compared, 1) for second in found[each]] for each in (compared, name)
        )
        ratio = statistics.median(mine) / statistics.median(theirs)
        rows.append(f"| {ours[compared]} | {_shown(mine)} | {named[name]} | {_shown(theirs)} | {ratio:.2f} |")
    return rows


def _shown(milliseconds: list[float]) -> str:
    return f"{statistics.median(milliseconds):.2f} ms ({min(milliseconds):.2f} .. {max(milliseconds):.2f})"


def scripted_step(backend: Backend, pools: dict[str, int], rollout_bytes: int) -> Callable[[], Passed]:
    """Return a function that runs one step of PPO with a KL penalty on scripted roles.

    Args:
        backend: has at least two open pools.
        pools: two pools with their ranks; policy and reference on the first, critic and reward on the second.
        rollout_bytes: bytes of each step's rollouts.
    """
    one, other = pools
    where = {"policy": (Policy, one), "reference": (Reference, one)}
    where |= {"critic": (Critic, other), "reward": (Reward, other)}
    groups = {name: group_on(backend, name, kind, pool, pools[pool]) for name, (kind, pool) in where.items()}
    config = ppo.PPOConfig.model_validate(
        {"name": "ppo", "steps": 1, "prompts_per_step": 66, "samples_per_prompt": 4, "kl_target": 0.5}
        | {"loss": {"kl": 0.05}}
    )
    length = rollout_bytes // TOKEN_BYTES // config.rows_per_step + 1
    prompts = Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(config.prompts_per_step)]),
        fields={"length": torch.full((config.prompts_per_step,), length)},
    )
    flow = Flow(GroupExecutor(groups, backend))

    def step() -> Passed:
        traffic, began = backend.traffic, time.perf_counter()
        counted = traffic.sent_bytes + traffic.read_bytes
        sockets, mapped = socket_bytes(), mapped_bytes()
        flow.begin()
        reports = ppo.step(flow, prompts, config)
        facts = {entry.stage: entry.result.facts(WAIT_S) for entry in flow.journal.stages}
        for report in reports:
            report.read(WAIT_S)
        flow.state.update({name: float(number.read(WAIT_S)) for name, number in flow.state.items()})
        return Passed(
            rollout_bytes=sum(each.tokens for each in facts["policy.generate"]) * TOKEN_BYTES,
            counted_bytes=traffic.sent_bytes + traffic.read_bytes - counted,
            socket_bytes=socket_bytes() - sockets,
            mapped_bytes=mapped_bytes() - mapped,
            seconds=time.perf_counter() - began,
        )

    return step


def socket_bytes() -> int:
    """Return the bytes sent and received by the open TCP connections of this process; Linux."""
    total = 0
    for handle in Path("/proc/self/fd").iterdir():
        if not handle.is_socket():
            continue
        try:
            with socket.socket(fileno=os.dup(int(handle.name))) as each:
                known = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:  # not of TCP
            continue
        total += sum(struct.unpack_from("QQ", known, 120))  # bytes_acked, bytes_received
    return total


def mapped_bytes() -> int:
    """Return the bytes of shared memory that this process has read or written; Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))


@contextmanager
def verl(python: str | None) -> Iterator[Callable[[str], None] | None]:
    """Start verl in its own process; yield a function that runs a command there and waits, or None."""
    if python is None:
        yield None
        return
    script = Path(__file__).parent / "peers" / "verl_controller.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment.pop("PYTHONPATH", None)
    with subprocess.Popen(
        [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdin and child.stdout

        def answered() -> None:
            for line in child.stdout or ():
                if line.startswith(MARK):
                    return
            raise SystemExit(f"verl's process ended: {child.wait()}")

        def ask(what: str) -> None:
            assert child.stdin
            child.stdin.write(what + "\n")
            child.stdin.flush()
            answered()

        answered()
        yield ask
        child.stdin.close()


def report(rows: list[str], passed: Passed, rounds: int) -> str:
    """Return the whole page."""
    shown = " ".join(["python benchmarks/ranks/controller.py", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {version('torch')}, ray {version('ray')}"
    through = {
        "calls, arguments and results, as the backend counts them": passed.counted_bytes,
        "all its TCP connections, as the kernel counts them": passed.socket_bytes,
        "memory of the object store that it looked at": passed.mapped_bytes,
    }
    return "\n".join(
        [
            "# The controller against bare Ray",
            "",
            f"`{shown}`, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, {versions}. Medians of "
            f"{rounds} rounds, least and most in brackets.",
            "",
            "| what | ours | against | theirs | ratio |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"A step of PPO on two pools of {RANKS} ranks, roles that follow a script, "
            f"{passed.rollout_bytes / 2**20:.1f} MiB of rollouts, {passed.seconds:.1f} s:",
            "",
            "| through the controller's process | KiB |",
            "|---|---|",
            *(f"| {name} | {size / 2**10:.0f} |" for name, size in through.items()),
            "",
        ]
    )


if __name__ == "__main__":
    main()
