"""Merger: make the next global version from the sides' contributions.

    starts/, claims/, contributions/ ─ poll ─┬─ not due: wait
                                             ├─ refused/NAME.json: damaged, of another model, too late
                                             └─ outer_step ─> weights, momentum, json, merges.jsonl

consumes      contributions that no version has
waits for     a quorum, then ``grace_s`` for the sides of the last merges
unblocked by  the last of these sides, or the end of the grace time
produces      one version at a time. The json of a version is written last: whatever a killed merger left
              before it is made again
shutdown      at any point; the next merger reads the records of all versions
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rillflow_links.sides.outer import OuterSettings, OuterState, outer_step, shares_of
from rillflow_links.sides.packed import PackedFile, contribution_of, pack, read_version, sha256, unpack
from rillflow_links.sides.payload import pseudo_gradient, require_decodable
from rillflow_links.sides.rules import Contribution, MergeRule
from rillflow_links.sides.store import SideError, SideStore, damaged

LOG = "merges.jsonl"
_Weights = dict[str, Tensor]


class Merger:
    """The one writer of versions in a store.

    Args:
        store: the store.
        rule: what is merged, and when.
        outer: settings of the outer step.
        say: shows the user a line.
        beat: called often while a version is computed.
        confirm: called before a version is written; raises if another merger has taken over.
        clock: returns seconds of this machine.
    """

    def __init__(
        self,
        store: SideStore,
        rule: MergeRule,
        outer: OuterSettings,
        *,
        say: Callable[[str], None] = lambda _: None,
        beat: Callable[[], None] = lambda: None,
        confirm: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rule, self._outer = store, rule, outer
        self._say, self._beat, self._confirm, self._clock = say, beat, confirm, clock
        self._records = read_records(store)
        entries = [(record["version"], each) for record in self._records for each in record["contributions"]]
        self._decided = {each["name"] for _, each in entries} | {*store.names("refused", ".json")}
        self._offers = dict[str, Contribution]()
        self._seen = {each["side"]: version for version, each in entries}
        self._claimed = set[str]()
        self._since: float | None = None
        self._bases = dict[int, _Weights]()
        self._momentum = _Weights()
        if self._records:
            self._momentum = self._read_momentum()
            self._write_log()

    @property
    def newest(self) -> int:
        """Number of the newest version; -1 before the first."""
        return len(self._records) - 1

    def poll(self) -> bool:
        """Read new contributions, and make the next version if it is due; return whether one was made."""
        if self.newest < 0:
            return self._begin()
        self._read_new()
        chosen, refused = self._rule.chosen([*self._offers.values()], self.newest)
        for name, reason in refused.items():
            self._refuse(name, reason)
        ready = {each.side for each in chosen}
        if len(ready) < self._rule.quorum:
            self._since = None
            return False
        since = self._since = self._clock() if self._since is None else self._since
        waited_s = self._clock() - since
        if not self._rule.is_due(ready, self._rule.expected(self._seen, self.newest), waited_s):
            return False
        return self._merge(chosen, waited_s)

    def _begin(self) -> bool:
        """Make version 0 from the first side's start."""
        for side in self._store.names("starts", ".safetensors"):
            try:
                data = self._store.read(f"starts/{side}.safetensors") or b""
                weights = unpack(data, f"starts/{side}").tensors
            except SideError as error:
                self._say(f"the start of {side} is left out: {error.what} ({error.why})")
                continue
            self._momentum = {name: torch.zeros_like(each) for name, each in weights.items()}
            self._commit(weights, {"start": side, "start_sha256": sha256(data), "contributions": []})
            return True
        return False

    def _read_new(self) -> None:
        for side in self._store.names("claims", ".json"):
            if side not in self._claimed:
                claim = self._store.read_json(f"claims/{side}.json") or {}
                self._seen[side] = max(self._seen.get(side, 0), int(claim.get("joined", 0)))
                self._claimed.add(side)
        for name in self._store.names("contributions", ".safetensors"):
            if name in self._decided or name in self._offers:
                continue
            try:
                file, _ = read_contribution(self._store, name)
                offer = contribution_of(name, file.facts)
                if offer.base > self.newest:
                    raise damaged(name, f"its base is version {offer.base}, and the newest is {self.newest}")
                require_decodable(file, self._base(offer.base), name)
            except SideError as error:
                self._refuse(name, f"{error.what} ({error.why})")
            else:
                self._offers[name] = offer

    def _refuse(self, name: str, reason: str) -> None:
        self._store.write_json(f"refused/{name}.json", {"reason": reason})
        self._say(f"refused {name}: {reason}")
        self._offers.pop(name, None)
        self._decided.add(name)

    def _merge(self, chosen: Sequence[Contribution], waited_s: float) -> bool:
        """Make a version from contributions; a file that has changed since it was read is refused."""
        files, entries = list[PackedFile](), list[dict[str, Any]]()
        shares = shares_of([each.tokens for each in chosen])
        for each, share in zip(chosen, shares, strict=True):
            try:
                file, digest = read_contribution(self._store, each.name)
            except SideError as error:
                self._refuse(each.name, f"{error.what} ({error.why})")
                return False
            files.append(file)
            late = self.newest - each.base
            entries.append({**asdict(each), "sha256": digest, "share": share, "late": late})
        bases = [self._base(each.base) for each in chosen]
        made = merged(self._base(self.newest), self._momentum, files, bases, entries, self._outer, self._beat)
        self._momentum = {name: each.momentum for name, each in made.items()}
        record = {"contributions": entries, **asdict(self._outer), "waited_s": round(waited_s, 3)}
        self._commit({name: each.weights for name, each in made.items()}, record)
        self._since = None
        return True

    def _commit(self, weights: _Weights, record: Mapping[str, Any]) -> None:
        """Write a version; its record, which makes the version, comes last."""
        version = len(self._records)
        data, momentum = (pack(each, {"version": version}) for each in (weights, self._momentum))
        self._confirm()
        self._store.write(f"versions/{version:06d}.safetensors", data)
        self._store.write(f"momentum/{version:06d}.safetensors", momentum)
        digests = {"version": version, "sha256": sha256(data), "momentum_sha256": sha256(momentum)}
        self._confirm()
        self._store.write_json(f"versions/{version:06d}.json", {**record, **digests})
        self._records.append({**record, **digests})
        self._write_log()
        self._store.remove(f"momentum/{version - 2:06d}.safetensors")
        for each in record["contributions"]:
            self._offers.pop(each["name"], None)
            self._decided.add(each["name"])
            self._seen[each["side"]] = version
        oldest = version - self._rule.most_late
        self._bases = {number: each for number, each in self._bases.items() if number >= oldest}
        self._bases[version] = weights
        told = ", ".join(f"{each['side']} {each['share']:.0%}" for each in record["contributions"])
        self._say(f"version {version}: {told or 'the start of ' + record['start']}")

    def _base(self, version: int) -> _Weights:
        if version not in self._bases:
            self._bases[version] = read_version(self._store, version)
        return self._bases[version]

    def _read_momentum(self) -> _Weights:
        name, record = f"momentum/{self.newest:06d}.safetensors", self._records[-1]
        data = self._store.read(name) or b""
        if sha256(data) != record["momentum_sha256"]:
            raise damaged(name, "its SHA-256 differs from the record of its version")
        return unpack(data, name).tensors

    def _write_log(self) -> None:
        """Write a line for each version; they are also those that a killed merger did not write."""
        self._store.write(
            LOG, "".join(f"{json.dumps(each, sort_keys=True)}\n" for each in self._records).encode()
        )


