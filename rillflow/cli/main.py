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
from rillflow.cli.failure import explain_failure, explain_lost_output
from rillflow.errors import ConfigError, Signalled
from rillflow.runs.ending_signals import RepeatedSignals, handled
from rillflow.runs.formatting import visible
from rillflow.runs.standard_streams import StandardStreams, guarded_streams
from rillflow.workers.busy_machine import share_cores

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
    told = "change a setting, such as policy.lr=1e-5; may be repeated; the value none removes a setting"
    _set_argument(parser, told)
    parser.add_argument("--dir", metavar="DIR", help="the run directory; short for --set run.dir=DIR")


def _set_argument(parser: argparse.ArgumentParser, told: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=told)


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


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _report_arguments(parser)
    add("prompt", nargs="?", metavar="PROMPT", help="left out, each line of standard input is a prompt")
    _temperature_argument(parser)
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer; left out, as in training")
    chat = parser.add_mutually_exclusive_group()
    chat.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    told = "answer a conversation: a JSON list of messages, or one message per line; - is standard input"
    chat.add_argument("--messages", type=Path, metavar="FILE", help=told)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="step of the checkpoint; left out, the newest"
    )
    which.add_argument("--best", action="store_true", help="checkpoint with the highest held-out mean reward")


def _temperature_argument(parser: argparse.ArgumentParser) -> None:
    told = "sampling temperature; 0 (default) is greedy"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=told)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_MODEL", help="a run, or a model's directory")
    add("--against", type=Path, metavar="OTHER", help="run or model to compare with")
    by = parser.add_mutually_exclusive_group()
    told = "directory of a judge, or the run that trained it; left out, the task's function scores"
    by.add_argument("--judge", type=Path, metavar="DIR", help=told)
    by.add_argument(
        "--reward-model",
        type=Path,
        metavar="DIR",
        help="directory of a reward model, or the run that trained it",
    )
    told = "recipe with the held-out prompts; left out, the first run's"
    add("--recipe", type=Path, metavar="FILE", help=told)
    add("--problems", type=_count, metavar="N", help="most prompts to use; left out, all held-out prompts")
    add(
        "--samples", type=_count, default=1, metavar="N", help="answers of each model per prompt (default: 1)"
    )
    _temperature_argument(parser)
    add("--out", type=Path, metavar="FILE", help="new JSON file for the results and the pairs")


def _count(text: str) -> int:
    """Return a whole number above 0."""
    if not (text.isdecimal() and text.isascii() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="MODEL_OR_RUN", help="a model's directory, or a run to serve and follow")
    add(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port on the loopback device; 0 picks a free one (default: 8000)",
    )
    told = "file with the bearer token; created if missing. Left out, a new token is printed"
    add("--token-file", type=Path, metavar="FILE", help=told)
    add("--max-rows", type=int, default=64, metavar="N", help="most rows that run at once (default: 64)")
    told = "let clients of the Tinker API train adapters on the model (plugin training_service)"
    add("--train", action="store_true", help=told)
    told = "with --train, directory of the clients' checkpoints (default: runs/training-service)"
    add("--checkpoints", type=Path, metavar="DIR", help=told)


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    told = "run directories, or folders of runs"
    add("runs", type=Path, nargs="+", metavar="RUNS", help=told)
    told = "port on the loopback device; 0 picks a free one (default: 8100)"
    add("--port", type=int, default=8100, metavar="N", help=told)
    told = "file with the page's token; created if missing. Left out, a new token is in the printed address"
    add("--token-file", type=Path, metavar="FILE", help=told)
    told = "folder of the indexes that searches use (default: ~/.cache/rillflow/watch)"
    add("--cache", type=Path, metavar="DIR", help=told)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", type=Path, metavar="FILE", help="a sweep's TOML file")
    parser.add_argument("--table", action="store_true", help="show the table so far, and run nothing")


