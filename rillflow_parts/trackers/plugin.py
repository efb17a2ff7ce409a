"""Plugin: attach trackers to runs, and ``rillflow track`` to the command line. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.arguments import run_argument, set_argument
from rillflow.cli.failure import DONE, FAILED
from rillflow.runs.formatting import visible

if TYPE_CHECKING:
    from rillflow.app.any_recipe import AnyRecipe
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.runs.observers import ObservedRun, Observer


def track(arguments: argparse.Namespace) -> int:
    """``rillflow track``: send what a run's trackers do not have; return 1 if something is left."""
    from rillflow_parts.trackers.track import track as tracked

    has_all = tracked(
        arguments.run, arguments.tracker, arguments.set, lambda line: print(visible(line), flush=True)
    )
    return DONE if has_all else FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``track``."""
    run_argument(parser)
    told = "wandb, tensorboard, mlflow or a name of your own; left out, the trackers of the run's recipe"
    parser.add_argument("tracker", nargs="?", metavar="TRACKER", help=told)
    set_argument(parser, "a setting of the tracker, such as project=NAME; may be repeated")


def look(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Check that the trackers of a recipe can start."""
    from rillflow_parts.trackers.checks import look_at_trackers

    look_at_trackers(facts, report)


def observers(run: ObservedRun) -> Sequence[Observer]:
    """Return the trackers of a run; none if its recipe names none."""
    from rillflow_parts.trackers.checks import trackers_of
    from rillflow_parts.trackers.process import Trackers

    named = trackers_of(run.recipe).named
    return [Trackers(run.path, named, run.base, run.say)] if named else []


PLUGIN = Plugin(
    commands={
        "track": Command(
            help=PARTS["trackers"]["track"], run=track, add_arguments=add_arguments, outlives_output=True
        )
    },
    sections={"run.trackers": "rillflow_parts.trackers.config:TrackersConfig"},
    may_change=["run.trackers"],
    look=look,
    observers=observers,
)
