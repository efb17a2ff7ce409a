"""A served model, for tests over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from rillflow.serving.server import LoopbackServer, bound
from rillflow_training_service.app import App
from rillflow_training_service.server import opened

sys.path.insert(0, str(Path(__file__).parent))
from toys import saved_model

TOKEN = "a-token-of-the-tests"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server, and requests to it."""

    app: App
    """Its application."""
    model: Path
    """The model's directory."""
    http: httpx.Client
    """A client with the right key."""

    def post(self, name: str, **says: Any) -> dict[str, Any]:
        answer = self.http.post(f"/api/v1/{name}", json=says)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def result(self, told: dict[str, Any]) -> httpx.Response:
        """Return the result of a future."""
        while True:
            answer = self.http.post("/api/v1/retrieve_future", json={"request_id": told["request_id"]})
            if answer.status_code != 408:
                return answer

    def session(self) -> str:
        found: str = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
        return found

    def trained(self, session: str, number: int = 0, **lora: Any) -> str:
        """Return the id of a new model."""
        asked = {"session_id": session, "model_seq_id": number, "base_model": self.model.name}
        told = self.post("create_model", **asked, lora_config={"rank": 4, "seed": 1, **lora})
        found: str = self.result(told).json()["model_id"]
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = saved_model(folder / "tiny")
    found = opened(model, token=TOKEN, max_rows=32, checkpoints=folder / "checkpoints")
    Thread(target=found.thread.run, daemon=True).start()
    with LoopbackServer(found.app.app(), bound(0)) as server:
        url = server.url.removesuffix("/v1")
        with httpx.Client(base_url=url, headers={"X-API-Key": f"tml-{TOKEN}"}, timeout=60) as http:
            yield Served(app=found.app, model=model, http=http)
