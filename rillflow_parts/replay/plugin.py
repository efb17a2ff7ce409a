"""Plugin: attach ``rillflow replay`` and ``rillflow verify``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.arguments import count, run_argument, set_argument
from rillflow.cli.failure import DONE, FAILED
from rillflow.errors import ConfigError
from rillflow.runs.formatting import visible

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm
    from rillflow_parts.replay.replay import Replayed


def verify(arguments: argparse.Namespace) -> int:
    """``rillflow verify``: check that a run directory is as the run wrote it; return 1 if it is not."""
    from rillflow_parts.replay.verify import verify as verified

    found = verified(arguments.run)
    for name in found.whole:
        print(f"whole    {name}")
    for note in found.pinned:
        print(f"pinned   {note}")
    for told in found.lost:
        print(f"lost     {told}")
    for each in found.damaged:
        print(f"damaged  {each}")
    return FAILED if found.damaged else DONE


def replay(arguments: argparse.Namespace) -> int:
    """``rillflow replay``: re-run steps, return 1 if a value differs; or a skipped update, if not finite."""
    from rillflow.runs.layout import is_run_directory

    run: Path = arguments.source
    return _replay_steps(arguments, run) if is_run_directory(run) else _replay_update(arguments, run)


def _replay_steps(arguments: argparse.Namespace, run: Path) -> int:
    from rillflow_parts.replay.replay import replay as replayed

    given = {"settings": arguments.set, "algorithms": arguments.algorithms}
    found = replayed(run, arguments.step, **given, say=lambda line: print(visible(line), flush=True))
    if found.difference is None:
        return DONE
    print(visible(f"first difference in step {found.difference.step}\n  {found.difference}"))
    for reason in found.reasons or ("nothing that the run recorded differs here",):
        print(visible(f"  possible reason: {reason}"))
    return FAILED


def _replay_update(arguments: argparse.Namespace, bundle: Path) -> int:
    from rillflow_parts.replay.bundle import replay_bundle

    if arguments.step is not None or arguments.set:
        raise ConfigError(
            f"{bundle} is not a run directory, and --step or --set is given",
            why="a bundle holds one skipped update with its settings",
            fix="name the run directory, or leave the options out",
        )
    code = DONE
    for one in replay_bundle(bundle, arguments.algorithms):
        print(f"{one.role}\n  the run found  {one.recorded}")
        print(f"  first here     {one.first or 'nothing: every number is finite on this machine'}")
        code = FAILED if one.first else code
    return code


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replay``."""
    told = "a run directory; or the bundle of a skipped update, such as RUN/bundles/step-000012"
    parser.add_argument("source", type=Path, metavar="RUN_OR_BUNDLE", help=told)
    told = "last step to re-run, from the newest checkpoint before it; left out, every step from the start"
    parser.add_argument("--step", type=count, metavar="N", help=told)
    set_argument(parser, "change a setting for the replay, such as placement.backend=ray; may be repeated")


def replay_run(
    run: Path, step: int | None, settings: Sequence[str], algorithms: Sequence[Algorithm]
) -> Replayed:
    """Re-run steps of a run, for ``Run.replay``."""
    from rillflow_parts.replay.replay import replay as replayed

    return replayed(run, step, settings=settings, algorithms=algorithms)


HELP = PARTS["replay"]
PLUGIN = Plugin(
    commands={
        "verify": Command(help=HELP["verify"], run=verify, add_arguments=run_argument),
        "replay": Command(help=HELP["replay"], run=replay, add_arguments=replay_arguments),
    },
    services={"replay": lambda: replay_run},
)
