"""Listing: training runs, sessions and checkpoints, as clients list and delete them."""

from __future__ import annotations

import os
import tarfile
import tempfile
from asyncio import to_thread
from collections.abc import Callable
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from rillflow.errors import DataError
from rillflow.serving.http_body import Declined, checked_request, json_object
from rillflow.serving.request_reader import RequestReader
from rillflow_training_service import requests
from rillflow_training_service.checkpoints import CheckpointPath, Checkpoints, now
from rillflow_training_service.sessions import Model, Sessions, listed

_MOST_BYTES = 2**16
"""Largest body of a request here."""


class Listing:
    """The endpoints that list.

    Args:
        sessions: the clients and their models.
        checkpoints: the checkpoints.
        names: names of the base model.
        context: longest row in tokens.
        reader: reads the bodies of requests.
    """

    def __init__(
        self,
        sessions: Sessions,
        checkpoints: Checkpoints,
        names: list[str],
        context: int,
        reader: RequestReader,
    ) -> None:
        self._sessions, self._checkpoints, self._names, self._context = sessions, checkpoints, names, context
        self._reader = reader

    def routes(self, guarded: Callable[..., Any]) -> list[Route]:
        """Return the routes."""
        run = "/api/v1/training_runs/{run}"
        one = f"{run}/checkpoints/{{checkpoint:path}}"
        gets = {
            "/api/v1/get_server_capabilities": self._capabilities,
            "/api/v1/samplers/{name}": self._sampler,
            "/api/v1/sessions": self._all_sessions,
            "/api/v1/sessions/{name}": self._session,
            "/api/v1/training_runs": self._runs,
            run: self._run,
            f"{run}/checkpoints": self._of_run,
            f"{one}/archive": self._archive,
            "/api/v1/checkpoints": self._all,
        }
        return [
            *(Route(path, guarded(each), methods=["GET"]) for path, each in gets.items()),
            Route("/api/v1/weights_info", guarded(self._weights_info), methods=["POST"]),
            Route(f"{one}/ttl", guarded(self._expire), methods=["PUT"]),
            Route(one, guarded(self._delete), methods=["DELETE"]),
        ]

    async def _capabilities(self, request: Request) -> Response:
        del request
        about = {"max_context_length": self._context, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **about} for name in self._names]})

    async def _sampler(self, request: Request) -> Response:
        found = self._sessions.sampler(request.path_params["name"])
        return JSONResponse(
            {"sampler_id": found.name, "base_model": found.base_model, "model_path": found.path}
        )

    async def _all_sessions(self, request: Request) -> Response:
        page, _ = listed([name for name in self._sessions.all if name], request.query_params)
        return JSONResponse({"sessions": page})

    async def _session(self, request: Request) -> Response:
        found = self._sessions.all.get(request.path_params["name"])
        if found is None:
            raise Declined(404, "there is no such session")
        runs = {"training_run_ids": [*found.models], "sampler_ids": [*found.samplers]}
        return JSONResponse({**runs, "user_metadata": found.metadata or None})

    async def _runs(self, request: Request) -> Response:
        models = [each for session in self._sessions.all.values() for each in session.models.values()]
        known = {each.name for each in models}
        paths = await to_thread(self._checkpoints.paths)
        older = dict.fromkeys(each.model for each in paths if each.model not in known)
        page, cursor = listed([*models, *older], request.query_params)
        told = [await (self._told(one) if isinstance(one, Model) else self._of_disk(one)) for one in page]
        return JSONResponse({"training_runs": told, "cursor": cursor})

    async def _run(self, request: Request) -> Response:
        name = request.path_params["run"]
        try:
            told = await self._told(self._sessions.model(name))
        except DataError:
            told = await self._of_disk(name)
        return JSONResponse(told)

    async def _told(self, model: Model) -> dict[str, Any]:
        return {
            "training_run_id": model.name,
            "base_model": model.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": model.shape.rank,
            "last_request_time": model.last_request,
            "user_metadata": {key: str(value) for key, value in model.metadata.items()} or None,
            **await self._last(model.name),
        }

    async def _of_disk(self, name: str) -> dict[str, Any]:
        """Return a run of which only checkpoints are left."""
        paths = await to_thread(self._checkpoints.paths, name)
        if not paths:
            raise Declined(404, f"there is no training run {name[:120]!r}")
        about = await to_thread(self._checkpoints.newest, paths)
        return {
            "training_run_id": name,
            "base_model": "" if about is None else about.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": None if about is None else about.shape.rank,
            "last_request_time": now() if about is None else about.time,
            **await self._last(name),
        }

    async def _last(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"last_checkpoint": None, "last_sampler_checkpoint": None}
        for path in await to_thread(self._checkpoints.paths, name):
            key = "last_checkpoint" if path.kind == "weights" else "last_sampler_checkpoint"
            found[key] = await to_thread(self._checkpoints.told, path)
        return found

    async def _of_run(self, request: Request) -> Response:
        return await self._page(request, request.path_params["run"])

    async def _all(self, request: Request) -> Response:
        return await self._page(request, None)

    async def _page(self, request: Request, run: str | None) -> Response:
        paths = await to_thread(self._checkpoints.paths, run)
        query = request.query_params if run is None else {"limit": str(len(paths))}
        page, cursor = listed(paths, query)
        told = [await to_thread(self._checkpoints.told, path) for path in page]
        return JSONResponse({"checkpoints": told, "cursor": cursor})

    async def _weights_info(self, request: Request) -> Response:
        asked = await self._read(requests.OfPath, request)
        about = await to_thread(self._checkpoints.about, CheckpointPath.parsed(asked.tinker_path))
        shape = about.shape
        return JSONResponse(
            {
                "base_model": about.base_model,
                "is_lora": True,
                "lora_rank": shape.rank,
                "train_attn": shape.attention,
                "train_mlp": shape.mlp,
                "train_unembed": shape.unembed,
            }
        )

    async def _delete(self, request: Request) -> Response:
        await to_thread(self._checkpoints.delete, _path(request))
        return Response(status_code=204)

    async def _expire(self, request: Request) -> Response:
        asked = await self._read(requests.Expiry, request)
        await to_thread(self._checkpoints.expire, _path(request), asked.ttl_seconds)
        return Response(status_code=204)

    async def _archive(self, request: Request) -> Response:
        path = _path(request)
        await to_thread(self._checkpoints.about, path)
        packed = await to_thread(self._packed, path)
        return FileResponse(
            packed, media_type="application/x-tar", background=BackgroundTask(os.unlink, packed)
        )

    def _packed(self, path: CheckpointPath) -> str:
        """Write a checkpoint as a tar archive, and return the path of the archive."""
        with tempfile.NamedTemporaryFile(suffix=".tar", delete=False) as written:
            with tarfile.open(fileobj=written, mode="w") as archive:
                for file in sorted(self._checkpoints.folder(path).iterdir()):
                    archive.add(file, arcname=file.name)
            return written.name

    async def _read(self, kind: type[requests.R], request: Request) -> requests.R:
        """Return a request of this kind."""
        return checked_request(kind, json_object(await self._reader.body(request, _MOST_BYTES)))


def _path(request: Request) -> CheckpointPath:
    run, checkpoint = request.path_params["run"], request.path_params["checkpoint"]
    return CheckpointPath.parsed(f"tinker://{run}/{checkpoint}")
