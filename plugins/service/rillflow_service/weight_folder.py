"""Weight folder: the newest two versions of a policy's weights, as safetensors files without a size limit.

    stand-alone service   PUT weights/N/FILE ─> arriving/N/FILE ─ PUT weights?version=N: checked ─┐
    engine of a run       load(N) ────────────> arriving/N/FILE ──────────────────────────────────┤ publish
                                                                                                  v
                          readers <─ GET weights, weights/N/FILE ─ manifest.json, N/FILE; N - 2 is removed

A trainer of another project numbers its versions by publishes, from 0 on: the next one is the only one that
may arrive, so no request can skip ahead and block later ones. Every version has the names, types and shapes
of the one before, and finite values. A service that starts in the folder again serves what it served.

A run with a codec of weights also writes differences, from each version to the next. Several of them stay, so
that a program that is late can apply them one after the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rillflow.errors import WeightError
from rillflow.runs.durable import replace
from rillflow.serving.http_body import Declined

MAX_FILES = 4_096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
_MANIFEST, _ARRIVING, _DIFFERENCES = "manifest.json", "arriving", "differences"
KEPT_DIFFERENCES = 16
"""Most differences that are kept; all together are smaller than the whole weights, or only the last stays."""
Digest = dict[str, Any]
"""``bytes`` and ``sha256`` of a file."""


class WeightFolder:
    """Published weights.

    Args:
        folder: folder of the files; made if it does not exist.
        most_bytes: largest size of a version that arrives over HTTP.
    """

    def __init__(self, folder: Path, *, most_bytes: int = 2**63) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(folder / _ARRIVING, ignore_errors=True)
        self._manifest: dict[str, Any] = {"version": -1, "files": []}
        if (folder / _MANIFEST).exists():
            self._manifest = json.loads((folder / _MANIFEST).read_text())
        self._numbers = count(1)
        self._on_the_way: dict[int, int] = {}
        self.arrived: dict[str, Digest] = {}
        """Size and hash of each file of the version that is published next."""

    def differences(self, version: int) -> Path:
        """Return the folder of the files with the difference from the version before."""
        folder = self._folder / _DIFFERENCES / str(version)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

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
        if not found.is_file():
            found = self._folder / _DIFFERENCES / str(version) / name
        if not _NAME.fullmatch(name) or not found.is_file():
            what = f"version {version} of the weights has no file {name[:80]!r}"
            why = f"version {self.version} is the newest; the one before it is kept too"
            fix = "read GET /v1/weights again"
            raise Declined(410, what, why=why, fix=fix)
        return found

    def arriving(self, version: int) -> Path:
        """Return the folder of the files of a version that is not published yet."""
        folder = self._folder / _ARRIVING / str(version)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    async def receive(self, version: int, name: str, body: AsyncIterator[bytes]) -> int:
        """Store a file of the next version; return its size. A file that exists is replaced.

        Raises:
            Declined: it is not the next version, the name is invalid, or the version is too large.
        """
        self.require_next(version)
        folder = self.arriving(version)
        if not _NAME.fullmatch(name) or len([*folder.iterdir()]) >= MAX_FILES:
            why = f"at most {MAX_FILES} files, [A-Za-z0-9_.-]*.safetensors"
            raise Declined(422, f"{name[:80]!r} is no file name", why=why)
        number = next(self._numbers)
        written = folder / f"{name}.{number}.part"
        self._on_the_way[number], sha = 0, hashlib.sha256()
        try:
            with written.open("wb") as file:
                async for part in body:
                    self._on_the_way[number] += len(part)
                    self._check_size(version)
                    sha.update(part)
                    file.write(part)
            self.require_next(version)  # another client may have published it meanwhile
            written.replace(folder / name)
            self.arrived[name] = {"bytes": self._on_the_way[number], "sha256": sha.hexdigest()}
        except FileNotFoundError:  # its folder has just become the published one
            raise self._not_next(version) from None
        finally:
            size = self._on_the_way.pop(number)
            written.unlink(missing_ok=True)
        return size

    def require_next(self, version: int) -> None:
        """Raise Declined unless a version is the next one of a trainer that numbers its publishes."""
        if version != self.version + 1:
            raise self._not_next(version)

    def publish(self, version: int, names: Sequence[str], more: Mapping[str, Any] | None = None) -> None:
        """Check the files of a version, and serve them from now on.

        Args:
            version: the version.
            names: names of its files, which have arrived.
            more: further entries of the manifest; ``difference`` is added to the kept ``differences``.

        Raises:
            Declined: a file is missing, or no safetensors file.
            WeightError: its weights are not finite, or not those of the version before.
        """
        folder = self.arriving(version)
        files, weights = [], dict[str, Any]()
        for name in names:
            if name not in self.arrived:
                fix = f"PUT /v1/weights/{version}/FILE first"
                what = f"version {version} has no file {name[:80]!r}"
                raise Declined(422, what, why="it was not put", fix=fix)
            found = _checked(folder / name, version)
            if twice := weights.keys() & found.keys():
                raise WeightError(f"weight {min(twice)!r} is in two files", why="every weight is in one file")
            weights |= found
            files.append({"name": name, **self.arrived[name], "weights": sorted(found)})
        self._check_same(version, weights)
        kept = {str(version), str(self.version), _MANIFEST, _ARRIVING, _DIFFERENCES}
        said = dict(more or {})
        if "difference" in said:
            said["differences"] = self._kept_differences(said.pop("difference"), files)
        target = self._folder / str(version)
        shutil.rmtree(target, ignore_errors=True)
        folder.replace(target)
        self._manifest = {"version": version, "files": files, "types": weights, **said}
        replace(self._folder / _MANIFEST, [json.dumps(self._manifest).encode()])
        self.arrived.clear()
        for each in self._folder.iterdir():
            if each.name not in kept:
                shutil.rmtree(each, ignore_errors=True)

    def _kept_differences(
        self, newest: Mapping[str, Any] | None, files: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return the differences that stay, oldest first, and remove the files of the others."""
        before = [*self._manifest.get("differences", [])] if newest else []
        kept, room = list[Mapping[str, Any]](), sum(each["bytes"] for each in files)
        for each in [*before, *([newest] if newest else [])][::-1][:KEPT_DIFFERENCES]:
            room -= sum(file["bytes"] for file in each["files"])
            if kept and (room < 0 or each["version"] != kept[0]["from"]):
                break
            kept.insert(0, each)
        versions = {str(each["version"]) for each in kept}
        for folder in (self._folder / _DIFFERENCES).glob("*"):
            if folder.name not in versions:
                shutil.rmtree(folder, ignore_errors=True)
        return kept

    def _not_next(self, version: int) -> Declined:
        why = f"version {self.version} is published" if self.version >= 0 else "none is published"
        fix = f"put version {self.version + 1}: a version is the number of publishes, from 0 on"
        return Declined(409, f"weights of version {version} are not the next ones", why=why, fix=fix)

    def _check_size(self, version: int) -> None:
        arrived = sum(each["bytes"] for each in self.arrived.values())
        if sum(self._on_the_way.values()) + arrived > self._most_bytes:
            why = "that is the limit of this service"
            fix = "raise --weights-bytes"
            raise Declined(413, f"version {version} has more than {self._most_bytes} bytes", why=why, fix=fix)

    def _check_same(self, version: int, weights: Mapping[str, Any]) -> None:
        before = self._manifest.get("types", weights)
        if not weights:
            raise WeightError(f"version {version} has no weights", why="its files are empty")
        for name in sorted(before.keys() | weights.keys()):
            own, other = weights.get(name, "missing"), before.get(name, "no such weight")
            if own != other:
                what = f"weight {name[:80]!r} of version {version} is {own}"
                why, fix = f"version {self.version} has {other}", "publish the same weights in every version"
                raise WeightError(what, why=why, fix=fix)


def _checked(path: Path, version: int) -> dict[str, Any]:
    """Return types and shapes of a file's weights, which are all finite."""
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  the file is no mapping
                kind = file.get_slice(name)
                found[name] = [kind.get_dtype(), kind.get_shape()]
                weight = file.get_tensor(name)
                if weight.is_floating_point() and weight.numel() and not _is_finite(weight):
                    raise WeightError(
                        f"weight {name[:80]!r} of version {version} is not finite",
                        why="a program that samples with it returns no usable row",
                        fix="look at the trainer's last update; in a run: grad_norm, and skips.jsonl",
                    )
    except SafetensorError as error:
        what = f"{path.name} of version {version} is no safetensors file"
        why = str(error)
        fix = "put it again"
        raise Declined(422, what, why=why, fix=fix) from None
    return found


def _is_finite(weight: Any) -> bool:
    """Return whether all values are finite: the least and the largest one are NaN if any value is."""
    least, most = (weight.float() if weight.itemsize == 1 else weight).aminmax()
    return math.isfinite(least) and math.isfinite(most)
