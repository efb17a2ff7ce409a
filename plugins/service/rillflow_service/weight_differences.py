"""Weight differences: what changed from one version of the weights to the next, as files beside whole ones.

    load(N) ─ tensors of a file ─┬─> model.safetensors            whole, the newest two versions
                                 ├─ Codec.encode ─> delta-model.safetensors: a payload [bytes] by weight
                                 └─ SHA-256 ─> digests of the manifest: a program checks what it decoded

The codec comes from the recipe, through the core's ``EdgeCodecs``; this plugin knows none by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from rillflow.models.model_files import write_tensors
from rillflow.sharding.codec import Codec, State
from rillflow_service.weight_folder import WeightFolder

PREFIX = "delta-"
"""Beginning of the name of a file with differences; the rest is the name of the whole file."""


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a contiguous tensor's bytes, in host memory."""
    return sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


class WeightDifferences:
    """Writes the difference of every version from the one before.

    Args:
        codec: codec of the weights; one state for each weight is kept here.
        weights: folder of the published weights.
    """

    def __init__(self, codec: Codec, weights: WeightFolder) -> None:
        self._codec, self._weights = codec, weights
        self._states: dict[str, State] = {}
        self._encoded = -1
        self._files: list[dict[str, Any]] = []
        self._digests: dict[str, str] = {}

    def add(self, version: int, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Encode the weights of a file; write the payloads if the version before was encoded too.

        Args:
            version: the version that is published next.
            file: name of the whole file.
            tensors: its weights, contiguous in host memory.

        Raises:
            OSError: the disk fails.
        """
        payloads = {
            name: self._codec.encode(each, self._states.setdefault(name, {}))
            for name, each in tensors.items()
        }
        self._digests |= {name: tensor_digest(each) for name, each in tensors.items()}
        if self._begins(version):
            return
        name = f"{PREFIX}{file}"
        written = write_tensors(self._weights.differences(version) / name, payloads)
        self._files.append({"name": name, **written})

    def finish(self, version: int) -> dict[str, Any]:
        """Return the manifest's entries of a version whose files are all added."""
        entry = {"version": version, "from": self._encoded, "files": self._files}
        said = {"digests": self._digests, "difference": None if self._begins(version) else entry}
        self._encoded, self._files, self._digests = version, [], {}
        return said

    def _begins(self, version: int) -> bool:
        """Return whether no earlier version is the base of this one's difference."""
        return not -1 < self._encoded < version
