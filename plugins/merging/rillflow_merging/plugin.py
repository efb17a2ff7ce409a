"""Plugin: attach ``rillflow merge`` to the command line. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rillflow.app.plugins import SHIPPED, Command, Plugin


def merge(arguments: argparse.Namespace) -> int:
    """``rillflow merge``: merge several models into one."""
    from rillflow_merging.command import merge_models
    from rillflow_merging.merge import MergeSettings

    settings = MergeSettings(
        method=arguments.method,
        weights=arguments.weights,
        density=arguments.density,
        scale=arguments.scale,
        trim=arguments.trim,
        seed=arguments.seed,
        reg=arguments.reg,
    )
    how = {"base": arguments.base, "prompts": arguments.prompts, "recipe": arguments.recipe}
    merge_models(arguments.parents, arguments.out, settings, **how)
    print(f"wrote {arguments.out}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge``."""
    add = parser.add_argument
    told = "a model's directory, or a run, whose newest model it is"
    add("parents", nargs="+", type=Path, metavar="MODEL_OR_RUN", help=told)
    add("--out", type=Path, required=True, metavar="DIR", help="where the merged model is written")
    told = "linear (the default), slerp, ties, dare, ot or greedy; see plugins/merging/docs/merging.md"
    add("--method", default="linear", metavar="NAME", help=told)
    told = "the model that all were trained from, for slerp, ties and dare"
    add("--base", type=Path, metavar="MODEL_OR_RUN", help=told)
    told = "a number a parent, such as 2,1; divided by their sum (equal)"
    add("--weights", type=_numbers, metavar="W,W", help=told)
    add(
        "--density",
        type=float,
        default=0.5,
        metavar="P",
        help="share of changes that ties and dare keep (0.5)",
    )
    told = "ties keeps that share of each tensor (tensor, the default) or of the model, as its paper (model)"
    add("--trim", default="tensor", metavar="WHAT", help=told)
    add("--scale", type=float, default=1.0, metavar="S", help="of the merged change of ties and dare (1)")
    add("--seed", type=int, default=0, metavar="N", help="of what dare drops (0)")
    told = "prompts, by what is said of which ot aligns; without, by weights"
    add("--prompts", type=Path, metavar="FILE", help=told)
    told = "of ot: Sinkhorn's regularisation, such as 0.01; without, exact transport"
    add("--reg", type=float, metavar="R", help=told)
    told = "whose held-out rows say which parents a greedy soup keeps"
    add("--recipe", type=Path, metavar="RECIPE", help=told)


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a list. Example: ``_numbers("2,1") == (2.0, 1.0)``."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 2,1") from None


PLUGIN = Plugin(
    commands={"merge": Command(help=SHIPPED["merging"]["merge"], run=merge, add_arguments=add_arguments)}
)
