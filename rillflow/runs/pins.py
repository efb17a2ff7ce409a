"""Pins: notes in a run directory that other runs stand on its checkpoints, so that these are kept.

    child starts ─ lock ─> is the checkpoint there? ─ used_by/CHILD.json ─> unlock ─> it reads the model
    run saves ──── lock ─> old checkpoints without a pin get another name ─> unlock ─> they are removed

The lock is on the folder of checkpoints and is held for milliseconds, so a child may start while the run
trains. A pin stays until its child is removed by hand: a child that is not found may have been moved, so its
checkpoint is kept, and every start of the run says so. A run that cannot be written gets no pin, and the
child says that. A pin that cannot be read keeps every checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from rillflow.errors import RunDirectoryError
from rillflow.runs import durable, layout
from rillflow.runs.bases import run_id
from rillflow.runs.json_lines import JSON, encode, read_json

LOCK_S = 10.0
"""Most seconds to wait for the lock of a folder of checkpoints."""
NAMED = 4
"""Most children that a note names."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A note of a child in a run directory."""

    file: Path
    """Its file."""
    path: str = ""
    """Absolute path of the child when it started last."""
    run: str = ""
    """Id of the child; empty if it is no run, such as a server's checkpoints."""
    uses: Mapping[str, int] | None = None
    """Steps of the checkpoints it stands on, by use; None if the file cannot be read: it keeps all."""

    def keeps(self, step: int) -> bool:
        """Return whether the pin keeps a step's checkpoint."""
        return self.uses is None or step in self.uses.values()

    @property
    def child(self) -> Path | None:
        """Present place of the child, also if it was renamed within its folder; None if it is not found."""
        known = Path(self.path)
        if not self.run:
            return known if self.path and known.is_dir() else None
        if run_id(known) == self.run:
            return known
        beside = sorted(known.parent.iterdir()) if known.parent.is_dir() else ()
        there = (path for path in beside if path.is_dir() and layout.is_run_directory(path))
        return next((path for path in there if run_id(path) == self.run), None)


def pins_of(run: Path) -> list[Pin]:
    """Return the pins in a run directory."""
    return [_read(file) for file in sorted((run / layout.USED_BY).glob("*.json"))]


def _read(file: Path) -> Pin:
    try:
        said = read_json(file)
    except RunDirectoryError:
        return Pin(file=file)
    path, child, uses = said.get("path"), said.get("run"), said.get("uses")
    if not isinstance(path, str) or not isinstance(child, str) or not isinstance(uses, Mapping):
        return Pin(file=file)
    steps = {name: step for name, step in uses.items() if isinstance(step, int)}
    return Pin(file=file, path=path, run=child, uses=steps if len(steps) == len(uses) else None)


@contextmanager
def removal(run: Path) -> Iterator[Callable[[int], bool]]:
    """Lock a run's checkpoints, and yield whether the checkpoint of a step is kept for another run."""
    with _locked(run) as is_locked:
        pins = pins_of(run)
        yield lambda step: not is_locked or any(pin.keeps(step) for pin in pins)


@contextmanager
def _locked(run: Path) -> Iterator[bool]:
    """Lock a run's checkpoints; yield False if another process holds the lock for too long.

    A file system without locks on folders goes without.
    """
    try:
        descriptor = os.open(run / layout.CHECKPOINTS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        yield _take(descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:
            return True


def pin_notes(run: Path) -> list[str]:
    """Return a note on every checkpoint that a run keeps for others, and on children that are not found."""
    users, notes = dict[int, list[str]](), list[str]()
    for pin in pins_of(run):
        there = [step for step in layout.kept_steps(run / layout.CHECKPOINTS) if pin.keeps(step)]
        child = pin.child
        if child is not None:
            for step in there:
                users.setdefault(step, []).append(str(child))
        elif there and pin.uses is None:
            notes.append(
                f"{pin.file} cannot be read, so every checkpoint is kept; if no run needs them, remove it"
            )
        elif there:
            names = ", ".join(f"step-{step:06d}" for step in there)
            notes.append(
                f"{run / layout.CHECKPOINTS}/{names} is kept for {pin.path}, which is not there; if that run "
                f"was deleted, remove {pin.file}"
            )
    for step, children in sorted(users.items()):
        more = f" and {len(children) - NAMED} more" if len(children) > NAMED else ""
        names = ", ".join(children[:NAMED])
        notes.append(f"{run / layout.CHECKPOINTS}/step-{step:06d} is kept: {names}{more} began from it")
    return notes


class Pins:
    """The pins of one child in the runs that it stands on; leaving it before ``settle`` removes new ones.

    Args:
        child: the child's directory.
        identity: the child's run id; empty if it is no run.
    """

    def __init__(self, child: Path, identity: str) -> None:
        self._child, self._identity = child.absolute(), identity
        name = identity or sha256(str(self._child).encode()).hexdigest()[:16]
        self._name = f"{name}.json"
        self._held: dict[Path, dict[str, int]] = {}
        self._new: list[Path] = []
        self._unwritten: dict[Path, str] = {}

    @property
    def notes(self) -> Sequence[str]:
        """Notes on runs that cannot be written."""
        return tuple(self._unwritten.values())

    def hold(self, run: Path, use: str, step: int) -> bool:
        """Pin a checkpoint; return whether it is there.

        Args:
            run: the run directory.
            use: name of the use; a use has one checkpoint in a run.
            step: step of the checkpoint.
        """
        file = run / layout.USED_BY / self._name
        with _locked(run):
            if step not in layout.kept_steps(run / layout.CHECKPOINTS):
                return False
            is_new, held = not file.exists(), self._held.setdefault(run, {})
            held[use] = step
            before = (_read(file).uses or {}) if not is_new else {}
            try:
                self._write(file, {**before, **held})
            except (RunDirectoryError, OSError) as error:
                what = error.what if isinstance(error, RunDirectoryError) else str(error)
                self._unwritten[run] = (
                    f"{run} cannot note that this run stands on its checkpoint step-{step:06d} ({what}): "
                    "keep that checkpoint; each start compares its digest"
                )
                del self._held[run]
                return True
            self._new += [file] if is_new else []
        return True

    def settle(self, former: Iterable[Path] = ()) -> None:
        """Keep the pins, with the uses of this start alone; remove those in former runs that it left."""
        self._new = []
        for run in {*former} - {*self._held}:
            with suppress(OSError):
                (run / layout.USED_BY / self._name).unlink(missing_ok=True)
        for run, held in self._held.items():
            file = run / layout.USED_BY / self._name
            with _locked(run), suppress(RunDirectoryError):
                self._write(file, held)

    def _write(self, file: Path, uses: Mapping[str, int]) -> None:
        said: dict[str, JSON] = {"path": str(self._child), "run": self._identity, "uses": {**uses}}
        pin = Pin(file=file, path=str(self._child), run=self._identity, uses=uses)
        if not file.is_file() or _read(file) != pin:
            durable.replace(file, [encode(said)])

    def __enter__(self) -> Pins:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._new:
            with suppress(OSError):
                file.unlink()
