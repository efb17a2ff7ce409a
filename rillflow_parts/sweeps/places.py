"""Places: make the jobs of a sweep on this machine or on Ray.

plan ─ on = local ─> processes ─┬─> Jobs
       on = ray ───> actors ────┘
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rillflow.errors import ClusterError, install_package
from rillflow_parts.sweeps.jobs import Jobs, LocalJobs
from rillflow_parts.sweeps.plan import SweepPlan


@contextmanager
def jobs_of(plan: SweepPlan, typed: Sequence[str]) -> Iterator[Jobs]:
    """Return the place that a sweep names, until the block ends.

    Args:
        plan: the sweep.
        typed: the typed command; a program with algorithms of its own runs its recipes too.

    Raises:
        ClusterError: Ray is not installed, or its cluster cannot be used.
    """
    own = [str(Path(sys.argv[0]).absolute())] if typed[:1] == ("python",) else ["-m", "rillflow.cli.main"]
    if plan.config.on == "local":
        yield LocalJobs([sys.executable, *own])
        return
    if find_spec("ray") is None:
        raise ClusterError(
            "the sweep runs on Ray, but Ray is not installed",
            why='its file has on = "ray"',
            fix=f"{install_package('ray')}, or leave on out",
        )
    from rillflow.workers.start import settle

    address = settle(plan.config.address)
    from rillflow_parts.sweeps.ray_commands import RayCommands

    cores = max(max(1, run.recipe.threads) for run in plan.runs)
    with RayCommands(["python", *own], address, cores=cores, at_once=plan.config.at_once) as jobs:
        yield jobs
