"""Shared paths: check that the nodes of a run's ranks share its directory, and report clocks that are off.

driver writes a mark ─> run directory <─ one rank per node sees it, and writes there too
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.runs.durable import write_error
from rillflow.runs.formatting import duration
from rillflow.workers.backend import Backend, Node, Place, Site
from rillflow.workers.pending import await_replies

SEEN_S = 10.0
"""Seconds that a shared disk may take to show a file to another node."""
MENTIONED_S = 1.0
"""Clock offset in seconds above which a note is given."""


def require_shared(run: Path, files: Sequence[Path], backend: Backend, deadline_s: float) -> None:
    """Refuse a node that cannot read and write the run directory, or that lacks a file of the recipe.

    Args:
        run: the run directory.
        files: further files that ranks read: reward functions and models.
        backend: the backend with the ranks.
        deadline_s: seconds that a rank may take to answer.

    Raises:
        RunDirectoryError: a node does not see a file, or cannot write there.
    """
    first = {node.address: at for at, node in backend.nodes.items()}
    mark = run / f".seen-{time.time_ns()}"
    mark.touch()
    try:
        made = {
            at: backend.submit(at, _require_here, node, mark, list(files))[0] for node, at in first.items()
        }
        await_replies("looking for the run directory", made, backend, deadline_s)
    finally:
        mark.unlink()


def _require_here(site: Site, node: str, mark: Path, files: Sequence[Path]) -> None:
    del site
    until = time.monotonic() + SEEN_S
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.1)
    missing = [str(path) for path in (*files, mark) if not path.exists()]
    if missing:
        path = str(mark.parent) if missing == [str(mark)] else missing[0]
        raise RunDirectoryError(
            f"node {node} does not see {path}, which this machine sees",
            why="all ranks read and write the same checkpoints, rollouts and files of the recipe",
            fix="put it on a disk that all nodes share, at one path; --dir chooses the run directory",
        )
    try:
        with tempfile.NamedTemporaryFile(dir=mark.parent, prefix=".node-"):
            pass
    except OSError as error:
        found = write_error(mark.parent, error)
        raise RunDirectoryError(f"on node {node}: {found.what}", why=found.why, fix=found.fix) from error


def clock_notes(nodes: Mapping[Place, Node]) -> list[str]:
    """Return a note on every node whose clock is far off."""
    return [
        f"the clock of node {node.address} is {duration(abs(node.ahead_s))} "
        f"{'ahead of' if node.ahead_s > 0 else 'behind'} this machine's; its times are corrected"
        for node in dict.fromkeys(nodes.values())
        if abs(node.ahead_s) > MENTIONED_S
    ]
