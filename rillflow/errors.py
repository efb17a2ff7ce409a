"""Errors: each states what is wrong (with the value), why it cannot be, and what to do.

An error holds three sentences. A command line prints them as three lines, a service sends them as JSON, and
a process passes them to another process (they survive pickling).
"""

from __future__ import annotations

import difflib
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path


class RillflowError(Exception):
    """Base of every error that a user can cause or meet.

    Example:
        raise ConfigError("policy.lr is -1.0", why="a learning rate is positive", fix="try 1e-5")
    """

    is_underway = False
    """Whether a run had begun and failed on the way."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class ConfigError(RillflowError):
    """A recipe or a command-line setting that cannot be run."""


class DataError(RillflowError):
    """A prompts file or a task whose rows cannot be used."""


class ModelError(RillflowError):
    """A model or tokeniser that cannot be loaded, or that lacks a needed ability."""


class RecordError(RillflowError):
    """A batch or rollout that does not hold what was requested."""


class PlacementError(RillflowError):
    """An impossible mesh or placement, or one that does not fit a value's shape."""


class FormulaError(RillflowError):
    """Tensors or options for which a formula is not defined."""


class GraphError(RillflowError):
    """A step that cannot be traced, or that reads a field that nothing provides."""


class ClusterError(RillflowError):
    """Ranks that cannot be started, that failed, or that do not answer."""


class PlanError(RillflowError):
    """A machine, model or workload that cannot be planned, or an impossible plan."""


class WeightError(RillflowError):
    """Weights in the wrong place, or with wrong values."""


class RolloutError(RillflowError):
    """Generation that cannot continue."""


class RowError(RolloutError):
    """A pass that failed because of one row; the same rows without it can continue."""

    def __init__(
        self, what: str, why: str = "", fix: str = "", *, row: tuple[int, int, int] | None = None
    ) -> None:
        super().__init__(what, why, fix)
        self.row = row
        """The row's id: epoch, prompt and sample."""


class RewardError(RillflowError):
    """A reward function that cannot be used, or that fails too often to be trusted."""


class TrainingError(RillflowError):
    """An update that must not be applied: non-finite numbers, a broken on-policy ratio."""


class NotFiniteError(TrainingError):
    """A NaN or infinite number in an update; a run skips such updates, up to a budget."""


class StreamError(RillflowError):
    """A stream whose rows cannot be written, taken or found as requested."""


class RunDirectoryError(RillflowError):
    """A run directory that cannot be written, resumed or read."""


class CallbackError(RillflowError):
    """A user's callback that raised, after a whole step."""


class Interrupted(RillflowError):
    """The user asked the run to stop; the checkpoint named in the message resumes it."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, number: int = signal.SIGINT) -> None:
        super().__init__(what, why, fix)
        self.number = number
        """Number of the signal that asked; SIGINT also for a stop without a signal."""


class Signalled(KeyboardInterrupt):
    """A signal that ends the work of the main thread.

    A plain KeyboardInterrupt that passes through ``exec`` of a string, as dataclasses use on import, makes
    Python end the process by SIGINT later, even if it was caught. Python checks for the exact type.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number
        """Number of the signal."""


def signal_of(error: KeyboardInterrupt | Interrupted) -> int:
    """Return the number of the signal that an error stands for."""
    return error.number if isinstance(error, Signalled | Interrupted) else signal.SIGINT


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest known spelling, or the list of what is known."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(choices)}" if choices else "none is known"


def install_package(*extras: str) -> str:
    """Return the command that installs Rillflow with extras from its clone; no package index has Rillflow.

    Example:
        install_package("service") is ``pip install -e '.[service]'`` in the clone's folder.
    """
    return _install("", extras)


def install_plugin(plugin: str, *extras: str) -> str:
    """Return the command that installs a plugin of this project, with extras of its own, from the clone."""
    return _install(f"plugins/{plugin}", extras)


def _install(folder: str, extras: Iterable[str]) -> str:
    """Return the command that installs a folder of the clone; the clone itself stays editable."""
    clone = _clone(folder)
    if clone is None or _is_working_directory(clone):
        place = f"./{folder}" if folder else "."
    else:
        place = str(clone / folder)
    named = f"{place}[{','.join(extras)}]" if extras else place
    command = f"pip install {'' if folder else '-e '}{shlex.quote(named)}"
    return command if clone is not None else f"in a clone of Rillflow: {command}"


def _clone(folder: str) -> Path | None:
    """Return the clone of this package if it has the folder; None for an installed copy."""
    clone = Path(__file__).resolve().parents[1]
    is_clone = (clone / "pyproject.toml").is_file() and (clone / "plugins").is_dir()
    return clone if is_clone and (clone / folder).is_dir() else None


def _is_working_directory(folder: Path) -> bool:
    try:
        return folder == Path.cwd()
    except FileNotFoundError:  # the working directory was deleted
        return False
