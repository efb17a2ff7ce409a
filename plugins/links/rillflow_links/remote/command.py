"""Commands ``rillflow join`` and ``rillflow bridge``: sample rows of a run on another machine."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from functools import partial
from pathlib import Path

import torch

from rillflow.errors import ConfigError
from rillflow.models.language_model import choose_device
from rillflow_links.codecs.delta import Delta
from rillflow_links.remote.bridge import Bridge
from rillflow_links.remote.client import RunClient
from rillflow_links.remote.sampler import RemoteSampler, SamplerLimits
from rillflow_links.remote.store import store_at
from rillflow_links.remote.store_transport import StoreTransport
from rillflow_links.remote.transport import HttpTransport, RunAddress, Transport, address_in
from rillflow_links.remote.weight_copy import WeightCopy


def join_run(arguments: argparse.Namespace) -> int:
    """Join a run; return when it has ended, or a signal asked to leave.

    Raises:
        RillflowError: the token is wrong, the run trains another model, or it did not answer in time.
    """
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    name = arguments.name or f"{socket.gethostname()}-{os.getpid()}"
    limits = SamplerLimits(rows=arguments.rows, lease_s=arguments.lease_s, patience_s=arguments.patience_s)
    say = partial(print, flush=True)
    transport = transport_to(arguments.run, name, arguments.token_file, arguments.poll_s)
    sampler = RemoteSampler(
        RunClient(transport),
        WeightCopy(None if arguments.whole else Delta(1), say),
        limits,
        choose_device(arguments.device),
        say,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sampler.stop())
    say(f"{name} joins {arguments.run}")
    why = sampler.run()
    counts = sampler.counts
    say(
        f"{why}: {counts.rows} rows with {counts.tokens} tokens, {counts.versions} versions of the weights "
        f"in {counts.sent_bytes:,} bytes, {sum(counts.pauses_s):.1f} s of pauses, "
        f"{counts.lost_rows} rows lost"
    )
    return 0


def serve_store(arguments: argparse.Namespace) -> int:
    """Carry requests between a store and a run; return when the run has ended, or a signal asked to stop.

    Raises:
        StreamError: another bridge serves the store, or it cannot be written.
    """
    say = partial(print, flush=True)
    address = address_file(arguments.run)
    bridge = Bridge(store_at(arguments.store), address, poll_s=arguments.poll_s, tell=say)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: bridge.stop())
    say(f"carrying requests between {arguments.store} and {address}")
    bridge.serve()
    return 0


def address_file(run: Path) -> Path:
    """Return the address file of a run's only sampler rank, or the file itself.

    Raises:
        ConfigError: the run has several sampler ranks.
    """
    if run.suffix == ".json":
        return run
    files = sorted((run / "service").glob("*.json"))
    if len(files) > 1:
        raise ConfigError(
            f"{run} has {len(files)} sampler ranks",
            why="a bridge serves one rank through one store",
            fix=f"name the rank's file, such as {files[0]}, and start a bridge with its own store for each",
        )
    return files[0] if files else run / "service" / "main-0.json"


def transport_to(run: str, name: str, token_file: Path | None, poll_s: float) -> Transport:
    """Return the transport to a run.

    Args:
        run: URL of a sampler rank, its address file, or a store that a bridge serves.
        name: name of this sampler.
        token_file: file with the token; None for an address file, which has it.
        poll_s: time between two looks into a store.

    Raises:
        ConfigError: there is no token, or the file cannot be read.
    """
    if run.startswith(("http://", "https://")):
        address = RunAddress.of_url(run, token_in(token_file, run))
        return HttpTransport(lambda: address, name)
    if run.endswith(".json"):
        return HttpTransport(partial(address_in, Path(run)), name)
    return StoreTransport(store_at(run), name, token_in(token_file, run), poll_s)


def token_in(file: Path | None, run: str) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: there is no file, or it cannot be read.
    """
    if file is None:
        raise ConfigError(
            f"{run} needs a token",
            why="every request to a run has one",
            fix="add --token-file FILE, a copy of the run's rollout.service.token_file",
        )
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the token file {file} cannot be read", why=str(error), fix="name a text file"
        ) from None
