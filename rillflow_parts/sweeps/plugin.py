"""Plugin: attach ``rillflow sweep`` to the command line. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.failure import DONE, FAILED
from rillflow.runs.formatting import visible


def sweep(arguments: argparse.Namespace) -> int:
    """``rillflow sweep``: run a sweep's runs, and print its table; return 1 if a run failed."""
    from rillflow_parts.sweeps.places import jobs_of
    from rillflow_parts.sweeps.plan import load_sweep
    from rillflow_parts.sweeps.sweep import Sweep
    from rillflow_parts.sweeps.table import RunState, as_text

    plan = load_sweep(arguments.sweep, arguments.algorithms)
    with jobs_of(plan, arguments.typed) as jobs:
        started = Sweep(plan, jobs, lambda line: print(visible(line), flush=True))
        cases = started.table() if arguments.table else started.run()
    print(visible(f"\n{as_text(cases)}\n\ntable: {plan.path / 'table.json'}, table.csv"))
    failed = any(each.state is RunState.FAILED for case in cases for each in case.results)
    return FAILED if failed else DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sweep``."""
    parser.add_argument("sweep", type=Path, metavar="FILE", help="a sweep's TOML file")
    parser.add_argument("--table", action="store_true", help="show the table so far, and run nothing")


PLUGIN = Plugin(
    commands={
        "sweep": Command(
            help=PARTS["sweeps"]["sweep"], run=sweep, add_arguments=add_arguments, outlives_output=True
        )
    }
)
