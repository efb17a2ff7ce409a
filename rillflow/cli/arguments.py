"""Arguments that several commands have. Imports nothing but the standard library."""

from __future__ import annotations

import argparse
from pathlib import Path


def recipe_arguments(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the arguments of a command that reads a recipe."""
    nargs = {"nargs": "?"} if is_optional else {}
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe's TOML file", **nargs)  # type: ignore[arg-type]
    told = "change a setting, such as policy.lr=1e-5; may be repeated; the value none removes a setting"
    set_argument(parser, told)
    parser.add_argument("--dir", metavar="DIR", help="the run directory; short for --set run.dir=DIR")


def set_argument(parser: argparse.ArgumentParser, told: str) -> None:
    """Add the option that changes settings; its help is the text."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=told)


def temperature_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option of a command that samples answers."""
    told = "sampling temperature; 0 (default) is greedy"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=told)


def run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument of a command that reads a run."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")


def count(text: str) -> int:
    """Return a whole number above 0."""
    if not (text.isdecimal() and text.isascii() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
