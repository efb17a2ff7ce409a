"""Commands: ``report`` and ``timeline``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rillflow.cli.arguments import run_argument
from rillflow.cli.failure import DONE
from rillflow.errors import ConfigError


def report(arguments: argparse.Namespace) -> int:
    """``rillflow report``: write a run's report again."""
    from rillflow_parts.report.write import write_report

    print(write_report(arguments.run))
    return DONE


def timeline(arguments: argparse.Namespace) -> int:
    """``rillflow timeline``: show how long ranks waited and for which stage; write the trace of its steps."""
    from rillflow.runs.durable import replace
    from rillflow.runs.json_lines import encode
    from rillflow.runs.run_data import load
    from rillflow_parts.report.measured import measured, measured_lines, trace_of
    from rillflow_parts.report.predicted import compare, render_comparison

    out: Path | None = arguments.out
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise ConfigError(
            f"--out {out}: {'it already exists' if out.exists() else f'there is no folder {out.parent}'}",
            why="a trace is a new file in an existing folder; existing files are never overwritten",
            fix="choose another name" if out.exists() else "create the folder, or choose another",
        )
    data = load(arguments.run)
    found = measured(data, *(arguments.steps or ()))
    if out is not None:  # first: nobody may read the lines to their end
        replace(out, [encode(trace_of(found))])
        print(f"wrote {out}: open it at https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
    print("\n".join(measured_lines(found)))
    compared = compare(data)
    if compared is not None:
        print(f"\n{render_comparison(compared)}")
    return DONE


def timeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``timeline``."""
    run_argument(parser)
    told = "steps, such as 5-8, or 5; left out, the steps of the last phase"
    parser.add_argument("--steps", type=_steps, metavar="A-B", help=told)
    told = "new file for a trace of the steps, for Perfetto or chrome://tracing"
    parser.add_argument("--out", type=Path, metavar="FILE", help=told)


def _steps(text: str) -> tuple[int, int]:
    """Return the first and the last step. Example: ``_steps("5-8") == (5, 8)``."""
    first, _, last = text.partition("-")
    ends = (first, last if "-" in text else first)
    if not all(end.isdecimal() and end.isascii() for end in ends) or int(ends[0]) > int(ends[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps, such as 5-8, or 5")
    return int(ends[0]), int(ends[1])
