"""Commands: one function each; arguments in, exit code out.

Every import is in the command that needs it, so that ``--help`` is fast and a wrong setting is found before
torch is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.cli.failure import DONE, FAILED, explain_failure
from rillflow.errors import ConfigError, RillflowError, RunDirectoryError
from rillflow.runs.formatting import visible

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.app.plugin_recipe import PluginRecipe
    from rillflow.app.recipe import LoadedRecipe


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
        from rillflow.app.planned import require_for, settings_of
        from rillflow.placement.plan import open_plan

        plan = open_plan(arguments.plan)
        placed = settings_of(plan, arguments.set)
    how = {"fresh": arguments.fresh, "quiet": arguments.quiet, "command": arguments.typed}
    loaded = opened(arguments, placed)
    from rillflow.app.recipe import LoadedRecipe

    if not isinstance(loaded, LoadedRecipe):
        _refuse({"--plan": arguments.plan, "--cluster": arguments.cluster})
        loaded.run(**how)
        return DONE
    if plan is not None:
        require_for(plan, loaded)
    if arguments.cluster is not None:
        from rillflow.app.plugins import planning

        say = (lambda _: None) if arguments.quiet else print
        planner = planning("--cluster")
        plan = planner.predict_placement(loaded, arguments.cluster, arguments.lengths, say)
    from rillflow.app.launch import launch

    launch(loaded.recipe, loaded.base, **how, plan=plan)
    return DONE


def check(arguments: argparse.Namespace) -> int:
    """``rillflow check``: report everything about a recipe that can be known before it runs."""
    loaded = opened(arguments)
    from rillflow.app.recipe import LoadedRecipe

    how = {"every_setting": arguments.all, "runs_code": not arguments.no_code}
    if isinstance(loaded, LoadedRecipe):
        from rillflow.app.check import check as examine_recipe

        report = examine_recipe(loaded, memory=arguments.memory, **how)
    else:
        _refuse({"--memory": arguments.memory})
        report = loaded.check(**how)
    _show_report(report)
    if report.problems:
        from rillflow.config.problems import together

        raise together(report.problems, str(arguments.recipe))
    print("\nready" if not arguments.no_code else "\nready, except for code that was not run")
    return DONE


def graph(arguments: argparse.Namespace) -> int:
    """``rillflow graph``: print the stages of a recipe's phases, and the fields between them."""
    loaded = opened(arguments)
    from rillflow.app.recipe import LoadedRecipe
    from rillflow.graph.drawing import as_json, as_mermaid, as_text

    if isinstance(loaded, LoadedRecipe):
        from rillflow.app.graphs import graphs, unpublished

        found = graphs(loaded.recipe)
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


def merge_adapter(arguments: argparse.Namespace) -> int:
    """``rillflow merge-adapter``: merge an adapter into its base, as a plain model."""
    from rillflow.app.trained import write_merged

    write_merged(arguments.adapter, arguments.out, arguments.dtype, arguments.base)
    print(f"wrote {arguments.out}")
    return DONE


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
    from rillflow.app.ask import Respondent, read_messages

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
    from rillflow.app.contest import Asking, contest
    from rillflow.app.recipe import load_recipe
    from rillflow.app.resume import recipe_of
    from rillflow.runs import layout
    from rillflow.runs.durable import replace
    from rillflow.runs.json_lines import encode
    from rillflow.runs.report.contests import contest_lines
    from rillflow.runs.run_data import load as load_run

    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(
            f"--out {arguments.out} already exists",
            why="existing files are never overwritten",
            fix="choose another name",
        )
    runs = [each for each in (arguments.source, arguments.against) if each and layout.is_run_directory(each)]
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


def serve(arguments: argparse.Namespace) -> int:
    """``rillflow serve``: serve a model, or a run's newest checkpoint, until interrupted."""
    told = {"port": arguments.port, "token_file": arguments.token_file, "max_rows": arguments.max_rows}
    told["announce"] = lambda line: print(line, flush=True)
    if arguments.train:
        from rillflow.app.plugins import training

        service = training("rillflow serve --train")
        service.serve(arguments.source, **told, checkpoints=arguments.checkpoints)
        return DONE
    if arguments.checkpoints is not None:
        raise ConfigError(
            "--checkpoints is given without --train", why="only training clients save checkpoints"
        )
    try:
        from rillflow.app.serve import serve as serve_source
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed",
            why="rillflow serve needs an optional package",
            fix="pip install 'rillflow[service]'",
        ) from None
    serve_source(arguments.source, **told)
    return DONE


