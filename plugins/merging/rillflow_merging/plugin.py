"""Plugin: attach ``rillflow merge`` to the command line. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rillflow.app.plugins import SHIPPED, Command, Plugin


def merge(arguments: argparse.Namespace) -> int:
    """``rillflow merge``: merge several models into a new model."""
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
    told = "model directory, or run (its newest model)"
    add("parents", nargs="+", type=Path, metavar="MODEL_OR_RUN", help=told)
    add("--out", type=Path, required=True, metavar="DIR", help="directory for the merged model")
    told = "linear (the default), slerp, ties, dare, ot or greedy; see plugins/merging/docs/merging.md"
    add("--method", default="linear", metavar="NAME", help=told)
    told = "model that all parents were trained from, for slerp, ties and dare"
    add("--base", type=Path, metavar="MODEL_OR_RUN", help=told)
    told = "one weight per parent, such as 2,1, divided by their sum (equal weights)"
    add("--weights", type=_numbers, metavar="W,W", help=told)
    add(
        "--density",
        type=float,
        default=0.5,
        metavar="P",
        help="share of changes that ties and dare keep (0.5)",
    )
    told = "scope of the share that ties keeps: tensor (the default), or model, as in its paper"
    add("--trim", default="tensor", metavar="WHAT", help=told)
    add(
        "--scale",
        type=float,
        default=1.0,
        metavar="S",
        help="factor of the merged change in ties and dare (1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the changes that dare drops (0)")
    told = "prompts: ot aligns by activations on them; without them, by weights"
    add("--prompts", type=Path, metavar="FILE", help=told)
    told = "Sinkhorn regularisation of ot, such as 0.01; without it, exact transport"
    add("--reg", type=float, metavar="R", help=told)
    told = "recipe whose held-out score selects the parents of greedy"
    add("--recipe", type=Path, metavar="RECIPE", help=told)


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a list. Example: ``_numbers("2,1") == (2.0, 1.0)``."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 2,1") from None


PLUGIN = Plugin(
    commands={"merge": Command(help=SHIPPED["merging"]["merge"], run=merge, add_arguments=add_arguments)}
)
