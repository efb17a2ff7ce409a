"""Replay: compute every version again from the log and the contributions, and compare all bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rillflow_links.sides.merger import LOG, merged, read_contribution
from rillflow_links.sides.outer import OuterSettings
from rillflow_links.sides.packed import pack, read_version, sha256, unpack
from rillflow_links.sides.store import SideError, SideStore, damaged

_Weights = dict[str, Tensor]


def replay(store: SideStore, say: Callable[[str], None]) -> bool:
    """Return whether all versions have the bits that the log and the contributions give.

    Raises:
        SideError: there is no log.
    """
    data = store.read(LOG)
    if data is None:
        raise SideError(
            f"the store {store.url} has no {LOG}", why="no version was made", fix="check the store"
        )
    records = [json.loads(line) for line in data.decode().splitlines()]
    weights, momentum, problems = _Weights(), _Weights(), list[str]()
    for record in records:
        version = record["version"]
        try:
            if version == 0:
                weights = _start(store, record)
                momentum = {name: torch.zeros_like(each) for name, each in weights.items()}
            else:
                weights, momentum = _next(store, record, weights, momentum)
            kept = read_version(store, version)
            if not _is_equal(weights, kept):
                raise damaged(f"version {version}", "its bits differ from the replay's")
            if sha256(pack(momentum, {"version": version})) != record["momentum_sha256"]:
                raise damaged(f"the momentum of version {version}", "its bits differ from the replay's")
        except SideError as error:
            problems.append(f"{error.what}: {error.why}")
            say(problems[-1])
            if not weights:
                return False
    if not problems:
        say(f"{len(records)} versions are equal in all bits")
    return not problems


def _start(store: SideStore, record: dict[str, Any]) -> _Weights:
    name = f"starts/{record['start']}.safetensors"
    data = store.read(name) or b""
    if sha256(data) != record["start_sha256"]:
        raise damaged(name, "its SHA-256 differs from the log")
    return unpack(data, name).tensors


def _next(
    store: SideStore, record: dict[str, Any], weights: _Weights, momentum: _Weights
) -> tuple[_Weights, _Weights]:
    entries, files = record["contributions"], []
    for each in entries:
        file, digest = read_contribution(store, each["name"])
        if digest != each["sha256"]:
            raise damaged(each["name"], "its SHA-256 differs from the log")
        files.append(file)
    bases = [read_version(store, each["base"]) for each in entries]
    outer = OuterSettings(lr=record["lr"], momentum=record["momentum"])
    made = merged(weights, momentum, files, bases, entries, outer)
    return (
        {name: each.weights for name, each in made.items()},
        {name: each.momentum for name, each in made.items()},
    )


def _is_equal(one: _Weights, other: _Weights) -> bool:
    """Return whether two models have the same bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].flatten().view(torch.uint8), other[name].flatten().view(torch.uint8))
        for name in one
    )
