"""Machines: nodes of a Ray cluster on this computer that share only one folder.

    namespaces ─┬─ node 10.77.0.1: its own network, /tmp, /dev/shm, host name ┐ veth pairs
                └─ node 10.77.0.2: the same                                   ┘
    both see: the computer's files, as a container image provides them, and the folder at /mnt

Processes, mounts and links end with the ``with`` block, also after an error. Root is not needed if the system
lets users create namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

SHARED = Path("/mnt")
"""Path of the folder on every node."""
PORT = 6379
_BIN = Path(sys.executable).parent
_ROOT = Path(__file__).parents[2]
"""Root of this checkout, which every node sees."""
_ALONE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "--pid", "--fork"]
_ALONE += ["--mount-proc", "--kill-child"]
_UNTIL_TOLD = ["bash", "-c", "echo up; read"]
"""Init process of the namespaces: reaps its children, and ends when its input does."""
_SET_UP = """
ip link set lo up
hostname {name}
mount --bind {folder} /mnt
mount --bind {root} /media
mount -t tmpfs none /tmp
mkdir -p {root}
mount --bind /media {root}
mount -t tmpfs -o size={shared} none /dev/shm
mkdir /tmp/home
"""


@cache
def why_not() -> str:
    """Return the reason why machines cannot be created here, or an empty text."""
    tried = [*_ALONE, "bash", "-c", "ip link add name v0 type veth peer name v1 && mount -t tmpfs none /mnt"]
    try:
        done = subprocess.run(tried, capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or ("" if done.returncode == 0 else "no namespaces")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node.

    Example:
        machine.run("rillflow", "run", "/mnt/run.toml")
    """

    address: str
    """Address on the nodes' network."""
    pid: int
    """Id of a process in its namespaces."""

    def started(self, *words: str, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
        """Start a command on this node."""
        inside = ["nsenter", "-t", str(self.pid), "-U", "-n", "-m", "-u", "-p", "--preserve-credentials"]
        given = {"PATH": f"{_BIN}:{os.environ['PATH']}", "HOME": "/tmp/home", "OMP_NUM_THREADS": "1"}
        given |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
        given |= {"RAY_worker_niceness": "0", **(env or {})}
        return subprocess.Popen(
            [*inside, *words],
            env={name: value for name, value in given.items() if value},
            cwd="/",
            text=True,
            stderr=subprocess.STDOUT,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **how},
        )

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, code: int = 0, wait_s: float = 240
    ) -> str:
        """Run a command on this node and return its output.

        Raises:
            AssertionError: it ends with another code, or is not done in time; the message has its output,
                and after the time the stack of every thread.
        """
        with self.started(*words, env={"PYTHONFAULTHANDLER": "1", **(env or {})}) as process:
            try:
                said, _ = process.communicate(timeout=wait_s)
            except subprocess.TimeoutExpired:
                for each in psutil.Process(process.pid).children():
                    each.send_signal(signal.SIGABRT)
                said = f"(stopped after {wait_s:.0f} s)\n{process.communicate(timeout=30)[0]}"
        assert process.returncode == code, f"{words} ended with {process.returncode}\n{said}"
        return said


@contextmanager
def machines(folder: Path, *, count: int = 2, shared: Sequence[str] = ()) -> Iterator[list[Machine]]:
    """Create ``count`` nodes without Ray; ``shared`` are the sizes of their /dev/shm."""
    with ExitStack() as stack:
        first = stack.enter_context(_held(_ALONE))
        found = [Machine(address="10.77.0.1", pid=first)]
        first_says = "ip link add name br0 type bridge; ip link set br0 up; ip addr add 10.77.0.1/24 dev br0"
        found[0].run("bash", "-ec", first_says)
        for number in range(2, count + 1):
            inside = ["nsenter", "-t", str(first), "-U", "-m", "-p", "--preserve-credentials"]
            pid = stack.enter_context(_held([*inside, "unshare", "--net", "--mount", "--uts"]))
            found.append(Machine(address=f"10.77.0.{number}", pid=pid))
            link = (
                f"ip link add name v{number} type veth peer name eth0 netns /proc/{number_within(pid)}/ns/net"
            )
            found[0].run("bash", "-ec", f"{link}; ip link set v{number} up master br0")
            found[-1].run("bash", "-ec", f"ip addr add 10.77.0.{number}/24 dev eth0; ip link set eth0 up")
        for number, each in enumerate(found):
            size = shared[number] if number < len(shared) else "1g"
            how = {"name": f"node-{number + 1}", "folder": folder, "root": _ROOT, "shared": size}
            each.run("bash", "-ec", _SET_UP.format(**how))
        yield found


@contextmanager
def _held(command: Sequence[str]) -> Iterator[int]:
    """Create namespaces; yield the id of a process in them."""
    with subprocess.Popen([*command, *_UNTIL_TOLD], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"up\n", f"{command} made no namespaces"
        family = psutil.Process(process.pid).children(recursive=True)
        yield family[-1].pid if family else process.pid
        process.stdin.close()


def number_within(pid: int) -> int:
    """Return a process's id within its namespace."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1])


def start_ray(
    machine: Machine,
    head: Machine | None = None,
    *,
    cpus: int = 1,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.Popen[str]:
    """Start Ray on a node, as the head or joined to a head; the command ends when Ray is up."""
    words = (
        ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if head is None
        else [f"--address={head.address}:{PORT}"]
    )
    words += [f"--node-ip-address={machine.address}", f"--num-cpus={cpus}", "--disable-usage-stats"]
    words += [
        f"--{name.replace('_', '-')}={value}"
        for name, value in {"object_store_memory": 100_000_000, **more}.items()
    ]
    return machine.started("ray", "start", *words, env=env)


def ray_up(machine: Machine, head: Machine | None = None, **how: Any) -> None:
    """Start Ray on a node; up to three tries, because Ray waits only half a minute for a busy machine."""
    for _ in range(3):
        with start_ray(machine, head, **how) as ray:
            said, _ = ray.communicate(timeout=120)
        if "timed out during startup" not in said:
            break
        stop_ray(machine)
    assert ray.returncode == 0, said


def stop_ray(machine: Machine) -> None:
    """Kill everything on a node, like a loss of power."""
    own = Path(f"/proc/{machine.pid}/ns/net").readlink()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if process.pid != machine.pid and Path(f"/proc/{process.pid}/ns/net").readlink() == own:
                process.kill()
