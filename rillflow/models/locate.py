"""Locate: where a model is, said before anything heavy is imported.

path ─> a directory under the recipe's folder | a name of the hub | an error that says where was looked
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from rillflow.errors import ModelError

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def locate(path: str, base: Path) -> str:
    """The directory ``path`` under ``base``, or ``path`` itself where it can be a hub name.

    Raises:
        ModelError: a file, a directory that is not there, or a hub that cannot be reached.
    """
    local = base / Path(path).expanduser()
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
            fix="paths are relative to the recipe; a hub name is written owner/name",
        )
    from huggingface_hub import try_to_load_from_cache  # a directory needs none of the hub

    if not isinstance(try_to_load_from_cache(path, "config.json"), str):
        _require_hub(path, local)
    return path


def _require_hub(path: str, local: Path) -> None:
    """Ask for the hub's address first: the library would try for half a minute."""
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