def watch(arguments: argparse.Namespace) -> int:
    """``rillflow watch``: serve a local page of runs until interrupted."""
    try:
        from rillflow.watch.server import watch as watch_runs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed",
            why="rillflow watch needs an optional package",
            fix="pip install 'rillflow[service]'",
        ) from None
    told = {"port": arguments.port, "token_file": arguments.token_file, "cache": arguments.cache}
    watch_runs(arguments.runs, **told, announce=lambda line: print(line, flush=True))
    return DONE


def report(arguments: argparse.Namespace) -> int:
    """``rillflow report``: write a run's report again; an installed planner adds predicted steps."""
    from rillflow.app.plugins import predict_steps
    from rillflow.runs.report.write import write_report

    print(write_report(arguments.run, predict_steps(arguments.algorithms)))
    return DONE


def sweep(arguments: argparse.Namespace) -> int:
    """``rillflow sweep``: run a sweep's runs, and print its table; return 1 if a run failed."""
    from rillflow.app.sweeps.places import jobs_of
    from rillflow.app.sweeps.plan import load_sweep
    from rillflow.app.sweeps.sweep import Sweep
    from rillflow.app.sweeps.table import RunState, as_text

    plan = load_sweep(arguments.sweep, arguments.algorithms)
    with jobs_of(plan, arguments.typed) as jobs:
        started = Sweep(plan, jobs, lambda line: print(visible(line), flush=True))
        cases = started.table() if arguments.table else started.run()
    print(visible(f"\n{as_text(cases)}\n\ntable: {plan.path / 'table.json'}, table.csv"))
    failed = any(each.state is RunState.FAILED for case in cases for each in case.results)
    return FAILED if failed else DONE


def track(arguments: argparse.Namespace) -> int:
    """``rillflow track``: send what a run's trackers do not have; return 1 if something is left."""
    from rillflow.app.track import track as tracked

    has_all = tracked(
        arguments.run, arguments.tracker, arguments.set, lambda line: print(visible(line), flush=True)
    )
    return DONE if has_all else FAILED


def timeline(arguments: argparse.Namespace) -> int:
    """``rillflow timeline``: show how long ranks waited and for which stage; write the trace of its steps."""
    from rillflow.app.plugins import predict_steps
    from rillflow.runs.durable import replace
    from rillflow.runs.json_lines import encode
    from rillflow.runs.report.measured import measured, measured_lines, trace_of
    from rillflow.runs.report.predicted import compare, render_comparison
    from rillflow.runs.run_data import load

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
    predict = predict_steps(arguments.algorithms)
    if predict is not None:
        print("\n".join(["", *predict(data, found.first, found.last).lines(data)]))
    compared = compare(data)
    if compared is not None:
        print(f"\n{render_comparison(compared)}")
    return DONE


def verify(arguments: argparse.Namespace) -> int:
    """``rillflow verify``: check that a run directory is as the run wrote it; return 1 if it is not."""
    from rillflow.app.verify import verify as verified

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
    from rillflow.app.replay import replay as replayed

    given = {"settings": arguments.set, "algorithms": arguments.algorithms}
    found = replayed(run, arguments.step, **given, say=lambda line: print(visible(line), flush=True))
    if found.difference is None:
        return DONE
    print(visible(f"first difference in step {found.difference.step}\n  {found.difference}"))
    for reason in found.reasons or ("nothing that the run recorded differs here",):
        print(visible(f"  possible reason: {reason}"))
    return FAILED


def _replay_update(arguments: argparse.Namespace, bundle: Path) -> int:
    from rillflow.app.bundle import replay_bundle

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


def doctor(arguments: argparse.Namespace) -> int:
    """``rillflow doctor``: report this machine's state, as a run would find it."""
    from rillflow.app.doctor import Health, examine

    del arguments
    findings = examine(Path())
    for finding in findings:
        print(f"{finding.health:<5} {finding.name:<14} {finding.what}")
        if finding.fix:
            print(f"      {'':<14} fix: {finding.fix}")
    return FAILED if any(finding.health is Health.FAIL for finding in findings) else DONE


def _refuse(options: Mapping[str, object]) -> None:
    """Refuse options that place or measure language models, for a recipe of another kind."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ConfigError(
            f"{given[0]} is given for a recipe without a language model",
            why="it places or measures the roles of a language model",
            fix="leave it out",
        )


def load(arguments: argparse.Namespace) -> LoadedRecipe:
    """Return a recipe of a language model; see ``opened``."""
    from rillflow.app.recipe import require_language_model

    return require_language_model(opened(arguments))


def opened(arguments: argparse.Namespace, placed: Sequence[str] = ()) -> LoadedRecipe | PluginRecipe:
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
