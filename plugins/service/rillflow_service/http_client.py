"""HTTP client: access to the service for another engine's trainer or sampler; it imports no torch.

service = ServiceClient(folder, name="their sampler")
taken = service.take("rollouts", "sample", 8)
service.done(taken, {"tokens": (values, lengths)})
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import StreamError
from rillflow_service.requests import IDS, LENGTHS, ROWS, TOKENS
from rillflow_service.tensors import decoded, encoded

FILE_BYTES = 2**28
"""Size of a weight file, unless one weight is larger."""
Values = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
"""A dense column, or a ragged one as values and lengths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TakenGroups:
    """Groups that this client holds a lease on."""

    stream: str
    """Name of the stream."""
    lease: int
    """Number of the lease."""
    ids: NDArray[np.int64]
    """[N] group numbers."""
    rows: NDArray[np.int64]
    """[N] rows of each group."""
    columns: Mapping[str, Values]
    """Columns that the stage reads."""


class ServiceClient:
    """Requests to a service, one at a time.

    Args:
        folder: folder of a service on this machine, with its ``socket`` and ``token``.
        address: ``host:port`` of a remote service, with its ``token``.
        name: name of this client, which its leases belong to.
    """

    def __init__(self, folder: Path | None = None, *, address: str = "", token: str = "", name: str) -> None:
        self._folder = folder
        self._address = address
        self._token = (folder / "token").read_text() if folder else token
        self._name = name

    def create(
        self, stream: str, *, columns: Mapping[str, Any], stages: Sequence[Any], capacity: int
    ) -> None:
        """Create a stream; columns and stages as in the OpenAPI document."""
        self._json("create", stream=stream, columns=columns, stages=stages, capacity=capacity)

    def begin(
        self, stream: str, columns: Mapping[str, Values], *, rows: Sequence[int], **limits: Any
    ) -> list[int]:
        """Begin groups of the given numbers of rows with these columns; return the group numbers."""
        arrays = {ROWS: np.asarray(rows, np.int64), **_flat(columns)}
        ids: list[int] = json.loads(
            self._ask("POST", "begin", encoded({"stream": stream, **limits}, arrays))
        )["ids"]
        return ids

    def take(self, stream: str, stage: str, count: int, **limits: Any) -> TakenGroups | None:
        """Return up to ``count`` ready groups; None at the stream's end."""
        says = {"stream": stream, "stage": stage, "count": count, **limits}
        body = self._ask("POST", "take", json.dumps(says).encode())
        if not body:
            return None
        said, arrays = decoded(body)
        ids, rows, _ = (arrays.pop(name) for name in (IDS, ROWS, TOKENS))
        columns: dict[str, Values] = {
            name: (array, arrays[name + LENGTHS]) if name + LENGTHS in arrays else array
            for name, array in arrays.items()
            if not name.endswith(LENGTHS)
        }
        return TakenGroups(stream=stream, lease=said["lease"], ids=ids, rows=rows, columns=columns)

    def done(
        self, taken: TakenGroups, columns: Mapping[str, Values] | None = None, *, version: int | None = None
    ) -> None:
        """Complete the lease of the groups, and write the stage's columns of them."""
        own = {ROWS: taken.rows, **_flat(columns)} if columns else {}
        says = {"stream": taken.stream, "lease": taken.lease, "version": version}
        self._ask("POST", "done", encoded(says, {IDS: taken.ids, **own}))

    def close(self, stream: str) -> None:
        """Close the stream: no more groups begin."""
        self._json("look", stream=stream, action="close")

    def status(self, stream: str) -> dict[str, Any]:
        """Return counts by stage, and the stages that each waits for."""
        return self._json("look", stream=stream)

    def put_weights(self, version: int, weights: Mapping[str, NDArray[Any]]) -> None:
        """Publish the next version of the weights to the clients that wait for it, file by file."""
        files: list[list[str]] = [[]]
        for name in weights:
            held = sum(weights[each].nbytes for each in files[-1])
            if files[-1] and held + weights[name].nbytes > FILE_BYTES:
                files.append([])
            files[-1].append(name)
        names = [f"weights-{index:05d}.safetensors" for index in range(len(files))]
        for file, held_names in zip(names, files, strict=True):
            body = encoded({}, {name: weights[name] for name in held_names})
            self._ask("PUT", f"weights/{version}/{file}", body)
        self._ask("PUT", f"weights?version={version}", json.dumps({"files": names}).encode())

    def get_weights(
        self, *, newer_than: int = -1, wait_s: int = 60
    ) -> tuple[int, dict[str, NDArray[Any]]] | None:
        """Return the newest version and its weights; None if no newer one arrives in time."""
        body = self._ask("GET", f"weights?newer_than={newer_than}&wait_s={wait_s}", b"")
        if not body:
            return None
        manifest, arrays = json.loads(body), dict[str, NDArray[Any]]()
        for file in manifest["files"]:
            found = self._ask("GET", f"weights/{manifest['version']}/{file['name']}", b"")
            if sha256(found).hexdigest() != file["sha256"]:
                raise StreamError(f"{file['name']} arrived damaged", fix="get the weights again")
            arrays |= decoded(found, len(found))[1]
        return manifest["version"], arrays

    def _json(self, operation: str, **says: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ask("POST", operation, json.dumps(says).encode()))
        return found

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        connection = HTTPConnection(self._address or "localhost", timeout=700.0)
        headers = {"Authorization": f"Bearer {self._token}", "X-Rillflow-Client": self._name}
        try:
            if self._folder is not None:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.connect(str(self._folder / "socket"))
            connection.request(method, f"/v1/{path}", body, headers)
            answer = connection.getresponse()
            found = answer.read()
        except OSError as error:
            raise StreamError(f"the service does not answer {path}", why=str(error)) from None
        finally:
            connection.close()
        if answer.status >= 400:
            said = json.loads(found) if found[:1] == b"{" else {"what": f"{answer.status} {answer.reason}"}
            raise StreamError(**said)
        return found


def _flat(columns: Mapping[str, Values]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, tuple):
            arrays |= {name: column[0], name + LENGTHS: np.asarray(column[1], np.int64)}
        else:
            arrays[name] = column
    return arrays
