"""Commands: one function each; arguments in, exit code out.

Every import is in the command that needs it, so that ``--help`` is fast and a wrong setting is found before
torch is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.cli.failure import DONE
from rillflow.errors import ConfigError, RunDirectoryError
from rillflow.runs.formatting import visible

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.app.plugin_recipe import PluginRecipe
    from rillflow.app.resolved import Resolved


def run(arguments: argparse.Namespace) -> int:
    """``rillflow run``: check a recipe, then run it to its end."""
    if arguments.lengths is not None and arguments.cluster is None:
        raise ConfigError(
            "--lengths is given without --cluster",
            why="only the prediction for --cluster uses row lengths",
            fix="add --cluster FILE, or leave --lengths out",
        )
    plan, placed = None, []
    if arguments.plan is not None:
        from rillflow.app.planned import mode_of, open_plan, require_for, settings_of

        plan = open_plan(arguments.plan)
        placed = settings_of(plan, arguments.set, mode_of(Path(arguments.recipe)))
    how = {"fresh": arguments.fresh, "quiet": arguments.quiet, "command": arguments.typed}
    loaded = opened(arguments, placed)
    from rillflow.app.resolved import Resolved

    if not isinstance(loaded, Resolved):
        _refuse({"--plan": arguments.plan, "--cluster": arguments.cluster})
        from rillflow.app.plugin_run import run_plugin_recipe

        run_plugin_recipe(loaded, **how)
        return DONE
    if plan is not None:
        require_for(plan, loaded)
    if arguments.cluster is not None:
        from rillflow.app.planned import Planning
        from rillflow.app.plugins import service

        say = (lambda _: None) if arguments.quiet else print
        planner: Planning = service("planning", "--cluster")
        plan = planner.predict_placement(loaded, arguments.cluster, arguments.lengths, say)
    from rillflow.app.launch import launch

    launch(loaded, **how, plan=plan)
    return DONE


def check(arguments: argparse.Namespace) -> int:
    """``rillflow check``: report everything about a recipe that can be known before it runs."""
    loaded = opened(arguments)
    from rillflow.app.check import check as examine_recipe
    from rillflow.app.check import check_plugin_recipe
    from rillflow.app.resolved import Resolved

    how = {"every_setting": arguments.all, "runs_code": not arguments.no_code}
    if isinstance(loaded, Resolved):
        report = examine_recipe(loaded, memory=arguments.memory, **how)
    else:
        _refuse({"--memory": arguments.memory})
        report = check_plugin_recipe(loaded, **how)
    _show_report(report)
    if report.problems:
        from rillflow.config.problems import together

        raise together(report.problems, str(arguments.recipe))
    print("\nready" if not arguments.no_code else "\nready, except for code that was not run")
    return DONE


def graph(arguments: argparse.Namespace) -> int:
    """``rillflow graph``: print the stages of a recipe's phases, and the fields between them."""
    loaded = opened(arguments)
    from rillflow.app.resolved import Resolved
    from rillflow.graph.drawing import as_json, as_mermaid, as_text

    if isinstance(loaded, Resolved):
        from rillflow.app.graphs import unpublished

        found = loaded.graphs
        for note in filter(None, map(unpublished, found)):
            print(f"note: {note}", file=sys.stderr)
    else:
        found = loaded.graphs()
    if arguments.format == "json":
        import json

        print(json.dumps([as_json(each) for each in found], indent=1))
        return DONE
    print(as_mermaid(*found) if arguments.format == "mermaid" else "\n\n".join(map(as_text, found)))
    return DONE


def _refuse(options: Mapping[str, object]) -> None:
    """Refuse options that place or measure language models, for a recipe of another kind."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ConfigError(
            f"{given[0]} is given for a recipe without a language model",
            why="it places or measures the roles of a language model",
            fix="leave it out",
        )


def load(arguments: argparse.Namespace) -> Resolved:
    """Return a recipe of a language model; see ``opened``."""
    from rillflow.app.recipe import require_language_model

    return require_language_model(opened(arguments))


def opened(arguments: argparse.Namespace, placed: Sequence[str] = ()) -> Resolved | PluginRecipe:
    """Return the recipe that the arguments name, with a plan's overrides and then ``--set`` applied."""
    from rillflow.app.recipe import open_recipe

    overrides = [*placed, *arguments.set]
    if arguments.dir is not None:
        import json

        overrides.append(f"run.dir={json.dumps(arguments.dir)}")  # a TOML string is a JSON string
    loaded = open_recipe(arguments.recipe, overrides, arguments.algorithms)
    try:
        loaded.directory.exists()
    except OSError as error:
        what = f"the run directory {str(loaded.directory)[:80]!r} cannot be used"
        raise RunDirectoryError(what, why=error.strerror or str(error), fix="choose another --dir") from None
    return loaded


def _show_report(report: Report) -> None:
    for title, lines in report.topics.items():
        print(title)
        for line in lines:
            print(visible(f"  {line}"))
    for note in report.notes:
        print(visible(f"note: {note}"))
    sys.stdout.flush()
