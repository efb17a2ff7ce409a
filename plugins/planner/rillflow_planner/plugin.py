"""Plugin: attach the planner's commands and predictions to Rillflow.

words ─ options ─> planning ─ CommandOutput ─> text or JSON, and the files that --out and --plot name

Imports nothing heavy until a command runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.app.plugins import SHIPPED, Command, Plugin, missing
from rillflow.cli.arguments import recipe_arguments
from rillflow.cli.failure import DONE

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved
    from rillflow.placement.plan import Plan


Words = dict[str, dict[str, Any]]
"""Arguments of ``add_argument`` for each option."""


def later(name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that imports ``planning`` when it runs, then shows and writes its answer."""

    def run(arguments: argparse.Namespace) -> int:
        from rillflow.runs import durable

        try:
            from rillflow_planner import planning
        except ModuleNotFoundError as error:
            package, *part = (error.name or "").split(".")
            if package != "rillflow_parts" or not part:
                raise
            raise missing(f"rillflow {name}", part[0]) from error
        answers = {"plan": planning.plan, "simulate": planning.simulate, "calibrate": planning.calibrate}
        answer = answers[name](arguments)
        for option, text in answer.files.items():
            file = vars(arguments)[option]
            if file is not None:
                durable.replace(file, [text().encode("utf-8", "replace")])
                # To stderr, because the output may be JSON for a machine.
                print(f"wrote {file}", file=sys.stderr)
        print(json.dumps(answer.data, indent=1) if arguments.format == "json" else "\n".join(answer.lines))
        return DONE

    return run


class _Once(argparse.Action):
    """Option that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Store the value; refuse a second one."""
        said = vars(namespace).setdefault("said", {})
        if self.dest in said:
            parser.error(f"{option} is given twice: {said[self.dest]} and {values}")
        said[self.dest] = values
        setattr(namespace, self.dest, values)


