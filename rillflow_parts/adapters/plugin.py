"""Plugin: attach ``rillflow merge-adapter``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.failure import DONE


def merge_adapter(arguments: argparse.Namespace) -> int:
    """``rillflow merge-adapter``: merge an adapter into its base, as a plain model."""
    from rillflow_parts.adapters.merged import write_merged

    write_merged(arguments.adapter, arguments.out, arguments.dtype, arguments.base)
    print(f"wrote {arguments.out}")
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge-adapter``."""
    told = "directory of an adapter, or a run whose newest policy is an adapter"
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help=told)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the new model")
    types = ("float32", "bfloat16")
    parser.add_argument(
        "--dtype", choices=types, default="float32", help="dtype of the weights (default: float32)"
    )
    told = "weights of a quantised base: trained, dequantised ones (default), or full, the directory's own"
    parser.add_argument("--base", choices=("trained", "full"), default="trained", help=told)


PLUGIN = Plugin(
    commands={
        "merge-adapter": Command(
            help=PARTS["adapters"]["merge-adapter"], run=merge_adapter, add_arguments=add_arguments
        )
    }
)
