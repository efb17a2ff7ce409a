"""Shared paths: check that the nodes of a run's ranks share its directory, and report clocks that are off.

driver writes a mark ─> run directory <─ one rank per node sees it, and writes there too
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.runs.durable import write_error
from rillflow.runs.formatting import duration
from rillflow.workers.awaited import await_replies
from rillflow.workers.backend import Backend, Node, Place, Site
from rillflow_parts.nodes.files import first_places

SEEN_S = 10.0
"""Seconds that a shared disk may take to show a file to another node."""
MENTIONED_S = 1.0
"""Clock offset in seconds above which a note is given."""


def require_shared(run: Path, backend: Backend, deadline_s: float) -> None:
    """Refuse a node that cannot read and write the run directory.

    Args:
        run: the run directory.
        backend: the backend with the ranks.
        deadline_s: seconds that a rank may take to answer.

    Raises:
        RunDirectoryError: a node does not see it, or cannot write there.
    """
    mark = run / f".seen-{time.time_ns()}"
    mark.touch()
    try:
        made = {
            at: backend.submit(at, _require_here, node.address, mark)[0]
            for at, node in first_places(backend.nodes).items()
        }
        await_replies("looking for the run directory", made, backend, deadline_s)
    finally:
        mark.unlink()


def _require_here(site: Site, node: str, mark: Path) -> None:
    del site
    until = time.monotonic() + SEEN_S
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not mark.exists():
        raise RunDirectoryError(
            f"node {node} does not see {mark.parent}, which this machine sees",
            why="all ranks read and write the same checkpoints and rollouts",
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
