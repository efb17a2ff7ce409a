"""Servers: each in a process of its own on the loopback device, with a polite client's request."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from tests.fuzz.attacks import Target

NEW = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=512, alphabet="0123456789+=:asut ")
START_S = 300.0
END_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that answers."""

    target: Target
    """What attacks see of it."""
    process: subprocess.Popen[bytes]
    """Its process."""

    def memory(self, name: str) -> int:
        """Return VmRSS or VmHWM of the process, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", status)[0])

    def ended_s(self) -> float:
        """Send SIGTERM; return the seconds until the process has ended."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(END_S)
        return time.monotonic() - begin


class Polite:
    """A client that sends one ordinary request after another on a kept connection.

    Args:
        target: the server.
        path: path of its requests.
        body: body of its requests.
    """

    def __init__(self, target: Target, path: str, body: Mapping[str, Any]) -> None:
        self._target, self._path, self._body = target, path, json.dumps(body).encode()
        self._connection: HTTPConnection | None = None

    def once(self) -> float:
        """Send a request; return the seconds until the answer."""
        begin = time.monotonic()
        if self._connection is None:
            self._connection = HTTPConnection("127.0.0.1", self._target.port, timeout=120.0)
        headers = {"Authorization": f"Bearer {self._target.token}"}
        try:
            self._connection.request("POST", self._path, self._body, headers)
            answer = self._connection.getresponse()
            said = answer.read()
        except OSError:  # the connection was idle and is gone
            self._connection.close()
            self._connection = None
            raise
        assert answer.status == 200, (answer.status, said[:300])
        return time.monotonic() - begin


@contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[Running, Polite]]:
    """Run a server: ``door``, ``training`` or ``streams``; yield it with a polite client."""
    model, token = folder / "model", folder / "token"
    words = ["rillflow.cli.main", "serve", str(model), "--port", "0", "--token-file", str(token)]
    if name == "streams":
        words = ["rillflow_service", str(folder / "streams"), "--host", "127.0.0.1", "--port", "0"]
        token = folder / "streams" / "token"
    elif not model.exists():
        made = load_model(ModelConfig(new=NEW), seed=3, device=torch.device("cpu"), base=Path())
        save_model(made, model)
    if name == "training":
        words += ["--train", "--checkpoints", str(folder / "checkpoints")]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log)
    try:
        port = _port(process)
        target = _target(name, port, token.read_text().strip())
        path, body = POLITE[name]
        polite = Polite(target, path, body)
        polite.once()
        yield Running(target=target, process=process), polite
    finally:
        process.kill()
        process.wait()


def _port(process: subprocess.Popen[bytes]) -> int:
    """Return the port on which a process listens, once it does."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        sockets = {
            each.readlink().name for each in Path(f"/proc/{process.pid}/fd").iterdir() if each.is_symlink()
        }
        for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                port = int(words[1].rpartition(":")[2], 16)
                connection = HTTPConnection("127.0.0.1", port, timeout=START_S)
                connection.request("GET", "/health")
                connection.getresponse().read()
                connection.close()
                return port
        time.sleep(0.1)
    raise AssertionError(f"the server does not listen (exit status {process.poll()})")


POLITE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "door": ("/v1/completions", {"prompt": "1+2=", "max_tokens": 4, "temperature": 0}),
    "training": ("/api/v1/create_session", {"tags": [], "sdk_version": "0"}),
    "streams": (
        "/v1/create",
        {
            "stream": "s",
            "columns": {"x": {"dtype": "int64", "ragged": True}},
            "stages": [{"name": "a", "reads": ["x"]}],
            "capacity": 8,
        },
    ),
}
"""Path and body of the polite client's request, by server."""


def _target(name: str, port: int, token: str) -> Target:
    path, body = POLITE[name]
    how: dict[str, Any] = {"port": port, "token": token, "path": path, "body": body}
    if name == "door":
        return Target(
            **how, lists=("prompt", "stop"), numbers=("n", "temperature", "top_k", "max_tokens", "seed")
        )
    if name == "streams":
        return Target(**how, lists=("stages",), numbers=("capacity",))
    how |= {"path": "/api/v1/asample", "body": {"sampling_session_id": "none", "prompt": {"chunks": []}}}
    return Target(**how, lists=("prompt",), numbers=("num_samples", "seq_id", "prompt_logprobs_last_n"))
