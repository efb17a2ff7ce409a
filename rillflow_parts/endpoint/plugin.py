"""Plugin: attach ``rillflow serve`` and the agents of ``rollout.agent``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import PARTS, Command, Plugin, service
from rillflow.cli.failure import DONE
from rillflow.errors import ConfigError, install_package

if TYPE_CHECKING:
    from rillflow_parts.endpoint.training_server import TrainingServer


def serve(arguments: argparse.Namespace) -> int:
    """``rillflow serve``: serve a model, or a run's newest checkpoint, until interrupted."""
    told = {"port": arguments.port, "token_file": arguments.token_file, "max_rows": arguments.max_rows}
    told["announce"] = lambda line: print(line, flush=True)
    if arguments.train:
        server: TrainingServer = service("training", "rillflow serve --train")
        server.serve(arguments.source, **told, checkpoints=arguments.checkpoints)
        return DONE
    if arguments.checkpoints is not None:
        raise ConfigError(
            "--checkpoints is given without --train", why="only training clients save checkpoints"
        )
    try:
        from rillflow_parts.endpoint.serve import serve as serve_source
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed",
            why="rillflow serve needs an optional package",
            fix=install_package("service"),
        ) from None
    serve_source(arguments.source, **told)
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``."""
    add = parser.add_argument
    add("source", type=Path, metavar="MODEL_OR_RUN", help="a model's directory, or a run to serve and follow")
    add(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port on the loopback device; 0 picks a free one (default: 8000)",
    )
    told = "file with the bearer token; created if missing. Left out, a new token is printed"
    add("--token-file", type=Path, metavar="FILE", help=told)
    add("--max-rows", type=int, default=64, metavar="N", help="most rows that run at once (default: 64)")
    told = "let clients of the Tinker API train adapters on the model (plugin training_service)"
    add("--train", action="store_true", help=told)
    told = "with --train, directory of the clients' checkpoints (default: runs/training-service)"
    add("--checkpoints", type=Path, metavar="DIR", help=told)


PLUGIN = Plugin(
    commands={
        "serve": Command(
            help=PARTS["endpoint"]["serve"], run=serve, add_arguments=add_arguments, outlives_output=True
        )
    },
    sections={"rollout.agent": "rillflow_parts.endpoint.config:AgentConfig"},
    writers={"rollout.agent": "rillflow_parts.endpoint.agent_writer:AgentWriter"},
)
