"""Weight folder: the newest two versions of a trainer's weights as safetensors files, without a size limit.

    PUT weights/N/FILE ─> arriving/N/FILE ─┐
    PUT weights?version=N ─────────────────┴─ checked ─> N/FILE, manifest.json ─> readers; N - 2 is removed

A version is the number of publishes, from 0 on: the next one is the only one that may arrive, so no request
can skip ahead and block later ones. It has the names, types and shapes of the version before, and finite
values. A service that starts in the folder again serves the version that it served.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from rillflow.serving.http_body import Declined
from rillflow_service.tensors import decoded, entries

MAX_FILES = 4_096
MAX_HEADER_BYTES = 2**26
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
_MANIFEST, _ARRIVING = "manifest.json", "arriving"
_LOOK = 2**22
"""Values that are checked at once for being finite."""
_FLOATS = {"F16": None, "F32": None, "F64": None, "BF16": 0x7F80}
"""Types with values that are not finite, and the bits of them where numpy lacks the type."""


class WeightFolder:
    """The published weights of a service.

    Args:
        folder: folder of the files; made if it does not exist.
        most_bytes: largest size of a version.
    """

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(folder / _ARRIVING, ignore_errors=True)
        self._manifest: dict[str, Any] = {"version": -1, "files": []}
        if (folder / _MANIFEST).exists():
            self._manifest = json.loads((folder / _MANIFEST).read_text())
        self._numbers = count(1)
        self._on_the_way: dict[int, int] = {}
        self._arrived: dict[str, int] = {}

    @property
    def version(self) -> int:
        """Newest version; -1 before the first."""
        return int(self._manifest["version"])

    def manifest(self, newer_than: int) -> dict[str, Any] | None:
        """Return version and files as JSON; None if the newest is not newer."""
        return self._manifest if self.version > newer_than else None

    def path(self, version: int, name: str) -> Path:
        """Return the path of a published file.

        Raises:
            Declined: there is no such file, or its version is not kept any more.
        """
        found = self._folder / str(version) / name
        if not _NAME.fullmatch(name) or not found.is_file():
            raise Declined(
                410,
                f"version {version} of the weights has no file {name[:80]!r}",
                why=f"version {self.version} is the newest; the one before it is kept too",
                fix="read GET /v1/weights again",
            )
        return found

    async def receive(self, version: int, name: str, body: AsyncIterator[bytes]) -> int:
        """Store a file of the next version; return its size. A file that exists is replaced.

        Raises:
            Declined: it is not the next version, the name is invalid, or the version is too large.
        """
        self._check_next(version)
        folder = self._folder / _ARRIVING / str(version)
        if not _NAME.fullmatch(name) or (folder.exists() and len([*folder.iterdir()]) >= MAX_FILES):
            raise Declined(
                422,
                f"{name[:80]!r} is no file name",
                why=f"at most {MAX_FILES} files, [A-Za-z0-9_.-]*.safetensors",
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = next(self._numbers)
        written = folder / f"{name}.{number}.part"
        self._on_the_way[number] = 0
        try:
            with written.open("wb") as file:
                async for part in body:
                    self._on_the_way[number] += len(part)
                    self._check_size(version)
                    file.write(part)
            self._check_next(version)  # another client may have published it meanwhile
            written.replace(folder / name)
            self._arrived[name] = self._on_the_way[number]
        except FileNotFoundError:  # its folder has just become the published one
            raise self._not_next(version) from None
        finally:
            size = self._on_the_way.pop(number)
            written.unlink(missing_ok=True)
        return size

    def publish(self, version: int, names: Sequence[str]) -> None:
        """Check the files of the next version, and serve them from now on.

        Raises:
            Declined: it is not the next version, a file is missing, or its weights are not those expected.
            WireError: a file is no safetensors file.
        """
        self._check_next(version)
        folder = self._folder / _ARRIVING / str(version)
        files, weights = [], dict[str, Any]()
        for name in names:
            if not _NAME.fullmatch(name) or not (folder / name).is_file():
                raise Declined(
                    422,
                    f"version {version} has no file {name[:80]!r}",
                    why="it was not put",
                    fix=f"PUT /v1/weights/{version}/FILE first",
                )
            found, sha256 = _checked(folder / name, version)
            if twice := weights.keys() & found.keys():
                raise Declined(
                    422, f"weight {min(twice)!r} is in two files", why="every weight is in one file"
                )
            weights |= found
            size = (folder / name).stat().st_size
            files.append({"name": name, "bytes": size, "sha256": sha256, "weights": sorted(found)})
        self._check_same(version, weights)
        target = self._folder / str(version)
        shutil.rmtree(target, ignore_errors=True)
        folder.replace(target)
        self._manifest = {"version": version, "files": files, "types": weights}
        written = self._folder / f"{_MANIFEST}.part"
        written.write_text(json.dumps(self._manifest))
        written.replace(self._folder / _MANIFEST)
        self._arrived.clear()
        shutil.rmtree(self._folder / str(version - 2), ignore_errors=True)

    def _check_size(self, version: int) -> None:
        if sum(self._on_the_way.values()) + sum(self._arrived.values()) > self._most_bytes:
            raise Declined(
                413,
                f"version {version} has more than {self._most_bytes} bytes",
                why="that is the limit of this service",
                fix="raise --weights-bytes",
            )

    def _check_next(self, version: int) -> None:
        if version != self.version + 1:
            raise self._not_next(version)

    def _not_next(self, version: int) -> Declined:
        return Declined(
            409,
            f"weights of version {version} are not the next ones",
            why=f"version {self.version} is published" if self.version >= 0 else "none is published",
            fix=f"put version {self.version + 1}: a version is the number of publishes, from 0 on",
        )

    def _check_same(self, version: int, weights: dict[str, Any]) -> None:
        before = self._manifest.get("types", weights)
        if not weights:
            raise Declined(422, f"version {version} has no weights", why="its files are empty")
        for name in sorted(before.keys() ^ weights.keys()):
            is_new = name in weights
            raise Declined(
                422,
                f"version {version} {'has' if is_new else 'lacks'} the weight {name[:80]!r}",
                why=f"version {self.version} {'does not have it' if is_new else 'has it'}",
                fix="publish the same weights in every version",
            )
        for name, kind in weights.items():
            if kind != before[name]:
                raise Declined(
                    422,
                    f"weight {name[:80]!r} is {kind} in version {version}",
                    why=f"it was {before[name]} before",
                )


def _checked(path: Path, version: int) -> tuple[dict[str, Any], str]:
    """Return types and shapes of a file's weights, all finite, and its digest."""
    if not path.stat().st_size:
        raise Declined(422, f"{path.name} of version {version} is empty", why="it is no safetensors file")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last array of it
    arrays, kinds = decoded(data, MAX_HEADER_BYTES)[1], entries(data)
    for name, array in arrays.items():
        if kinds[name][0] in _FLOATS and not _is_finite(array.reshape(-1), _FLOATS[kinds[name][0]]):
            raise Declined(
                422,
                f"weight {name[:80]!r} of version {version} is not finite",
                why="a program that samples with it returns no usable row",
                fix="look at the trainer's last update",
            )
    return kinds, hashlib.sha256(data).hexdigest()


def _is_finite(values: np.ndarray[Any, Any], bits: int | None) -> bool:
    parts = (values[start : start + _LOOK] for start in range(0, len(values), _LOOK))
    if bits is None:
        return all(bool(np.isfinite(part).all()) for part in parts)
    return all(bool(((part & bits) != bits).all()) for part in parts)