def read_records(store: SideStore) -> list[dict[str, Any]]:
    """Return the records of all versions in order.

    Raises:
        SideError: a version before the newest has no record.
    """
    records = list[dict[str, Any]]()
    for version in range(store.newest() + 1):
        name = f"versions/{version:06d}.json"
        record = store.read_json(name)
        if record is None or record.get("version") != version or "contributions" not in record:
            raise damaged(name, "it is not the record of its version")
        records.append(record)
    return records


def read_contribution(store: SideStore, name: str) -> tuple[PackedFile, str]:
    """Return a contribution and the SHA-256 of its file.

    Raises:
        SideError: it is missing or damaged.
    """
    data = store.read(f"contributions/{name}.safetensors")
    if data is None:
        raise damaged(name, "the file is missing")
    return unpack(data, name), sha256(data)


def merged(
    newest: Mapping[str, Tensor],
    momentum: Mapping[str, Tensor],
    files: Sequence[PackedFile],
    bases: Sequence[Mapping[str, Tensor]],
    entries: Sequence[Mapping[str, Any]],
    outer: OuterSettings,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, OuterState]:
    """Return every tensor of the next version.

    Args:
        newest: the newest version.
        momentum: its momentum.
        files: contributions, in the order of their sides' names.
        bases: the version that each contribution is measured against.
        entries: name and share of each.
        outer: settings of the outer step.
        beat: called for each tensor.
    """
    made, shares = dict[str, OuterState](), [each["share"] for each in entries]
    for name in sorted(newest):
        beat()
        gradients = [
            pseudo_gradient(file, base, name, entry["name"])
            for file, base, entry in zip(files, bases, entries, strict=True)
        ]
        made[name] = outer_step(
            OuterState(weights=newest[name], momentum=momentum[name]), gradients, shares, outer
        )
    return made
