"""Arguments of the commands of remote samplers. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path


def join_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rillflow join``."""
    add = parser.add_argument
    told = "URL of a sampler rank (http://HOST:PORT), its address file RUN/service/POOL-RANK.json, or a store"
    add("run", metavar="RUN", help=told)
    add("--token-file", type=Path, metavar="FILE", help="file with the run's token")
    add("--name", default="", help="name that the leases belong to (HOST-PID)")
    add("--rows", type=_number, default=64, metavar="N", help="rows that are sampled at once (64)")
    told = "seconds until the rows of a sampler that died go to others (60)"
    add("--lease-s", type=float, default=60.0, metavar="S", help=told)
    told = "longest time without an answer of the run, in seconds (3600)"
    add("--patience-s", type=float, default=3600.0, metavar="S", help=told)
    add("--device", default="auto", help="auto, cpu, cuda, or cuda:1 (auto)")
    add("--threads", type=_number, default=0, metavar="N", help="CPU threads (torch chooses)")
    _add_poll(parser)
    add("--whole", action="store_true", help="fetch whole weights always, no differences")


def bridge_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rillflow bridge``."""
    told = "run directory, or the address file of one of its sampler ranks"
    parser.add_argument("run", type=Path, metavar="RUN", help=told)
    parser.add_argument("store", metavar="STORE", help="folder or fsspec URL that both sides can write")
    _add_poll(parser)


def bridge(arguments: argparse.Namespace) -> int:
    """``rillflow bridge``: carry requests between a store and a run."""
    from rillflow_links.remote.command import serve_store

    return serve_store(arguments)


def _add_poll(parser: argparse.ArgumentParser) -> None:
    told = "seconds between two looks into a store (0.2)"
    parser.add_argument("--poll-s", type=float, default=0.2, metavar="S", help=told)


def join(arguments: argparse.Namespace) -> int:
    """``rillflow join``: sample rows of a run on another machine."""
    from rillflow_links.remote.command import join_run

    return join_run(arguments)


def _number(text: str) -> int:
    """Return a whole number from 1 to 4096."""
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 4096")
    return int(text)
