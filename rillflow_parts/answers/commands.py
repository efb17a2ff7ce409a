"""Commands: ``ask`` and ``evaluate``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rillflow.cli.arguments import count, run_argument, temperature_argument
from rillflow.cli.failure import DONE, FAILED, explain_failure
from rillflow.errors import ConfigError, RillflowError
from rillflow.runs.formatting import visible


def ask(arguments: argparse.Namespace) -> int:
    """``rillflow ask``: answer one prompt, one conversation, or one prompt per line of input."""
    from rillflow.runs.reader import best_step, require_run

    require_run(arguments.run)
    if arguments.messages is not None and arguments.prompt is not None:
        raise ConfigError(
            "PROMPT cannot be combined with --messages",
            why="the messages are the whole conversation",
            fix="add the prompt to the file as its last message, or remove one of the two",
        )
    from rillflow_parts.answers.ask import Respondent, read_messages

    question = arguments.prompt if arguments.messages is None else read_messages(arguments.messages)
    respondent = Respondent(
        arguments.run,
        step=best_step(arguments.run) if arguments.best else arguments.checkpoint,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        system=arguments.system,
        chat=arguments.messages is not None,
    )
    if note := respondent.lack(question or ""):
        print(f"note: {note}", file=sys.stderr)
    if question is not None:
        print(visible(respondent.answer(question)))
        return DONE
    code = DONE
    for prompt in _typed():
        try:
            print(visible(respondent.answer(prompt)), flush=True)
        except RillflowError as error:  # a prompt that fails does not end the conversation
            explain_failure(error, debug=arguments.debug)
            code = FAILED
    return code


def evaluate(arguments: argparse.Namespace) -> int:
    """``rillflow evaluate``: score answers to held-out prompts, or compare them with another model's."""
    from rillflow.app.recipe import load_recipe
    from rillflow.app.recorded_recipe import recipe_of
    from rillflow.runs import layout
    from rillflow.runs.durable import replace
    from rillflow.runs.json_lines import encode
    from rillflow.runs.run_data import load as load_run
    from rillflow_parts.answers.contest import Asking, contest
    from rillflow_parts.answers.contest_lines import contest_lines

    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(
            f"--out {arguments.out} already exists",
            why="existing files are never overwritten",
            fix="choose another name",
        )
    runs = [each for each in (arguments.source, arguments.against) if each and layout.is_run_directory(each)]
    if arguments.recipe is None and not runs and not Path(arguments.source).exists():
        raise ConfigError(
            f"there is no run {arguments.source}",
            why="the path does not exist, and no --recipe names the prompts for a model of the hub",
            fix="correct the path, or give --recipe FILE to evaluate a model by its name",
        )
    if arguments.recipe is None and not runs:
        raise ConfigError(
            f"{arguments.source} is not a run directory",
            why="the prompts are the held-out prompts of a run or a recipe",
            fix="give --recipe FILE to choose the prompts",
        )
    known = arguments.algorithms
    loaded = (
        load_recipe(arguments.recipe, (), known) if arguments.recipe else recipe_of(load_run(runs[0]), known)
    )
    names = ("problems", "samples", "temperature", "judge", "reward_model")
    asking = Asking(loaded=loaded, **{name: getattr(arguments, name) for name in names})
    found = contest(arguments.source, arguments.against, asking)
    if arguments.out is not None:  # first: nobody may read the lines to their end
        replace(arguments.out, [encode(found)])
        print(f"wrote {arguments.out}", file=sys.stderr)
    print("\n".join(contest_lines(found)))
    return DONE


def ask_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ask``."""
    add = parser.add_argument
    run_argument(parser)
    add("prompt", nargs="?", metavar="PROMPT", help="left out, each line of standard input is a prompt")
    temperature_argument(parser)
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


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``evaluate``."""
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
    add("--problems", type=count, metavar="N", help="most prompts to use; left out, all held-out prompts")
    add("--samples", type=count, default=1, metavar="N", help="answers of each model per prompt (default: 1)")
    temperature_argument(parser)
    add("--out", type=Path, metavar="FILE", help="new JSON file for the results and the pairs")


def _typed() -> Iterator[str]:
    """Yield prompts from standard input: typed after ``> `` on a terminal, else every non-empty line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if prompt:
            yield prompt
