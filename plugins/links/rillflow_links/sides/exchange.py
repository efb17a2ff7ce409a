"""Exchange: on the ranks of the policy, upload what a side has learned and take the newest global version.

    local - base ─ encode ─> contributions/NAME.STEP.BASE ──> merger ──> versions/N
    local = version N + (local - own weights at the upload that N decided)                        <─┘

A side has at most one contribution that no version has decided. Until then it trains on, and its next
contribution has everything since. The first rank reads and writes; the others receive its weights.

consumes      the weights after a step
waits for     the version that decides its contribution, at most ``grace_s``
unblocked by  the merger, or the end of the grace time: then the side trains on
produces      a contribution; weights for the next step, announced under the step's own version
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import RillflowError
from rillflow.roles.policy import Policy
from rillflow.sharding.module import first_said
from rillflow_links.sides.packed import contribution_name, pack, read_version, require_same_model
from rillflow_links.sides.payload import encoded
from rillflow_links.sides.side_state import SideState, forget_from, identity
from rillflow_links.sides.store import SideError, SideStore

POLL_S = (0.05, 1.0)
"""Shortest and longest pause between two looks into the store."""
_Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SideSettings:
    """Settings of a side, as its ranks need them."""

    store: str
    """Folder or URL of the store."""
    name: str
    """Name of the side."""
    folder: Path
    """Folder of its states, in the run directory."""
    coding: Mapping[str, Any]
    """Settings of ``[links]`` that make the codec."""
    grace_s: float
    """Longest wait for a version after an upload."""
    start_s: float
    """Longest wait for the first version."""


@dataclass(frozen=True, kw_only=True)
class ExchangeTurn:
    """One exchange."""

    step: int
    """Steps of the run, with the one that has just been trained."""
    tokens: int
    """Tokens trained since the last exchange."""
    is_boundary: bool
    """Whether to upload."""
    is_resumed: bool
    """Whether it is the first exchange of this process."""


@dataclass(frozen=True, kw_only=True)
class ExchangeReport:
    """What an exchange did."""

    version: int = 0
    """Version that the weights are measured against now."""
    behind: int = 0
    """Versions that the side was behind before."""
    sent_bytes: int = 0
    """Bytes of the uploaded file; 0 without an upload."""
    own_bytes: int = 0
    """Bytes of the weights."""
    waited_s: float = 0.0
    """Time waited for the merger."""
    uploaded_tokens: int = 0
    """Tokens of the contribution."""
    problem: str = ""
    """Why the store could not be used; the side trains on."""


def start(policy: Policy, settings: SideSettings, after: int) -> ExchangeReport:
    """Begin with the newest version; without one, offer the own weights as the first. All ranks call it.

    Args:
        policy: the policy on this rank.
        settings: settings of the side.
        after: steps of the run so far, such as those of a warm start.

    Raises:
        RillflowError: the name is another run's, the model is another one, the store cannot be written, or
            no merger made the first version in time.
    """

    def begin(local: _Weights) -> tuple[_Weights, ExchangeReport]:
        store = SideStore(settings.store)
        claim_name(store, settings, joined=max(0, store.newest()))
        if store.newest() < 0:
            store.write(f"starts/{settings.name}.safetensors", pack(local, {"side": settings.name}))
            _until(lambda: store.newest() >= 0, settings.start_s)
        version = store.newest()
        if version < 0:
            raise SideError(
                f"the store {settings.store} has no version after {settings.start_s:g} s",
                why="the merger makes the first version from the first side's weights",
                fix=f"start it: rillflow merge-sides {settings.store}",
            )
        base = read_version(store, version)
        shapes = {name: tuple(each.shape) for name, each in local.items()}
        require_same_model(base, shapes, f"the side {settings.name}")
        forget_from(settings.folder, after)
        SideState(version=version, base=base).save(settings.folder, after)
        return base, ExchangeReport(version=version)

    return _on_first_rank(policy, begin)


def exchange(policy: Policy, settings: SideSettings, turn: ExchangeTurn) -> ExchangeReport:
    """Upload if it is due and take the newest version if there is a newer one. All ranks call it.

    A store that cannot be used is reported, and the side trains on.

    Raises:
        RillflowError: the side's state is missing or cannot be written.
    """

    def meet(local: _Weights) -> tuple[_Weights, ExchangeReport]:
        if turn.is_resumed:
            forget_from(settings.folder, turn.step)
        side = SideMeeting(settings, SideState.load(settings.folder, turn.step), local)
        problem = ""
        try:
            side.meet(turn)
        except SideError as error:
            problem = f"{error.what} ({error.why})"
        side.state.save(settings.folder, turn.step)
        return side.local, side.report(turn, problem)

    return _on_first_rank(policy, meet)


class SideMeeting:
    """One exchange on the first rank.

    Args:
        settings: settings of the side.
        state: what it remembers.
        local: its weights.
    """

    def __init__(self, settings: SideSettings, state: SideState, local: _Weights) -> None:
        self._settings, self.state, self.local = settings, state, local
        self._store = SideStore(settings.store)
        self._sent_bytes, self._behind, self._waited_s, self._is_sent = 0, 0, 0.0, False

    def meet(self, turn: ExchangeTurn) -> None:
        """Take the newest version, upload, and wait for the version that decides the upload."""
        later = self._uploaded_later(turn.step) if turn.is_resumed or turn.is_boundary else []
        own = [each for each in later if int(each.split(".")[1]) == turn.step]
        if turn.is_boundary and own:  # uploaded before a resume: the step was trained again
            self.state.pending, self.state.sent = own[-1], _copied(self.local)
        elif later:  # a later step, which is trained again too, goes on from that upload
            return
        self._behind = max(0, self._store.newest() - self.state.version)
        if self.state.pending or turn.is_resumed:
            self._take_newest()
        if not turn.is_boundary or own or self.state.pending:
            return
        self._upload(turn)
        began = time.monotonic()
        _until(self._is_decided, self._settings.grace_s)
        self._waited_s = time.monotonic() - began
        self._take_newest()

    def report(self, turn: ExchangeTurn, problem: str) -> ExchangeReport:
        """Return what was done."""
        return ExchangeReport(
            version=self.state.version,
            behind=self._behind,
            sent_bytes=self._sent_bytes,
            own_bytes=sum(each.nbytes for each in self.local.values()),
            waited_s=self._waited_s,
            uploaded_tokens=turn.tokens if self._is_sent else 0,
            problem=problem,
        )

    def _uploaded_later(self, step: int) -> list[str]:
        """Return own contributions of this or a later step, which were uploaded before a resume."""
        later = list[str]()
        for name in self._store.names("contributions", ".safetensors"):
            side, *numbers = name.split(".")
            if side != self._settings.name or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                continue
            at, base = map(int, numbers)
            if at >= step and base >= self.state.version and name != self.state.pending:
                later.append(name)
        return later

    def _upload(self, turn: ExchangeTurn) -> None:
        settings, state = self._settings, self.state
        claim_name(self._store, settings, joined=state.version)
        facts = {"side": settings.name, "step": turn.step, "base": state.version, "tokens": turn.tokens}
        links = {name: dict(each) for name, each in state.links.items()}
        payload = encoded(settings.coding, state.base, self.local, links)
        data = pack(payload, {**facts, "coding": dict(settings.coding)})
        name = contribution_name(settings.name, turn.step, state.version)
        try:
            self._store.write(f"contributions/{name}.safetensors", data)
        except RillflowError as error:
            raise SideError(error.what, why=error.why, fix=error.fix) from error
        state.links, state.pending, state.sent = links, name, _copied(self.local)
        self._sent_bytes, self._is_sent = len(data), True

    def _is_decided(self) -> bool:
        """Return whether a version has, or the merger refused, the pending contribution."""
        if self._store.read_json(f"refused/{self.state.pending}.json") is not None:
            return True
        for version in range(self.state.version + 1, self._store.newest() + 1):
            record = self._store.read_json(f"versions/{version:06d}.json") or {}
            if self.state.pending in {each["name"] for each in record.get("contributions", ())}:
                return True
        return False

    def _take_newest(self) -> None:
        """Replace the base by the newest version; what no version has stays on top of it."""
        state, newest = self.state, self._store.newest()
        is_decided = bool(state.pending) and self._is_decided()
        if newest > state.version:
            weights = read_version(self._store, newest)
            before = state.sent if is_decided else state.base
            self.local = _moved(self.local, before, weights)
            if not is_decided:
                state.sent = _moved(state.sent, state.base, weights)
            state.version, state.base = newest, weights
        if is_decided:
            state.settle()


def _moved(tensors: _Weights, before: _Weights, after: _Weights) -> dict[str, Tensor]:
    """Return after + (tensors - before)."""
    return {name: after[name] + (each - before[name]) for name, each in tensors.items()}


def _copied(tensors: _Weights) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def claim_name(store: SideStore, settings: SideSettings, joined: int) -> None:
    """Claim the side's name for this run.

    Raises:
        SideError: another run has the name.
    """
    own, file = identity(settings.folder), f"claims/{settings.name}.json"
    claim = store.read_json(file)
    if claim is None:
        store.write_json(file, {"run": own, "joined": joined})
        claim = store.read_json(file) or {}
    if claim.get("run") != own:
        raise SideError(
            f'schedule.name is "{settings.name}", and another run in {settings.store} has this name',
            why="contributions and progress are kept by the name of the side",
            fix="choose another name; a side that returns goes on in its own run directory",
        )


def _until(done: Callable[[], bool], limit_s: float) -> None:
    """Wait until ``done`` returns True, at most ``limit_s`` seconds of this machine."""
    pause_s, end = POLL_S[0], time.monotonic() + limit_s
    while not done() and time.monotonic() < end:
        time.sleep(min(pause_s, max(0.0, end - time.monotonic())))
        pause_s = min(2 * pause_s, POLL_S[1])


def _on_first_rank(
    policy: Policy, work: Callable[[_Weights], tuple[_Weights, ExchangeReport]]
) -> ExchangeReport:
    """Let the first rank do the work, give its weights to all ranks, and announce them if they changed.

    Raises:
        RillflowError: the work failed; every rank raises it.
    """
    policy.weights.turn_to_training()
    everyone, optimizer = policy.share.groups.everyone, policy.trainer.optimizer
    masters, report, reason = optimizer.read_masters(), ExchangeReport(), ""
    weights: _Weights = masters
    error: RillflowError | None = None
    if everyone.rank == 0:
        local = {name: each.detach().cpu() for name, each in masters.items()}
        try:
            weights, report = work(local)
        except RillflowError as raised:
            error, reason = raised, raised.what
        if weights is local:
            weights = masters
    if first_said(everyone, reason):
        raise error or SideError("the exchange failed on the first rank", why="see the first rank's error")
    if first_said(everyone, "changed" if weights is not masters else ""):
        held = [
            weights[name].to(each.device) if everyone.rank == 0 else torch.zeros_like(each)
            for name, each in masters.items()
        ]
        everyone.sum_(held)
        optimizer.write_masters(dict(zip(masters, held, strict=True)))
        policy.announce()
    return report