def _word(metavar: str | tuple[str, ...] | None, told: str, kind: Any = Path, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": told, "type": kind, **more}


def _page(text: str) -> Path:
    """Return the path of a picture's file. Example: ``_page("plan.html") == Path("plan.html")``."""
    if Path(text).suffix != ".html":
        raise argparse.ArgumentTypeError(f"{text} does not end in .html, the only format of charts")
    return Path(text)


CLUSTER = {"--cluster": _word("FILE", "cluster file (TOML)")}
LENGTHS = {"--lengths": _word("RUN", "run to measure row lengths from; without it, lengths are assumed")}
PLAN = {"--plan": _word("FILE", "plan file, written by rillflow plan --out")}
OUT = {"--out": _word("FILE", "file for the result: the best plan, or the fitted cluster file")}
FORMAT: Words = {"--format": {"choices": ("text", "json"), "default": "text", "help": "output format (text)"}}
PLOT = {"--plot": _word("FILE", "write a chart to this .html file", _page)}
STEP: Words = {
    "--model": _word("FILE", "the model's config.json"),
    "--algorithm": _word("NAME", "name of a shipped algorithm, as in recipes", str),
    "--prompts": _word("N", "prompts per step (512)", int),
    "--samples": _word("N", "completions per prompt (8)", int),
    "--minibatches": _word("N", "minibatches per step (1)", int),
    "--steps": _word("N", "steps of the run, to predict its hours and price", int),
}
"""Options that describe a step in place of a recipe."""
DEVICES: Words = {
    "--gpus": _word("NxKIND", "number and type of devices, such as 64xH100", str),
    "--per-machine": _word("N", "devices that are joined as in one machine (8; a rack of GB200: 64)", int),
    "--between": _word("RATE", "bandwidth between machines, per device (50 GB/s)", str),
    "--price": _word("PRICE", 'price of a device, such as "2.5 $/h"', str),
}
"""Options that describe devices in place of a cluster file."""
QUESTION: Words = {
    "--response": _word(
        "LENGTHS", "response lengths: mean=2000,max=8192 (also median, sigma, p90), or a file", str
    ),
    "--prompt": _word("LENGTHS", "prompt lengths in the same form, or one number (256)", str),
    "--reward-seconds": _word("S", "seconds of the reward function per row (0)", float),
    "--tokens-per-pass": _word("N", "tokens per decoding pass, above 1 with speculative decoding (1)", float),
    "--like": _word("STACK", "predict what this published stack would take: nemo-rl, verl, ...", str),
    "--layout": _word("AXES", "a given layout instead of the best: tp=4,pp=2,generate=4", str),
    "--scoring-tokens": _word("N", "tokens of a micro-batch in scoring, with --like (as in training)", int),
}
"""Options that say more of a step, with and without a recipe."""
ENGINE: Words = {
    "--engine": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "a property of the software, such as drains=true; may be repeated",
    }
}


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``simulate``."""
    recipe_arguments(parser)
    _add(parser, PLAN | CLUSTER, required=True, action=_Once)
    more = "begin this many times the prompts and the samples, and leave the longest for later"
    words: Words = {
        "--steps": _word("N", "steps to simulate (20)", int, default=20),
        "--seed": _word("N", "seed of row lengths (0)", int, default=0),
        "--freshness": _word("K", "largest age of a trained token in versions, instead of the plan's", float),
        "--parts": _word("N", "pass a step's rows on in N parts, in order, as a run does", int, default=0),
        "--oversample": _word(("PROMPTS", "SAMPLES"), more, float, nargs=2),
    }
    _add(parser, LENGTHS | words | FORMAT | PLOT, action=_Once)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    recipe_arguments(parser, is_optional=True)
    _add(parser.add_argument_group("in place of a recipe"), STEP, action=_Once)
    _add(parser.add_argument_group("in place of a cluster file"), DEVICES, action=_Once)
    goals = (
        "quantity to minimise: seconds of a step (step), device-hours of a step, devices under a "
        "deadline, or the cost of a step at the cluster's prices"
    )
    choices = ("step", "device-hours", "devices", "cost")
    bounds = "freshness bounds to try (0); a bound above 0 generates on separate devices"
    words: Words = {
        "--objective": {"choices": choices, "help": goals},
        "--deadline": _word("S", "largest allowed seconds of a step", float),
        "--freshness": _word("K,K", bounds, _freshness_bounds, default=(0,)),
    }
    _add(parser, CLUSTER | QUESTION | LENGTHS | words | OUT | FORMAT | PLOT, action=_Once)
    apart = "also try bound 0 with separate devices for generation, idle while the policy trains"
    _add(parser, ENGINE | {"--separate-in-step": {"action": "store_true", "help": apart}})


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    machine = _word("FILE", "cluster file of the run; without it, this machine's cores")
    _add(parser, {"run": _word("RUN", "a run directory"), "--cluster": machine} | OUT | FORMAT)


def _add(parser: Any, words: Words, **alike: Any) -> None:
    for name, how in words.items():
        parser.add_argument(name, **how, **alike)


def _freshness_bounds(text: str) -> tuple[float, ...]:
    """Return freshness bounds. Example: ``_freshness_bounds("0,0.5,4") == (0, 0.5, 4)``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.replace(".", "", 1).isdecimal() and part.isascii() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 up, such as 0,1,4 or 0.5")
    return tuple(float(part) if "." in part else int(part) for part in parts)


ARGUMENTS = {"plan": plan_arguments, "simulate": simulate_arguments, "calibrate": calibrate_arguments}
"""Functions that add the options of each command."""


class Planner:
    """The planner's predictions for a run and its report."""

    def predict_placement(
        self, loaded: Resolved, cluster: Path, lengths: Path | None, say: Callable[[str], None]
    ) -> Plan:
        """Return a recipe's own placement on a cluster with predicted seconds."""
        from rillflow.app.planned import require_for
        from rillflow_planner.plan_report import said_lines
        from rillflow_planner.recipe_problem import open_cluster, plan_as_placed, state_problem

        statement = state_problem(loaded, open_cluster(cluster), lengths)
        plan = plan_as_placed(loaded, statement)
        require_for(plan, loaded)
        say("\n".join(said_lines(statement)[1:]))
        return plan


PLUGIN = Plugin(
    commands={
        name: Command(help=told, run=later(name), add_arguments=ARGUMENTS[name])
        for name, told in SHIPPED["planner"].items()
    },
    services={"planning": Planner},
)