def _track_arguments(parser: argparse.ArgumentParser) -> None:
    _report_arguments(parser)
    told = "wandb, tensorboard, mlflow or a name of your own; left out, the trackers of the run's recipe"
    parser.add_argument("tracker", nargs="?", metavar="TRACKER", help=told)
    _set_argument(parser, "a setting of the tracker, such as project=NAME; may be repeated")


def _timeline_arguments(parser: argparse.ArgumentParser) -> None:
    _report_arguments(parser)
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


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    told = "a run directory; or the bundle of a skipped update, such as RUN/bundles/step-000012"
    parser.add_argument("source", type=Path, metavar="RUN_OR_BUNDLE", help=told)
    told = "last step to re-run, from the newest checkpoint before it; left out, every step from the start"
    parser.add_argument("--step", type=_count, metavar="N", help=told)
    _set_argument(parser, "change a setting for the replay, such as placement.backend=ray; may be repeated")


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    told = "directory of an adapter, or a run whose newest policy is an adapter"
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help=told)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the new model")
    types = ("float32", "bfloat16")
    parser.add_argument(
        "--dtype", choices=types, default="float32", help="dtype of the weights (default: float32)"
    )
    told = "weights of a quantised base: trained, dequantised ones (default), or full, the directory's own"
    parser.add_argument("--base", choices=("trained", "full"), default="trained", help=told)


def known_commands(words: Sequence[str]) -> dict[str, Command]:
    """Return the commands that an invocation may name.

    A command of the package itself is returned alone: it then runs without loading any plugin.
    """
    first = words[0] if words else ""
    return {first: COMMANDS[first]} if first in COMMANDS else {**COMMANDS, **plugins.commands(COMMANDS)}


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
    "ask": Command(
        help="answer prompts with the trained model of a run",
        run=commands.ask,
        add_arguments=_ask_arguments,
    ),
    "evaluate": Command(
        help="score a model's answers to held-out prompts, or compare them with another model's",
        run=commands.evaluate,
        add_arguments=_evaluate_arguments,
    ),
    "serve": Command(
        help="serve a model, or a run's newest checkpoint, over OpenAI's protocol",
        run=commands.serve,
        add_arguments=_serve_arguments,
        outlives_output=True,
    ),
    "watch": Command(
        help="serve a local page of runs: curves, rollouts, settings",
        run=commands.watch,
        add_arguments=_watch_arguments,
        outlives_output=True,
    ),
    "report": Command(
        help="write the report of a run again",
        run=commands.report,
        add_arguments=_report_arguments,
    ),
    "timeline": Command(
        help="show how long a run's ranks waited and for which stage; write the steps as a trace",
        run=commands.timeline,
        add_arguments=_timeline_arguments,
    ),
    "sweep": Command(
        help="run a recipe over seeds and a small grid of settings, and rank the cases",
        run=commands.sweep,
        add_arguments=_sweep_arguments,
        outlives_output=True,
    ),
    "track": Command(
        help="send a run to Weights & Biases, TensorBoard, MLflow or a tracker of your own",
        run=commands.track,
        add_arguments=_track_arguments,
        outlives_output=True,
    ),
    "verify": Command(
        help="compare everything in a run directory with the digests that the run wrote",
        run=commands.verify,
        add_arguments=_report_arguments,
    ),
    "replay": Command(
        help="re-run recorded steps of a run, or a skipped update, and name the first value that differs",
        run=commands.replay,
        add_arguments=_replay_arguments,
    ),
    "merge-adapter": Command(
        help="merge an adapter into the weights of its base and write a whole model",
        run=commands.merge_adapter,
        add_arguments=_merge_arguments,
    ),
    "doctor": Command(
        help="check this machine for problems that would stop or slow down a run",
        run=commands.doctor,
        add_arguments=lambda _: None,
    ),
}
"""The package's own commands by name."""


if __name__ == "__main__":
    raise SystemExit(main())
