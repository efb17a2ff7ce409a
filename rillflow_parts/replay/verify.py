"""Verify: check that a run directory is as the run wrote it.

    digests.jsonl ─ lines, files ─┐
    manifests ─ checkpoints ──────┼─> Verified: whole, damaged and lost files
    bases ─ every byte of them ───┘

The bases are the models of other runs and directories that the run stands on.

Not covered: report.html and run.lock, which no resume reads; bundles and the reference, which have no digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rillflow.controller.checkpoint import examined
from rillflow.errors import ModelError
from rillflow.runs import layout
from rillflow.runs.bases import SETTINGS, Base, bases_of, model_digest, place_of, run_id
from rillflow.runs.integrity import Damage, damage, lost, newest_checkpoint
from rillflow.runs.pins import pin_notes
from rillflow.runs.reader import require_run


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result of a verification."""

    whole: Sequence[str]
    """Files and checkpoints that are unchanged."""
    damaged: Sequence[Damage]
    """Files and checkpoints that are damaged."""
    lost: Sequence[str]
    """Losses that the run itself recorded, with the reason."""
    pinned: Sequence[str] = ()
    """Checkpoints that the run keeps for other runs, which began from them."""


def verify(run: Path) -> Verified:
    """Compare everything in a run directory with what the run wrote.

    Raises:
        RunDirectoryError: the path is not a run directory, or digests.jsonl itself is damaged.
    """
    require_run(run)
    found = damage(run, is_deep=True)
    checkpoints = examined(run / layout.CHECKPOINTS, run_id(run))
    folder = layout.CHECKPOINTS
    found += [Damage(place=f"{folder}/{name}", problem=what) for name, what in checkpoints.items() if what]
    newest = newest_checkpoint(run)
    if newest is not None and f"step-{newest:06d}" not in checkpoints:
        found.append(
            Damage(place=f"{folder}/step-{newest:06d}", problem="missing, and it was the newest checkpoint")
        )
    names = [*layout.LINE_FILES, *(f"{folder}/{name}" for name in checkpoints)]
    names += [file for file in (layout.CONFIG, layout.ENVIRONMENT, layout.FINISHED) if (run / file).exists()]
    rollouts = sum(map(len, layout.written_rollouts(run).values()))
    hurt = {each.place.split(" ")[0] for each in found}
    whole = [name for name in names if (run / name).exists() and name not in hurt]
    if rollouts and not any(place.startswith(f"{layout.ROLLOUTS}/") for place in hurt):
        whole.append(f"{rollouts} files of {layout.ROLLOUTS}/")
    for key, base in ((key, base) for key, chain in bases_of(run).items() for base in chain):
        problem = _problem_of(base, run, key)
        if problem:
            found.append(Damage(place=f"base {base.path}", problem=problem))
        else:
            whole.append(f"base {place_of(base, run, key)} ({SETTINGS.get(key, key)})")
    return Verified(whole=whole, damaged=found, lost=lost(run), pinned=pin_notes(run))


def _problem_of(base: Base, run: Path, key: str) -> str:
    """Return what is wrong with a model that a run stands on, with the way out; empty if nothing is."""
    try:
        place = place_of(base, run, key)
        digest = model_digest(place, base.digest, is_deep=True)
    except ModelError as error:
        return f"{error.what}: {error.why}; {error.fix}"
    if digest == base.digest:
        return ""
    return f"{place} is not what the run began from: its digest is {digest}, and it was {base.digest}"
