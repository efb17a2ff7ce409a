"""Ray's errors: turn each into the rank's loss, its reason and advice, or into the error that caused it."""

from __future__ import annotations

import re
from typing import NoReturn

from ray import exceptions as faults

from rillflow.workers import nodes
from rillflow.workers.collectives import Stranded

_RUN_AGAIN = "run the same command again: it resumes from the last checkpoint"
_NODE_GONE = re.compile(r"its node|the node|node (died|has died|was)|unreachable", re.IGNORECASE)
"""What Ray writes if a process died with its node."""


def loss(error: faults.RayError) -> tuple[str, str, str]:
    """Return what happened to a rank, why, and what to do, from an error of Ray itself."""
    told = [line.strip() for line in str(error).splitlines() if line.strip()] or ["Ray gives no reason"]
    node, process = (re.search(pattern, str(error)) for pattern in (r"ip[=:]\s*([\w.:]+)", r"pid: (\d+)"))
    on = f" on node {node[1]}" if node else ""
    if isinstance(error, faults.OutOfMemoryError):
        what = "was killed because its node ran out of memory"
        fix = "use smaller micro-batches or fewer ranks per node, or raise RAY_memory_usage_threshold"
        return what, f"{type(error).__name__}: {told[0]}", fix
    if "creation task" in told[0]:
        return f"could not be started{on}", told[-1], nodes.ALIKE
    if isinstance(error, faults.ActorUnavailableError):
        why = f"Ray has lost its connection to the process{on}, and the call with it"
        return "cannot be reached", why, f"check the network and ray status; {_RUN_AGAIN}"
    is_dead = isinstance(error, faults.RayActorError | faults.WorkerCrashedError)
    is_node = isinstance(error, faults.NodeDiedError | faults.LocalRayletDiedError)
    is_node |= is_dead and "worker process" not in str(error) and _NODE_GONE.search(told[-1]) is not None
    if is_node:
        why = f"its node{f' {node[1]}' if node else ''} has left the cluster: {told[-1]}"
        return "has died", why, f"check power, network and ray status of that node; {_RUN_AGAIN}"
    if is_dead:
        name = f"process {process[1]}{on}" if process else "its process"
        why = f"{name} ended without an error of Python: it was killed, or it crashed"
        fix = "read the end of its output; dmesg on its node lists processes that were killed for memory"
        return "has died", why, fix
    if isinstance(error, faults.ObjectLostError | faults.ObjectStoreFullError | faults.OutOfDiskError):
        fix = "check the cluster's nodes and the free space of /dev/shm and /tmp on them"
        return "has lost its results", f"{type(error).__name__}: {told[0]}", fix
    return "has failed", f"{type(error).__name__}: {told[0]}", _RUN_AGAIN


def raise_cause(error: faults.RayTaskError) -> NoReturn:
    """Raise the original error of a call, no matter how many ranks have passed it on."""
    cause: object = error
    while isinstance(cause, faults.RayTaskError):
        cause = cause.cause
    if isinstance(cause, Exception) and not isinstance(cause, faults.RayError):
        raise cause
    what, why, fix = loss(cause if isinstance(cause, faults.RayError) else error)
    raise Stranded(f"a rank {what}", why=why, fix=fix) from None
