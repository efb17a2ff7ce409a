"""WeightCopy: the weights of a run in this process's memory, kept up to date by exact differences.

    manifest ─ plan ─┬─ chain of differences from the held version, if smaller ─ decode ─┐
                     └─ whole files ─────────────────────────────────────────────────────┴─ digests ─> held
    damaged or late difference ─> whole files instead

Bytes are checked with the SHA-256 of the manifest before they are decoded. After differences, the SHA-256 of
every weight is checked too. Only then has the copy the new version. Values overwrite: nothing is added.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.sharding.codec import Codec, State
from rillflow_links.codecs.delta import CODEC
from rillflow_links.codecs.payload import read

TRIES = 5
"""Downloads of whole weights before damage counts as lasting."""
FetchFile = Callable[[int, str], bytes]
"""Returns a file of a version."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DamagedWeights(WeightError):
    """Weights that arrived damaged, or are no successor of the held ones."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """How a version of the weights arrived."""

    version: int
    """The version."""
    session: str
    """The run's life that published it."""
    base: int
    """Version that the differences began from; -1 for whole weights."""
    sent_bytes: int
    """Bytes of the files that were fetched, damaged ones included."""
    whole_bytes: int
    """Bytes of the whole files of this version."""
    changed: float
    """Share of the values that differ from the held version; NaN for the first."""
    fetch_s: float
    """Time to fetch and check."""


class WeightCopy:
    """Weights by their names in files, of the newest version that was fetched.

    Args:
        codec: decodes differences; None to fetch whole weights always.
        tell: shows a line to the user.
    """

    def __init__(self, codec: Codec | None, tell: Callable[[str], None]) -> None:
        self._codec, self._tell = codec, tell
        self.held: dict[str, Tensor] = {}
        """The weights; they change only in ``update``."""
        self.version, self.session = -1, ""
        """Version of the weights, and the run's life that published it; -1 while they are incomplete."""

    def update(self, manifest: Mapping[str, Any], fetch: FetchFile) -> WeightUpdate:
        """Fetch the version of a manifest.

        Raises:
            DamagedWeights: whole files arrived damaged ``TRIES`` times, or of another model.
            WeightsGone: the version is not kept any more: read the manifest again.
        """
        counter, began, changed = _Counted(fetch), time.monotonic(), math.nan
        is_known = self.version >= 0 and manifest.get("session", "") == self.session
        base = self.version if is_known else -1
        chain = self._chain(manifest) if is_known else None
        if chain is not None:
            try:
                changed = self._apply(chain, manifest, counter)
            except WeightError as error:
                self._tell(f"version {manifest['version']}: {error.what} ({error.why}); fetching it whole")
                chain = None
        if chain is None:
            base = -1
            changed = self._whole(manifest, counter)
        self.version, self.session = int(manifest["version"]), str(manifest.get("session", ""))
        return WeightUpdate(
            version=self.version,
            session=self.session,
            base=base,
            sent_bytes=counter.num_bytes,
            whole_bytes=_bytes(manifest["files"]),
            changed=changed,
            fetch_s=time.monotonic() - began,
        )

    def _chain(self, manifest: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return the differences from the held version on; None if whole files are needed or smaller."""
        if self._codec is None or not manifest.get("digests"):
            return None
        chain: list[Mapping[str, Any]] = []
        needed = int(manifest["version"])
        for each in reversed(manifest.get("differences", [])):
            if needed == self.version:
                break
            if each["version"] != needed:
                return None
            chain.insert(0, each)
            needed = each["from"]
        sent = sum(_bytes(each["files"]) for each in chain)
        return chain if chain and needed == self.version and sent < _bytes(manifest["files"]) else None

    def _apply(
        self, chain: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any], fetch: _Counted
    ) -> float:
        """Fetch and decode differences; return the share of values that changed."""
        assert self._codec is not None, "a chain needs a codec"
        files = [(each["version"], file) for each in chain for file in each["files"]]
        fetched = [fetch.checked(version, file) for version, file in files]
        digests, changed = manifest["digests"], 0
        self.version = -1  # until every digest is right
        for name, weight in self.held.items():
            before = weight.clone()
            for payload in (payloads[name] for payloads in fetched if name in payloads):
                self._codec.decode(payload, weight, _base_state(payload, weight))
            if _digest(weight) != digests.get(name):
                raise DamagedWeights(
                    f"{name} has another digest than the run's", why="a difference had another base"
                )
            changed += _differing(before, weight)
        return changed / max(1, sum(each.numel() for each in self.held.values()))

    def _whole(self, manifest: Mapping[str, Any], fetch: _Counted) -> float:
        """Fetch whole files over the held weights; return the share of values that changed."""
        arrived: dict[str, Tensor] = {}
        for file in manifest["files"]:
            for attempt in range(1, TRIES + 1):
                try:
                    arrived |= fetch.checked(int(manifest["version"]), file)
                    break
                except DamagedWeights:
                    if attempt == TRIES:
                        raise
        kinds = {name: (each.dtype, each.shape) for name, each in arrived.items()}
        known = {name: (each.dtype, each.shape) for name, each in self.held.items()}
        if known and kinds != known:
            raise DamagedWeights(
                f"version {manifest['version']} has other weights than the version before",
                why="names, types and shapes of a model never change",
                fix="join again: the run trains another model now",
            )
        changed = _changed(self.held, arrived) if known else math.nan
        self.version = -1
        if not known:
            self.held = arrived
        for name, each in arrived.items():
            self.held[name].copy_(each)
        return changed


class _Counted:
    """Fetches files, counts their bytes and checks their digests."""

    def __init__(self, fetch: FetchFile) -> None:
        self._fetch, self.num_bytes = fetch, 0

    def checked(self, version: int, file: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a file.

        Raises:
            DamagedWeights: its bytes are not those of the manifest.
        """
        name = str(file["name"])
        data = self._fetch(version, name)
        self.num_bytes += len(data)
        if len(data) != file["bytes"] or sha256(data).hexdigest() != file["sha256"]:
            raise DamagedWeights(
                f"{name} of version {version} arrived damaged",
                why=f"it has {len(data):,} bytes of {file['bytes']:,}, or another SHA-256 than the run's",
                fix="look at the connection: TCP does not lose bytes, but a proxy or a store may",
            )
        try:
            tensors: dict[str, Tensor] = safetensors.torch.load(data)
            return tensors
        except SafetensorError as error:
            raise DamagedWeights(f"{name} is no safetensors file", why=str(error)) from None


def _base_state(payload: Tensor, into: Tensor) -> State:
    """Return the state of a receiver that holds the base of a payload; digests prove it afterwards."""
    return {"number": torch.tensor(read(payload, CODEC, into).base)}


def _bytes(files: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(each["bytes"]) for each in files)


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return the share of values whose bits differ."""
    count = sum(each.numel() for each in after.values())
    return sum(_differing(before[name], each) for name, each in after.items()) / max(1, count)


def _differing(one: Tensor, other: Tensor) -> int:
    bits = _BITS[one.itemsize]
    return int((one.reshape(-1).view(bits) != other.reshape(-1).view(bits)).sum())


def _digest(weight: Tensor) -> str:
    """Return the SHA-256 of a weight's bytes, as the manifest has it."""
    return sha256(weight.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
