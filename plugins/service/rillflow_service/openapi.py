"""OpenAPI: the document of the stand-alone service, generated from the models of its requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from rillflow import __version__
from rillflow_service.requests import OF_STREAMS, Publish, Take

OPERATIONS = {model.__name__.lower(): model for model in OF_STREAMS}
"""Models of the requests by path."""
WITH_TENSORS = ("begin", "done", "drop")
"""Operations whose request is in the metadata of tensors."""
TENSORS = "application/x-safetensors"
JSON = "application/json"
_SCHEMAS = "#/components/schemas/"
_IN_METADATA = "The JSON is in the metadata under 'request'; tensors are columns, .rows, .tokens, .ids."


def openapi() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, Any] = {}
    for name, model in OPERATIONS.items():
        summary = f"{model.__doc__} {_IN_METADATA}" if name in WITH_TENSORS else f"{model.__doc__}"
        body = {TENSORS if name in WITH_TENSORS else JSON: {"schema": {"$ref": _SCHEMAS + model.__name__}}}
        paths[f"/v1/{name}"] = {"post": _operation(summary, body=body, maybe=model is Take)}
    query = {name: _parameter(name, "query", "integer") for name in ("version", "newer_than", "wait_s")}
    listed = {JSON: {"schema": {"$ref": _SCHEMAS + Publish.__name__}}}
    publish = _operation(
        "Publish the files of the next version.", query["version"], body=listed, more=("409",)
    )
    newest = ("Return the files of the newest version.", query["newer_than"], query["wait_s"])
    paths["/v1/weights"] = {"put": publish, "get": _operation(*newest, maybe=True)}
    at = (_parameter("version", "path", "integer"), _parameter("file", "path", "string"))
    send = ("Send a file of the next version.", *at)
    paths["/v1/weights/{version}/{file}"] = {
        "put": _operation(*send, body={TENSORS: {"schema": {}}}, more=("404", "409")),
        "get": _operation("Return a file.", *at, more=("404", "410")),
    }
    models = [(model, "validation") for model in (*OPERATIONS.values(), Publish)]
    _, told = models_json_schema(models, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
    token = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rillflow streams", "version": __version__},
        "paths": paths,
        "components": {"schemas": told["$defs"], "securitySchemes": {"token": token}},
        "security": [{"token": []}],
    }


def _operation(
    summary: str,
    *parameters: dict[str, Any],
    body: dict[str, Any] | None = None,
    maybe: bool = False,
    more: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return an operation; with ``maybe`` it may answer 204, and with ``more`` further errors."""
    error = {"description": "the error, its reason and a fix", "content": {JSON: {}}}
    responses: dict[str, Any] = {"200": {"description": "done"}}
    responses |= dict.fromkeys(("401", "408", "413", "422", "503", *more), error)
    if maybe:
        responses["204"] = {"description": "the stream has ended, or nothing newer came in time"}
    found = {"summary": summary, "parameters": list(parameters), "responses": responses}
    return found if body is None else {**found, "requestBody": {"content": body, "required": True}}


def _parameter(name: str, where: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}
