"""Server: ``rillflow serve MODEL --train``, from the model's directory to the running server.

MODEL ─ load ─> SharedBase ─┬─ SnapshotSampler, Service ─ EngineThread: one thread
                            └─ engine without adapters ─ EngineQueue ─ Door: OpenAI's paths
App(Service, EngineThread, Door) ─> LoopbackServer
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from rillflow.app.plugins import KIND, other_kind
from rillflow.errors import ModelError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import native_engine
from rillflow.runs import layout
from rillflow.runs.bases import checkpoint_place
from rillflow.runs.pins import Pins
from rillflow.runs.reader import read_config
from rillflow.serving.server import LoopbackServer, bound
from rillflow.serving.token import token_of
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_parts.endpoint.openai_server import Door, NewRows
from rillflow_parts.endpoint.tool_calls import tool_format
from rillflow_training_service.app import App
from rillflow_training_service.checkpoints import Checkpoints
from rillflow_training_service.engine_thread import EngineThread
from rillflow_training_service.sampling import SnapshotSampler
from rillflow_training_service.service import Service
from rillflow_training_service.shared_base import SharedBase

CHECKPOINTS = Path("runs/training-service")
"""Directory of the checkpoints, unless another one is named."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A model that is ready to be trained by clients."""

    app: App
    """The application."""
    thread: EngineThread
    """The loop of the engine thread, which the caller runs."""


def opened(source: Path, *, token: str, max_rows: int, checkpoints: Path) -> Opened:
    """Load a model, and return its application.

    Raises:
        ModelError: the directory has a run or an adapter, or no model.
    """
    if layout.is_run_directory(source):
        if KIND in (config := read_config(source)):
            raise other_kind(source, config[KIND])
        raise ModelError(
            f"{source} is a run",
            why="clients train adapters on one fixed base model",
            fix="name the directory of a model, such as RUN/checkpoints/step-N/policy",
        )
    folder = source.absolute()
    model = load_model(ModelConfig(path=str(folder)), seed=0, device=choose_device("auto"), base=Path())
    if model.adapter is not None:
        raise ModelError(
            f"{source} is an adapter",
            why="clients train adapters on a whole model",
            fix=f"serve its base, {model.adapter.base}; or merge it: rillflow merge-adapter",
        )
    base = SharedBase(model)
    usual = RolloutConfig(max_rows=max_rows)
    queue = EngineQueue(native_engine(model, usual), model.tokenizer, max_rows=max_rows, pauses=True)
    sampler = SnapshotSampler(base, max_rows=max_rows)
    thread = EngineThread(base, sampler, queue)
    visitor = NewRows(Encoder.of(model.tokenizer, TaskConfig(), model.context), usual)
    door = Door(
        queue,
        model=folder.name,
        visitor=lambda key: visitor if secrets.compare_digest(key.encode(), token.encode()) else None,
        tools=tool_format(usual.tool_format, model.tokenizer),
    )
    app = App(
        Service(base, sampler, Checkpoints(checkpoints.absolute(), base, str(folder))),
        thread,
        names=names_of(source),
        source=str(folder),
        token=token,
        door=door.app(),
    )
    return Opened(app=app, thread=thread)


def hold_base(folder: Path, checkpoints: Path) -> Sequence[str]:
    """Note in the run whose checkpoint is served that adapters are trained on it, so that it is kept.

    Returns:
        Notes on a run that cannot be written.
    """
    place, pins = checkpoint_place(folder.resolve()), Pins(checkpoints, "")
    if place is not None:
        pins.hold(place.run, f"step {place.step}", place.step)
    return pins.notes


def names_of(source: Path) -> frozenset[str]:
    """Return the names by which clients may call a model: its path, its folder, and owner/folder."""
    folder = source.absolute()
    return frozenset({str(source), str(folder), folder.name, "/".join(folder.parts[-2:]).lstrip("/")})


def serve(
    source: Path,
    *,
    port: int,
    token_file: Path | None,
    max_rows: int,
    checkpoints: Path | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal ends it; see ``TrainingServer``."""
    token = token_of(token_file)
    listening = bound(port)
    for note in hold_base(source, checkpoints or CHECKPOINTS):
        announce(f"note: {note}")
    found = opened(source, token=token.text, max_rows=max_rows, checkpoints=checkpoints or CHECKPOINTS)
    server = LoopbackServer(found.app.app(), listening)
    Thread(target=found.thread.run, args=[server.stop], name="rillflow-engine", daemon=True).start()
    url = server.url.removesuffix("/v1")
    announce(f"{source}: {url} (Tinker API), {server.url} (OpenAI's)")
    shown = token.text if token.is_new and token_file is None else f"$(cat {token_file})"
    announce(f"export TINKER_BASE_URL={url} TINKER_API_KEY=tml-{shown}")
    server.run()
    if found.thread.failure is not None:
        raise found.thread.failure
