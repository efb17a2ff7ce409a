"""Arguments of ``rillflow merge-sides``. Imports nothing heavy."""

from __future__ import annotations

import argparse


def merge_sides(arguments: argparse.Namespace) -> int:
    """``rillflow merge-sides``: see ``sides.commands``."""
    from rillflow_links.sides.commands import run_merger

    return run_merger(arguments)


def merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge-sides``."""
    add = parser.add_argument
    add("store", metavar="STORE", help="folder or URL that the sides name in schedule.store")
    add("--quorum", type=int, default=1, metavar="N", help="least number of sides in a merge (1)")
    told = "wait for the other sides of the last merges once a quorum is there (30)"
    add("--grace-s", type=float, default=30.0, metavar="S", help=told)
    told = "versions that a contribution may be behind (3)"
    add("--most-late", type=int, default=3, metavar="N", help=told)
    add("--lr", type=float, default=0.7, help="outer learning rate (0.7)")
    add("--momentum", type=float, default=0.9, help="outer Nesterov momentum (0.9)")
    add("--poll-s", type=float, default=1.0, metavar="S", help="pause between two looks (1)")
    add("--until", type=int, metavar="VERSION", help="end when this version is there")
    told = "compute every version again from the log, and compare all bits"
    add("--replay", action="store_true", help=told)
