"""Plugin: attach ``rillflow watch`` to the command line. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.failure import DONE
from rillflow.errors import ConfigError, install_package


def watch(arguments: argparse.Namespace) -> int:
    """``rillflow watch``: serve a local page of runs until interrupted."""
    try:
        from rillflow_parts.watch.server import watch as watch_runs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed",
            why="rillflow watch needs an optional package",
            fix=install_package("service"),
        ) from None
    told = {"port": arguments.port, "token_file": arguments.token_file, "cache": arguments.cache}
    watch_runs(arguments.runs, **told, announce=lambda line: print(line, flush=True))
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``watch``."""
    add = parser.add_argument
    told = "run directories, or folders of runs"
    add("runs", type=Path, nargs="+", metavar="RUNS", help=told)
    told = "port on the loopback device; 0 picks a free one (default: 8100)"
    add("--port", type=int, default=8100, metavar="N", help=told)
    told = "file with the page's token; created if missing. Left out, a new token is in the printed address"
    add("--token-file", type=Path, metavar="FILE", help=told)
    told = "folder of the indexes that searches use (default: ~/.cache/rillflow/watch)"
    add("--cache", type=Path, metavar="DIR", help=told)


PLUGIN = Plugin(
    commands={
        "watch": Command(
            help=PARTS["watch"]["watch"], run=watch, add_arguments=add_arguments, outlives_output=True
        )
    }
)
