"""Main: the arguments of every command, and the only place where errors become exit codes.

    argv ─ parser ─> command ─> its function ─┬─ returns ──────────> its exit code
                                              └─ raises ─ failure ─> what, why, fix on stderr; 1, 2 or 130

Importing this loads little more than the standard library; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rillflow import __version__
from rillflow.app import plugins
from rillflow.app.plugins import Command
from rillflow.cli import commands
from rillflow.cli.failure import FAILED, explain_failure
from rillflow.errors import ConfigError, Signalled
from rillflow.runs.formatting import visible

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm

EPILOG = "exit codes: 0 done, 1 failed on the way, 2 cannot be done and nothing was started, 130 interrupted"


def main(argv: Sequence[str] | None = None, algorithms: Sequence[Algorithm] = ()) -> int:
    """Run one command and return the exit code.

    Args:
        argv: words of the command; None for those of the process.
        algorithms: custom algorithms that a recipe may name.

    Example:
        raise SystemExit(main(algorithms=[ALGORITHM]))      # at the end of a file of yours
    """
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
    try:
        with _ended_by_signals():
            code = choices[arguments.command].run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output went away; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  a supervision boundary
        return explain_failure(error, debug=arguments.debug)


class _Visible(logging.Formatter):
    """Formatter that shows control characters, which an error may contain from a model's text."""

    def format(self, record: logging.LogRecord) -> str:
        """See the library."""
        return visible(super().format(record))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end a command in the same way; a run handles both itself once it starts."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Signalled

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    replaced = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, before[number])


def _parsed(
    words: Sequence[str], known: argparse.Namespace, choices: Mapping[str, Command]
) -> argparse.Namespace:
    """Parse the arguments; accept a prompt that argparse leaves over because options precede it."""
    parser = build_parser(choices)
    arguments, left = parser.parse_known_args(words, known)
    is_asked = arguments.command == "ask" and arguments.prompt is None
    match left:
        case ["--", prompt] | [prompt] if is_asked and (len(left) == 2 or prompt[:1] != "-"):
            arguments.prompt = prompt
        case [_, *_] if not choices[arguments.command].ignores_unknown:
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


