"""Side state: what a side remembers between two exchanges, in its run directory.

    RUN/sides/identity             the run that owns the side's name
    RUN/sides/00000040.packed      base: global weights of the version; sent: own weights at an upload that no
                                   version has decided; link.KEY/TENSOR: error feedback of the codec

A checkpoint of step s goes with the newest state of a step up to s. States that no checkpoint needs go.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from rillflow.runs.durable import replace
from rillflow.sharding.codec import LINK, State
from rillflow_links.sides.packed import pack, unpack
from rillflow_links.sides.store import SideError

BASE, SENT = "base/", "sent/"


@dataclass(kw_only=True)
class SideState:
    """What a side remembers."""

    version: int
    """Version that its weights are measured against."""
    base: dict[str, Tensor]
    """Weights of that version."""
    pending: str = ""
    """Its contribution that no version has decided; empty if there is none."""
    sent: dict[str, Tensor] = field(default_factory=dict)
    """Its weights at that upload, moved by the versions since."""
    links: dict[str, State] = field(default_factory=dict)
    """Error feedback of the codec, by tensor."""

    def settle(self) -> None:
        """Forget the pending contribution."""
        self.pending, self.sent = "", {}

    def save(self, folder: Path, step: int) -> None:
        """Write the state after a step, and remove states that no checkpoint needs.

        Raises:
            RunDirectoryError: the disk is full or fails.
        """
        tensors = {f"{BASE}{name}": each for name, each in self.base.items()}
        tensors |= {f"{SENT}{name}": each for name, each in self.sent.items()}
        for name, state in self.links.items():
            tensors |= {f"{LINK}{key}/{name}": each for key, each in state.items()}
        facts = {"version": self.version, "pending": self.pending}
        folder.mkdir(exist_ok=True)
        replace(_file(folder, step), [pack(tensors, facts)])
        steps = _steps(folder)
        needed = {max((each for each in steps if each <= saved), default=0) for saved in _checkpoints(folder)}
        for each in steps[:-2]:
            if each not in needed:
                _file(folder, each).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path, before: int) -> SideState:
        """Return the newest state of an earlier step.

        Raises:
            SideError: there is none, or it is damaged.
        """
        steps = [each for each in _steps(folder) if each < before]
        if not steps:
            raise SideError(
                f"{folder} has no state of an earlier step than {before}",
                why="the run began with another order of the steps, or the files are gone",
                fix="start again in a new run directory",
            )
        path = _file(folder, steps[-1])
        file = unpack(path.read_bytes(), str(path))
        state = cls(version=file.facts["version"], pending=file.facts["pending"], base={})
        for name, tensor in file.tensors.items():
            if name.startswith(LINK):
                key, _, of = name.removeprefix(LINK).partition("/")
                state.links.setdefault(of, {})[key] = tensor
            elif name.startswith(BASE):
                state.base[name.removeprefix(BASE)] = tensor
            else:
                state.sent[name.removeprefix(SENT)] = tensor
        return state


def forget_from(folder: Path, step: int) -> None:
    """Remove the states of a step and of later ones, which a resumed run has left behind."""
    for each in _steps(folder):
        if each >= step:
            _file(folder, each).unlink(missing_ok=True)


def identity(folder: Path) -> str:
    """Return the id of the run that owns a side's name; made at the first call."""
    path = folder / "identity"
    if not path.is_file():
        folder.mkdir(exist_ok=True)
        replace(path, [secrets.token_hex(8).encode()])
    return path.read_text()


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}.packed"


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.packed") if path.stem.isdecimal())


def _checkpoints(folder: Path) -> list[int]:
    """Return the steps of complete and of begun checkpoints."""
    names = [path.name for path in folder.parent.glob("checkpoints/*")]
    return [int(match[1]) for name in names if (match := re.match(r"\.?step-(\d+)", name))]
