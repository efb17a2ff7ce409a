"""Packed: tensors and facts as the bytes of one safetensors file that proves its own content.

tensors, facts ─ pack ─> safetensors, header: facts, SHA-256 of both ─ unpack ─> tensors, facts, or an error
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rillflow_links.sides.rules import Contribution
from rillflow_links.sides.store import SideError, SideStore, damaged

Tensors = Mapping[str, Tensor]
KEY = "rillflow"
"""Key of the facts and the SHA-256 in the header."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedFile:
    """The content of a packed file."""

    tensors: dict[str, Tensor]
    """Tensors by name."""
    facts: dict[str, Any]
    """Facts about the tensors."""


def pack(tensors: Tensors, facts: Mapping[str, Any]) -> bytes:
    """Return the file's bytes; equal content gives equal bytes."""
    held = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    said = json.dumps(facts, sort_keys=True)
    stated = json.dumps([said, _digest(held, said)])  # one key, since safetensors does not sort them
    return bytes(save(held, metadata={KEY: stated}))


def unpack(data: bytes, name: str) -> PackedFile:
    """Return the content of a packed file.

    Raises:
        SideError: the bytes are not those of a packed file, or have changed.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        said, stated = json.loads(header["__metadata__"][KEY])
        tensors, facts = load(data), json.loads(said)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(name, f"{type(error).__name__}: {error}") from error
    if _digest(tensors, said) != stated or not isinstance(facts, dict):
        raise damaged(name, "its content has another SHA-256 than its header states")
    return PackedFile(tensors=tensors, facts=facts)


def read_version(store: SideStore, number: int) -> dict[str, Tensor]:
    """Return the weights of a version.

    Raises:
        SideError: they are missing or damaged.
    """
    name = f"versions/{number:06d}"
    record, data = store.read_json(f"{name}.json"), store.read(f"{name}.safetensors")
    if record is None or data is None:
        raise damaged(name, "the version or its record is missing")
    if sha256(data) != record.get("sha256"):
        raise damaged(f"{name}.safetensors", "its SHA-256 differs from its record")
    return unpack(data, name).tensors


def contribution_of(name: str, facts: Mapping[str, Any]) -> Contribution:
    """Return the contribution that a file's facts describe.

    Raises:
        SideError: a fact is missing, or the facts are another file's.
    """
    side, base, step, tokens = (facts.get(key) for key in ("side", "base", "step", "tokens"))
    if not (isinstance(base, int) and isinstance(step, int) and isinstance(tokens, int) and tokens >= 0):
        raise damaged(name, "its base, step and tokens are not whole numbers")
    if not isinstance(side, str) or contribution_name(side, step, base) != name:
        raise damaged(name, "its facts are those of another file")
    return Contribution(side=side, base=base, step=step, tokens=tokens, name=name)


def contribution_name(side: str, step: int, base: int) -> str:
    """Return the name of a contribution's file. Example: ``north.00000020.000003``."""
    return f"{side}.{step:08d}.{base:06d}"


def require_same_model(expected: Tensors, given: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """Refuse tensors of another model.

    Args:
        expected: the global weights.
        given: shapes by name.
        whose: what has them, in the error.

    Raises:
        SideError: names or shapes differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name in sorted({*shapes, *given}):
        if shapes.get(name) != given.get(name):
            has, wants = given.get(name, "no such tensor"), shapes.get(name, "no such tensor")
            raise SideError(
                f"{whose} has another model than the store: {name} is {has}, and the store has {wants}",
                why="sides of one store train the same model",
                fix="use the same model on every side, or another store",
            )


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def _digest(tensors: Tensors, said: str) -> str:
    """Return the SHA-256 of facts and tensors, their names, dtypes and shapes included."""
    whole = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()