def recipe_arguments(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the arguments of a command that reads a recipe."""
    count = {"nargs": "?"} if is_optional else {}
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe's TOML file", **count)  # type: ignore[arg-type]
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting, such as policy.lr=1e-5; again for more; the value none takes a setting away",
    )
    parser.add_argument("--dir", metavar="DIR", help="the run directory, as --set run.dir=DIR")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    parser.add_argument("--all", action="store_true", help="show every setting, not only those given")
    told = (
        "also try a step's passes without numbers: what every rank will hold, by role and phase (loads torch)"
    )
    parser.add_argument("--memory", action="store_true", help=told)
    told = "run nothing that the recipe names (functions, an engine, a server's Python), and say what that is"
    parser.add_argument("--no-code", action="store_true", help=told)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    told = "begin anew: an older run in the directory is moved aside, not deleted"
    parser.add_argument("--fresh", action="store_true", help=told)
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    placed = parser.add_mutually_exclusive_group()
    placed.add_argument(
        "--plan", type=Path, metavar="FILE", help="place roles as a plan of rillflow plan does"
    )
    told = "predict the seconds of the recipe's own placement on the devices of a cluster's TOML file"
    placed.add_argument("--cluster", type=Path, metavar="FILE", help=told)
    told = "a run whose rows give the lengths for --cluster; assumed if left out"
    parser.add_argument("--lengths", type=Path, metavar="RUN", help=told)


def _graph_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    forms = ("text", "mermaid", "json")
    parser.add_argument("--format", choices=forms, default="text", help="how it is drawn (text)")


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _report_arguments(parser)
    add("prompt", nargs="?", metavar="PROMPT", help="left out: one prompt a line of the input")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--max-tokens", type=int, metavar="N", help="longest answer; as in training if left out")
    chat = parser.add_mutually_exclusive_group()
    chat.add_argument("--system", metavar="TEXT", help="the system message before the prompt")
    told = "ask a conversation: a JSON list of messages, or a message a line; - for standard input"
    chat.add_argument("--messages", type=Path, metavar="FILE", help=told)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=int, metavar="STEP", help="the newest if left out")
    which.add_argument("--best", action="store_true", help="the one with the highest held-out mean reward")


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_MODEL", help="a run, or a model's directory")
    add("--against", type=Path, metavar="OTHER", help="a run or model whose answers it is compared with")
    by = parser.add_mutually_exclusive_group()
    told = "a judge's directory, or the run that trained it; left out, the task's function compares"
    by.add_argument("--judge", type=Path, metavar="DIR", help=told)
    by.add_argument("--reward-model", type=Path, metavar="DIR", help="a reward model's instead")
    told = "whose held-out prompts are answered; the first run's if left out"
    add("--recipe", type=Path, metavar="FILE", help=told)
    add("--problems", type=_count, metavar="N", help="prompts at most; all that are held out if left out")
    add("--samples", type=_count, default=1, metavar="N", help="answers of each model to a prompt (1)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--out", type=Path, metavar="FILE", help="where numbers and pairs are written as JSON; a new file")


def _count(text: str) -> int:
    """Return a whole number above 0."""
    if not (text.isdecimal() and text.isascii() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of one or more")
    return int(text)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="MODEL_OR_RUN", help="a model's directory, or a run, which is followed")
    add("--port", type=int, default=8000, metavar="N", help="of the loopback device; 0 for a free one (8000)")
    told = "holds the token that requests bear; made where it is not there. Left out: a new one is shown"
    add("--token-file", type=Path, metavar="FILE", help=told)
    add("--max-rows", type=int, default=64, metavar="N", help="rows that run at once (64)")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")


def _timeline_arguments(parser: argparse.ArgumentParser) -> None:
    _report_arguments(parser)
    told = "such as 5-8, or 5; those of the last phase if left out"
    parser.add_argument("--steps", type=_steps, metavar="A-B", help=told)
    told = "where to write them as a trace for Perfetto or chrome://tracing; a new file"
    parser.add_argument("--out", type=Path, metavar="FILE", help=told)


def _steps(text: str) -> tuple[int, int]:
    """Return the first and the last step. Example: ``_steps("5-8") == (5, 8)``."""
    first, _, last = text.partition("-")
    ends = (first, last if "-" in text else first)
    if not all(end.isdecimal() and end.isascii() for end in ends) or int(ends[0]) > int(ends[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps, such as 5-8, or 5")
    return int(ends[0]), int(ends[1])


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="such as RUN/bundles/step-000012")


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    told = "an adapter's directory, or a run, whose last policy it is"
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help=told)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the model is written")
    types = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=types, default="float32", help="of its weights (float32)")
    told = (
        "of an int8 base: trained, what its whole numbers stand for (the default), or full, the directory's"
    )
    parser.add_argument("--base", choices=("trained", "full"), default="trained", help=told)


def known_commands(words: Sequence[str]) -> dict[str, Command]:
    """Return the commands that an invocation may name.

    One of the package's own commands is known alone: it runs without loading a plugin, also a broken one.
    """
    first = words[0] if words else ""
    return {first: COMMANDS[first]} if first in COMMANDS else {**COMMANDS, **plugins.commands(COMMANDS)}


COMMANDS: Mapping[str, Command] = {
    "run": Command(
        help="run a recipe to its end, or go on with it from its last checkpoint",
        run=commands.run,
        add_arguments=_run_arguments,
    ),
    "check": Command(
        help="say everything about a recipe that can be known before it runs",
        run=commands.check,
        add_arguments=_check_arguments,
    ),
    "graph": Command(
        help="draw the stages of a recipe's phases and the fields that flow between them",
        run=commands.graph,
        add_arguments=_graph_arguments,
    ),
    "ask": Command(
        help="let the trained model of a run answer a prompt",
        run=commands.ask,
        add_arguments=_ask_arguments,
    ),
    "evaluate": Command(
        help="score a model's answers to held-out prompts, or compare them with another model's",
        run=commands.evaluate,
        add_arguments=_evaluate_arguments,
    ),
    "serve": Command(
        help="answer by OpenAI's protocol with a model, or with a run's newest checkpoint",
        run=commands.serve,
        add_arguments=_serve_arguments,
    ),
    "report": Command(
        help="write the report of a run again",
        run=commands.report,
        add_arguments=_report_arguments,
    ),
    "timeline": Command(
        help="say where the ranks of a run waited, and for whom; write its steps as a trace",
        run=commands.timeline,
        add_arguments=_timeline_arguments,
    ),
    "verify": Command(
        help="compare everything in a run directory with the digests that the run wrote",
        run=commands.verify,
        add_arguments=_report_arguments,
    ),
    "replay": Command(
        help="make an update that a run left out again, and say where its first odd number is",
        run=commands.replay,
        add_arguments=_replay_arguments,
    ),
    "merge-adapter": Command(
        help="put an adapter into its base's weights, as a model of its own",
        run=commands.merge_adapter,
        add_arguments=_merge_arguments,
    ),
    "doctor": Command(
        help="look at this machine and say what would be in the way",
        run=commands.doctor,
        add_arguments=lambda _: None,
    ),
}
"""The package's own commands by name."""


if __name__ == "__main__":
    raise SystemExit(main())
