"""Published weights: a version of the module's own weights as safetensors files, read where they lie.

    load: names, sizes and SHA-256 of every file ─> manifest
    a client ─ file by file ─> 4 MiB of the module's memory at a time ─> hashed again ─> the last part only
                                                                          if the hash is the manifest's

There is no second copy. A trainer that takes its memory back waits for one part at most; a reader is then cut
off. So is a reader of a file whose weights changed meanwhile: it never gets the whole file, and a file that
arrived whole is the published one. ``is_read`` lets the engine hold the next version back for its readers.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.models.model_files import file_weights, header, shard_file, shards
from rillflow.serving.http_body import Declined

PART_BYTES = 2**22
STALLED_S = 5.0
"""Seconds without a part after which a reader no longer counts."""
BETWEEN_FILES_S = 1.0
"""Seconds for which a reader of one of several files counts as reading the next."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightFile:
    """One file of a version."""

    name: str
    """Its name in a model's directory."""
    weights: tuple[str, ...]
    """The module's weights in it."""
    num_bytes: int
    """Its size."""
    sha256: str
    """Digest of all its bytes."""


class PublishedWeights:
    """The newest version of the weights, for readers in other threads.

    Args:
        module: the transformers module whose weights are served.
        shard_bytes: size of a file, if no layer is larger.
    """

    def __init__(self, module: Any, *, shard_bytes: int = 2**29) -> None:
        self._module, self._shard_bytes = module, shard_bytes
        self._lock = Lock()
        self._weights: Mapping[str, Tensor] = {}
        self._files: list[WeightFile] = []
        self._is_asleep = True
        self._total = 0
        self._readers: dict[object, float] = {}
        self._read_at = -math.inf
        self.version = -1
        """Newest version; -1 before the first."""

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Publish the weights, which stay in their memory.

        Raises:
            WeightError: a weight has a value that is not finite.
        """
        for name, weight in weights.items():
            if weight.is_floating_point() and not bool(weight.detach().isfinite().all()):
                raise WeightError(
                    f"weight {name} of version {version} is not finite",
                    why="a program that samples with it returns no usable row",
                    fix="look at the last update: grad_norm and skips.jsonl of the run",
                )
        with self._lock:
            self._weights, self._is_asleep = {name: each.detach() for name, each in weights.items()}, False
        sizes = {name: each.nbytes for name, each in self._weights.items()}
        names = shards(sizes, self._shard_bytes)
        files = []
        for index, each in enumerate(names):
            sha, count = hashlib.sha256(), 0
            for part in self._parts(each):
                sha.update(part)
                count += len(part)
            name = shard_file(index, len(names))
            files.append(WeightFile(name=name, weights=tuple(each), num_bytes=count, sha256=sha.hexdigest()))
        self._files, self._total, self.version = files, sum(each.num_bytes for each in files), version

    def sleep(self) -> None:
        """Cut readers off: the trainer takes the memory."""
        with self._lock:
            self._is_asleep = True

    def wake(self) -> None:
        """Let readers read again."""
        with self._lock:
            self._is_asleep = self.version < 0

    @property
    def is_read(self) -> bool:
        """Whether somebody reads a file now, or has just read one of several."""
        now = time.monotonic()
        is_between = len(self._files) > 1 and now - self._read_at < BETWEEN_FILES_S
        return is_between or any(now - at < STALLED_S for at in [*self._readers.values()])

    def manifest(self, newer_than: int = -1) -> dict[str, Any] | None:
        """Return version, files and weights as JSON; None while no newer version can be read."""
        if self._is_asleep or self.version <= newer_than:
            return None
        files = [
            {"name": each.name, "bytes": each.num_bytes, "sha256": each.sha256, "weights": each.weights}
            for each in self._files
        ]
        return {"version": self.version, "bytes": self._total, "files": files}

    def file(self, version: int, name: str) -> WeightFile:
        """Return a file of the newest version.

        Raises:
            Declined: there is no such file, or the version cannot be read.
        """
        if self._is_asleep or version != self.version:
            raise self._gone(version)
        for each in self._files:
            if each.name == name:
                return each
        raise Declined(
            404,
            f"version {version} has no file {name[:80]!r}",
            why=f"it has {len(self._files)} files",
            fix="read GET /v1/weights",
        )

    def read(self, version: int, file: WeightFile) -> Iterator[bytes]:
        """Yield a file's bytes, the last part only if all of them are the published ones.

        Raises:
            Declined: the version was replaced, or the trainer took the memory.
        """
        sha, held, reader = hashlib.sha256(), b"", object()
        try:
            for part in self._parts(file.weights, version):
                self._readers[reader] = time.monotonic()
                sha.update(part)
                yield held
                held = part
            if sha.hexdigest() != file.sha256:
                raise self._gone(version)
            yield held
        finally:
            self._read_at = self._readers.pop(reader, -math.inf)

    def _parts(self, names: Iterable[str], version: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a file: its header, then its tensors."""
        with self._lock:
            tensors = file_weights(self._module, {name: self._weights[name] for name in names})
        first, order = header({name: (each.dtype, each.shape) for name, each in tensors.items()})
        yield first
        for name in order:
            data = tensors[name].reshape(-1)
            count = max(1, PART_BYTES // data.element_size())
            for start in range(0, len(data), count):
                with self._lock:
                    if self._is_asleep or version not in (None, self.version):
                        raise self._gone(self.version if version is None else version)
                    part = data[start : start + count].view(torch.uint8).cpu().numpy().tobytes()
                yield part

    def _gone(self, version: int) -> Declined:
        now = "the trainer has the memory" if self._is_asleep else f"version {self.version} is published"
        return Declined(
            410, f"version {version} of the weights is not served", why=now, fix="read GET /v1/weights again"
        )
