"""Locate: find a model before anything heavy is imported.

path ─> a directory under the recipe's folder | a name on the hub | an error with the paths tried
           └─ an adapter's, in PEFT's format ─> its base model
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from rillflow.config.user_paths import expanded
from rillflow.errors import ModelError
from rillflow.models.config import AdapterConfig
from rillflow.models.peft_settings import SETTINGS, WEIGHTS, AdapterSource, read_adapter
from rillflow.runs.bases import recorded_base

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def locate(path: str, base: Path) -> str:
    """Return the directory ``path`` under ``base``, or ``path`` itself if it can be a hub name.

    Raises:
        ModelError: it is a file, a missing directory, or the hub cannot be reached.
    """
    local = base / expanded(path)
    if local.is_dir():
        return str(local.resolve())
    if local.exists():
        raise ModelError(
            f"the model {path!r} is a file",
            why=f"a model is a directory with config.json and weights; {local.resolve()} is not one",
            fix="name the directory",
        )
    beside = "/" in path and local.parent.is_dir()
    if beside or not _HUB_NAME.fullmatch(path):
        raise ModelError(
            f"the model {path!r} is not there",
            why=f"there is no directory {local.resolve()}",
            fix="correct the path, which is relative to the recipe, or write a hub name as owner/name",
        )
    from huggingface_hub import try_to_load_from_cache  # a directory needs no hub library

    if not isinstance(try_to_load_from_cache(path, "config.json"), str):
        _require_hub(path, local)
    return path


def _require_hub(path: str, local: Path) -> None:
    """Resolve the hub's address first: without it, the library would retry for half a minute."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if getproxies():
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ModelError(
            f"the model {path!r} is not there",
            why=f"there is no directory {local.resolve()}; a hub name needs {host}: {error.strerror}",
            fix="correct the path, or connect to the network",
        ) from None


def found_adapter(source: str, wanted: AdapterConfig | None) -> AdapterSource | None:
    """Return a directory's adapter, or a new one for the directory's model; None for neither.

    Raises:
        ModelError: the settings cannot be read or are not supported; or the directory has an adapter and
            another one is wanted.
    """
    if not (Path(source) / SETTINGS).exists():
        return None if wanted is None else AdapterSource(base=source, config=wanted)
    adapter = read_adapter(Path(source))
    if wanted is not None:
        raise ModelError(
            f"the model {source} is an adapter, and the recipe adds another one",
            why="a run trains one adapter, and this directory already has it",
            fix=f"leave adapter out, or name its base: {adapter.base}",
        )
    return adapter


def base_of(source: str) -> str:
    """Return the result of ``locate``, or the base's directory or hub name if an adapter is there.

    An adapter of a run has the base that the run recorded, wherever it is now.

    Raises:
        ModelError: the base is gone, another model is in its place, or a file is missing.
    """
    adapter = found_adapter(source, None)
    if adapter is None:
        return source
    recorded = recorded_base(Path(source), Path(source) / adapter.base)
    base = locate(adapter.base, Path(source)) if recorded is None else str(recorded)
    if not (Path(source) / WEIGHTS).exists() or base == str(Path(source).resolve()):
        lacks = f"has no {WEIGHTS}" if base != str(Path(source).resolve()) else "names itself as its base"
        raise ModelError(
            f"the adapter {source} {lacks}",
            why=f"an adapter has {SETTINGS} and {WEIGHTS}, and a base model in another directory",
            fix="fetch the missing file, or name the model itself",
        )
    return base
