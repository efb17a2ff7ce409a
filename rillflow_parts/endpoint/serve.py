"""Serving: serve a model, or a run's newest checkpoint, over OpenAI's protocol.

run | model directory ─> model, engine ─ one thread: passes, newer checkpoints ─> EngineQueue ─> Door
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, Literal, cast

import torch

from rillflow.app.plugins import KIND, other_kind
from rillflow.app.trained import model_directory
from rillflow.config.load import validate
from rillflow.controller.checkpoint import latest_checkpoint
from rillflow.errors import RillflowError, StreamError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, choose_device, load_model
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import EngineLost
from rillflow.rollout.native.engine import native_engine
from rillflow.runs import layout
from rillflow.runs.layout import kept_steps
from rillflow.runs.reader import read_config
from rillflow.serving.http_body import Declined
from rillflow.serving.server import LoopbackServer, bound
from rillflow.serving.token import token_of
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_parts.endpoint.openai_server import Door, NewRows
from rillflow_parts.endpoint.text_scores import text_scores
from rillflow_parts.endpoint.tool_calls import ToolFormat, tool_format

FOLLOW_S = 2.0
"""Seconds between two checks for a newer checkpoint."""
_KEPT = ("temperature", "top_k", "top_p", "max_tokens", "stop", "tool_format")

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Served:
    """The served model, its requests, and the run that newer weights come from."""

    model: LanguageModel
    """Model that the engine runs."""
    config: ModelConfig
    """Config that the model was loaded with."""
    queue: EngineQueue
    """Queue of the requested rows."""
    tools: ToolFormat
    """Format in which the model writes tool calls."""
    run: Path | None
    """Run that is followed; None for a model."""
    looked: float = 0.0
    """Time of the last check of the run."""
    failure: RillflowError | None = None
    """Error that stopped the engine."""

    def serve(self, ended: Callable[[], None]) -> None:
        """Run engine passes as long as the process lives; an error of the engine ends the command.

        Args:
            ended: called when the engine has failed and every client has received an error.
        """
        try:
            while True:
                self._turn()
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = StreamError(
                "the engine failed, and the server stopped",
                why=f"{type(error).__name__}: {error}",
                fix="read the log, and start the command again",
            )
            self.failure.is_underway = True
            self.queue.fail(Declined(503, self.failure.what, self.failure.why, "try again later"))
            ended()

    def _turn(self) -> None:
        try:
            if self.run is not None and time.monotonic() - self.looked > FOLLOW_S:
                self._follow(self.run)
            if not self.queue.turn():
                wait([self.queue.woken], FOLLOW_S)
        except EngineLost:
            raise
        except RillflowError as error:
            logger.warning("%s", error)

    def _follow(self, run: Path) -> None:
        """Load a newer checkpoint, if there is one; running rows continue with its weights."""
        self.looked, folder = time.monotonic(), run / layout.CHECKPOINTS
        found = latest_checkpoint(folder) if max(kept_steps(folder), default=0) > self.queue.version else None
        if found is None:
            return
        held, path = dict(self.model.module.named_parameters()), str(found.model("policy").absolute())
        newer = load_model(
            self.config.model_copy(update={"path": path}), seed=0, device=self.model.device, base=Path()
        )
        with torch.no_grad():
            for name, weight in newer.module.named_parameters():
                held[name].copy_(weight)
        self.queue.load(found.step, held)


def serve(
    source: Path, *, port: int, token_file: Path | None, max_rows: int, announce: Callable[[str], None]
) -> None:
    """Serve until a signal ends it.

    Args:
        source: a run directory, whose newest checkpoint is served and followed; or a model's directory.
        port: port on the loopback device; 0 for a free one.
        token_file: file of the token that requests carry; made if it is missing. None makes a new token.
        max_rows: rows that run at once.
        announce: receives the address, and the token if no file holds it.

    Raises:
        RillflowError: there is no model, the port is taken, or the engine failed.
    """
    token = token_of(token_file)
    listening = bound(port)
    served, visitor = _opened(source, max_rows)
    door = Door(
        served.queue,
        model=source.absolute().name,
        visitor=lambda key: visitor if token.matches(key) else None,
        tools=served.tools,
        scores=partial(text_scores, served.model.module),
    )
    server = LoopbackServer(door.app(), listening)
    Thread(target=served.serve, args=[server.stop], name="rillflow-engine", daemon=True).start()
    newest = f", step {served.queue.version}" if served.run is not None else ""
    announce(f"{source}{newest}: {server.url}")
    if token.is_new:
        announce(f"token: {token.text}" if token_file is None else f"token: written to {token_file}")
    server.run()
    if served.failure is not None:
        raise served.failure


def _opened(source: Path, max_rows: int) -> tuple[_Served, NewRows]:
    """Load the model, and return it with the converter of requests to rows."""
    run, settings = None, dict[str, Any]()
    dtype: Literal["float32", "bfloat16"] = "float32"
    folder, version, task = source.absolute(), 0, TaskConfig()
    if layout.is_run_directory(source):
        run, config = source, cast(dict[str, Any], read_config(source))
        if KIND in config:
            raise other_kind(run, config[KIND])
        settings, dtype = config["rollout"], config["policy"]["model"]["dtype"]
        task = validate(TaskConfig, config["task"], str(run / layout.CONFIG))
        folder = model_directory(run, "policy").absolute()
        version = int(folder.parent.name.removeprefix("step-"))
    kept = {name: settings[name] for name in _KEPT if name in settings}
    usual = validate(RolloutConfig, {**kept, "max_rows": max_rows}, "the sampling settings")
    chosen = ModelConfig(path=str(folder), dtype=dtype)
    model = load_model(chosen, seed=0, device=choose_device("auto"), base=Path())
    engine = native_engine(model, usual, seed=0)  # a request's seed chooses the same numbers in every process
    queue = EngineQueue(engine, model.tokenizer, max_rows=max_rows, pauses=True)
    queue.load(version, {})
    tools = tool_format(usual.tool_format, model.tokenizer)
    served = _Served(model=model, config=chosen, queue=queue, tools=tools, run=run)
    today = task.model_copy(update={"clock": None})
    encoder = Encoder.of(model.tokenizer, today, model.context)
    return served, NewRows(encoder, usual, first=secrets.randbelow(2**48))
