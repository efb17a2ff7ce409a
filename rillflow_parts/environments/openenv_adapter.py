"""Adapter of OpenEnv: a server's environment as a class with ``reset`` and ``step``.

    reset(**columns) ─ WebSocket ─> server ── observation ──> its text field, or all fields as JSON
    step(text) ───── {field: text} ─> server ── observation, reward, done

Each row has a session of its own on the server. It is loaded by path in a child process, and needs the
package openenv-core.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any
from urllib.request import ProxyHandler, build_opener

from openenv.core.generic_client import GenericEnvClient

_NO_TEXT = {"done", "reward", "metadata"}


class OpenEnvironment:
    """One session on an OpenEnv server.

    Args:
        url: address of the server.
        action: field of an action that takes the policy's text; the only required text by default.
        observation: field of an observation that is shown; the only text by default, else all fields as JSON.
        timeout_s: longest time in seconds that the client waits for an answer.
    """

    def __init__(
        self, url: str, action: str | None = None, observation: str | None = None, timeout_s: float = 3600.0
    ) -> None:
        schemas = _schemas(url.rstrip("/"))
        self._action = action or _only_text("action", schemas["action"], "an action")
        self._observation = observation or _text_field(schemas["observation"])
        self._client = GenericEnvClient(base_url=url, message_timeout_s=timeout_s)

    def reset(self, **columns: Any) -> str:
        """Begin an episode; the server's ``reset`` gets the row's columns that it takes, such as ``seed``."""
        columns.pop("prompt", None)
        self._client.connect()
        return self._shown(self._client.reset(**columns).observation)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send the policy's turn."""
        result = self._client.step({self._action: text})
        return self._shown(result.observation), float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _shown(self, observation: dict[str, Any]) -> str:
        if self._observation is None:
            return json.dumps({name: each for name, each in observation.items() if name not in _NO_TEXT})
        if self._observation not in observation:
            names = ", ".join(observation)
            raise KeyError(f"the observation has no field {self._observation!r}; it has {names}")
        return str(observation[self._observation])


@cache
def _schemas(url: str) -> dict[str, Any]:
    with build_opener(ProxyHandler({})).open(f"{url}/schema", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _texts(schema: dict[str, Any]) -> list[str]:
    fields = schema.get("properties", {}).items()
    return [name for name, each in fields if name not in _NO_TEXT and each.get("type") == "string"]


def _text_field(schema: dict[str, Any]) -> str | None:
    found = _texts(schema)
    return found[0] if len(found) == 1 else None


def _only_text(argument: str, schema: dict[str, Any], what: str) -> str:
    required = [name for name in _texts(schema) if name in schema.get("required", ())] or _texts(schema)
    if len(required) != 1:
        names = ", ".join(schema.get("properties", {}))
        raise ValueError(
            f"{what} of this server has {len(required)} text fields, so the argument {argument!r} must name "
            f"the one for the policy's text; its fields are {names}"
        )
    return required[0]
