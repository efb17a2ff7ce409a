"""Main: the arguments of every command, and the only place where errors become exit codes.

    argv ─ parser ─> command ─> its function ─┬─ returns ──────────> its exit code
                                              └─ raises ─ failure ─> what, why, fix on stderr; 1, 2 or 128+N

Importing this loads little more than the standard library; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow import __version__
from rillflow.app import plugins
from rillflow.app.plugins import Command
from rillflow.cli import commands
from rillflow.cli.arguments import recipe_arguments
from rillflow.cli.failure import explain_failure, explain_lost_output
from rillflow.errors import ConfigError, Signalled
from rillflow.runs.busy_machine import share_cores
from rillflow.runs.ending_signals import RepeatedSignals, handled
from rillflow.runs.formatting import visible
from rillflow.runs.standard_streams import StandardStreams, guarded_streams

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm

EPILOG = "exit codes: 0 done, 1 failed, 2 refused before the start, 130 interrupted, 128+N by signal N"


def main(argv: Sequence[str] | None = None, algorithms: Sequence[Algorithm] = ()) -> int:
    """Run one command and return the exit code.

    Args:
        argv: words of the command; None for those of the process.
        algorithms: custom algorithms that a recipe may name.

    Example:
        raise SystemExit(main(algorithms=[ALGORITHM]))      # at the end of a file of yours
    """
    share_cores()
    atexit.register(gc.freeze)  # or the interpreter searches the modules of torch for cycles before it ends
    with guarded_streams(goes_on=False) as streams:
        return _ended(argv, algorithms, streams)


def _ended(argv: Sequence[str] | None, algorithms: Sequence[Algorithm], streams: StandardStreams) -> int:
    """Run one command to its end; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    typed = (*(("python", sys.argv[0]) if algorithms else ("rillflow",)), *words)
    try:
        choices = known_commands(words)
        arguments = _parsed(words, argparse.Namespace(algorithms=algorithms, typed=typed), choices)
    except ConfigError as error:  # a plugin that cannot be loaded
        return explain_failure(error, debug=False)
    level = logging.DEBUG if arguments.debug else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    command = choices[arguments.command]
    if command.outlives_output:
        streams.go_on()
    try:
        with handled(_end_by_signal(RepeatedSignals())):
            code = command.run(arguments)
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  a supervision boundary
        if isinstance(error, OSError) and error is streams.failure:
            return explain_lost_output(error)
        return explain_failure(error, debug=arguments.debug)


class _Visible(logging.Formatter):
    """Formatter that shows control characters, which an error may contain from a model's text."""

    def format(self, record: logging.LogRecord) -> str:
        """See the library."""
        return visible(super().format(record))


def _end_by_signal(repeated: RepeatedSignals) -> Callable[[int], None]:
    """Return a function that ends a command by a signal; a run handles signals itself once it starts."""
    received = list[int]()

    def end(number: int) -> None:
        ends_at_once = repeated.add(number)
        if received and not ends_at_once:  # the command ends already
            return
        received.append(number)
        raise Signalled(number)

    return end


def _parsed(
    words: Sequence[str], known: argparse.Namespace, choices: Mapping[str, Command]
) -> argparse.Namespace:
    """Parse the arguments; accept a last one that argparse leaves over because options precede it."""
    parser = build_parser(choices)
    arguments, left = parser.parse_known_args(words, known)
    command = choices[arguments.command]
    lacks_last = command.last and vars(arguments)[command.last] is None
    match left:
        case ["--", text] | [text] if lacks_last and (len(left) == 2 or text[:1] != "-"):
            vars(arguments)[command.last] = text
        case [_, *_] if not command.ignores_unknown:
            parser.error(f"unrecognized arguments: {' '.join(left)}")
    return arguments


def build_parser(choices: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser of some commands."""
    parser = argparse.ArgumentParser(
        prog="rillflow",
        description="RL post-training of language models, written as one dataflow.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"rillflow {__version__}")
    words = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in choices.items():
        inner = words.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(inner)
        inner.add_argument("--debug", action="store_true", help="show log messages and tracebacks")
    return parser


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    parser.add_argument("--all", action="store_true", help="show every setting, not only the given ones")
    told = "also report each rank's peak memory by role and phase, from a step on fake tensors (loads torch)"
    parser.add_argument("--memory", action="store_true", help=told)
    told = "run no code that the recipe names (functions, an engine, a server's Python), and list that code"
    parser.add_argument("--no-code", action="store_true", help=told)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    told = "start from the beginning; an older run in the directory is renamed, not deleted"
    parser.add_argument("--fresh", action="store_true", help=told)
    parser.add_argument("--quiet", action="store_true", help="show only errors")
    placed = parser.add_mutually_exclusive_group()
    placed.add_argument(
        "--plan", type=Path, metavar="FILE", help="place the roles by a plan file that rillflow plan wrote"
    )
    told = "predict the seconds of the recipe's own placement on the devices of a cluster's TOML file"
    placed.add_argument("--cluster", type=Path, metavar="FILE", help=told)
    told = "run whose row lengths --cluster uses; left out, lengths are assumed"
    parser.add_argument("--lengths", type=Path, metavar="RUN", help=told)


def _graph_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    forms = ("text", "mermaid", "json")
    parser.add_argument("--format", choices=forms, default="text", help="output format (default: text)")


def known_commands(words: Sequence[str]) -> dict[str, Command]:
    """Return the commands that an invocation may name.

    A command of the package itself, or of a part, is returned alone: it then runs without loading any plugin.
    """
    first = words[0] if words else ""
    alone = COMMANDS.get(first) or plugins.part_command(first)
    if alone is not None:
        return {first: alone}
    known = {**COMMANDS, **plugins.commands(COMMANDS)}
    if first and not first.startswith("-") and first not in known:
        plugins.require_no_broken(first)
    return known


COMMANDS: Mapping[str, Command] = {
    "run": Command(
        help="run a recipe to its end, or resume it from its last checkpoint",
        run=commands.run,
        add_arguments=_run_arguments,
        outlives_output=True,
    ),
    "check": Command(
        help="report everything about a recipe that can be known before it runs",
        run=commands.check,
        add_arguments=_check_arguments,
    ),
    "graph": Command(
        help="draw the stages of a recipe's phases and the fields that flow between them",
        run=commands.graph,
        add_arguments=_graph_arguments,
    ),
}
"""The package's own commands by name."""


if __name__ == "__main__":
    raise SystemExit(main())
