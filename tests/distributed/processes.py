"""Processes joined by gloo, for tests that need real ranks without Ray: ``together(4, function, ...)``.

A function of a test module runs as ``function(ranks, *arguments)`` in every process. Its results are returned
in the order of ranks. The first error ends all processes and is raised here with its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 180.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "transformers", "rillflow.models.language_model"]
)


def together(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = DEADLINE_S,
    patience_s: float = DEADLINE_S,
) -> list[Any]:
    """Run ``function(ranks, *arguments)`` on ``size`` processes; return the results in the order of ranks.

    A collective waits ``patience_s`` for a rank.

    Raises:
        AssertionError: a process raised, died, or did not end in time.
    """
    said: Any = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        processes = [
            _CONTEXT.Process(
                target=_run, args=(said, rank, size, meeting, patience_s, function, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collected(said, processes, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(said: Any, processes: list[Any], end: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        try:
            rank, error, result = said.get(timeout=0.5)
        except queue.Empty:
            silent = [rank for rank in range(len(processes)) if rank not in found]
            dead = [rank for rank in silent if not processes[rank].is_alive()]
            assert not dead, f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode}"
            assert time.monotonic() < end, f"ranks {silent} did not end in time"
            continue
        assert error is None, f"rank {rank}:\n{error}"
        found[rank] = result
    return [found[rank] for rank in range(len(processes))]


def _run(
    said: Any,
    rank: int,
    size: int,
    meeting: str,
    patience_s: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from rillflow.workers.collectives import ProcessRanks, Ranks, SingleRank

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        ranks: Ranks = SingleRank()
        if size > 1:
            ranks = ProcessRanks.join(rank, size, FileStore(meeting, size), deadline_s=patience_s)
        said.put((rank, None, function(ranks, *arguments)))
    except BaseException:  # noqa: BLE001  the parent raises it
        said.put((rank, traceback.format_exc(), None))
