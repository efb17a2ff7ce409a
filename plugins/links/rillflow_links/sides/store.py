"""Store: the folder, or place behind a URL, where sides and the merger meet.

    versions/000003.safetensors, .json         global weights; the json is written last and makes the version
    momentum/000003.safetensors                the merger's momentum
    claims/NAME.json, starts/NAME.safetensors  a side's run, and the weights that it began with
    contributions/NAME.STEP.BASE.safetensors   what a side trained; refused/... says why one is not merged
    merges.jsonl, merger.json                  a line for each version; the merger at work

Files are written once, under a temporary name that is then renamed. No machine's clock is compared with
another's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from rillflow.errors import RillflowError
from rillflow.runs.durable import replace, write_error


class SideError(RillflowError):
    """A store, a file in it, or a side that cannot be used."""


class SideStore:
    """Files by name in a folder or behind a URL.

    Args:
        url: a folder, or a URL that fsspec knows, such as ``s3://bucket/folder``.
    """

    def __init__(self, url: str) -> None:
        self.url = url.removeprefix("file://")
        self._is_local = "://" not in self.url
        self._files, self._root = fsspec.core.url_to_fs(self.url)

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if there is no such file.

        Raises:
            SideError: the store cannot be read.
        """
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreachable(name, error) from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file: its new content is there completely, or not at all.

        Raises:
            RillflowError: the store is full, read-only or unreachable.
        """
        path = f"{self._root}/{name}"
        if self._is_local:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise write_error(Path(path).parent, error) from error
            replace(Path(path), [data])
            return
        folder, _, file = path.rpartition("/")
        temporary = f"{folder}/.{file}.{os.getpid()}"
        try:
            self._files.makedirs(folder, exist_ok=True)
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, path)
        except OSError as error:
            raise self._unreachable(name, error) from error

    def names(self, folder: str, end: str) -> list[str]:
        """Return the sorted names of a folder's files without their common end; none if it is not there.

        Raises:
            SideError: the store cannot be read.
        """
        path = f"{self._root}/{folder}"
        try:
            self._files.invalidate_cache(path)
            files = [str(each).rpartition("/")[2] for each in self._files.ls(path, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreachable(folder, error) from error
        return sorted(each.removesuffix(end) for each in files if each.endswith(end) and each[0] != ".")

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        try:
            self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreachable(name, error) from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file's object; None if there is no such file.

        Raises:
            SideError: the file is damaged.
        """
        data = self.read(name)
        if data is None:
            return None
        try:
            value = json.loads(data)
        except ValueError as error:
            raise damaged(name, str(error)) from error
        if not isinstance(value, dict):
            raise damaged(name, "it is no JSON object")
        return value

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file; see ``write``."""
        self.write(name, json.dumps(value, sort_keys=True).encode())

    def newest(self) -> int:
        """Return the number of the newest complete version; -1 if there is none."""
        numbers = [int(each) for each in self.names("versions", ".json") if each.isdecimal()]
        return max(numbers, default=-1)

    def _unreachable(self, name: str, error: OSError) -> SideError:
        return SideError(
            f"{name} in the store {self.url} cannot be read or written",
            why=f"{type(error).__name__}: {error}",
            fix="check the address, the permissions and the network",
        )


def damaged(name: str, why: str) -> SideError:
    """Return the error for a file whose content is not what was written."""
    return SideError(f"{name} is damaged", why=why, fix="restore the file, or remove it")
