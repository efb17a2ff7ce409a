"""Soup: add parents one by one while the score on held-out rows does not drop.

    scores of the parents ─ sorted ─> best ─ add the next: average ─ scored ─┬─ not lower: kept
                                                                             └─ lower: left out

Source: greedy soups, arXiv 2203.05482, algorithm 1. Each kept parent has the same weight.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError
from rillflow_merging.merge import MergeSettings, merge
from rillflow_merging.stream import require_new

Score = Callable[[Path], float]
"""Returns the score of a model's directory on held-out rows; higher is better."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one parent."""

    parent: Path
    """Directory of the parent."""
    alone: float
    """Score of the parent alone."""
    together: float
    """Score of its average with the parents kept before."""
    is_kept: bool
    """Whether it is in the soup."""


def greedy_soup(parents: Sequence[Path], out: Path, score: Score) -> Mapping[str, Any]:
    """Write the average of the parents that do not lower the score; return the content of its merge.json.

    Args:
        parents: directories of the parents.
        out: directory to write; it must not exist.
        score: called for every parent, and for every average that is tried.

    Raises:
        ConfigError: fewer than two parents, or ``out`` exists.
        ModelError: the models cannot be merged, or a score is not finite.
    """
    MergeSettings().checked(len(parents), has_base=False)
    require_new(out)
    alone = {parent: _number(score(parent), parent) for parent in parents}
    ordered = sorted(parents, key=lambda parent: -alone[parent])
    kept, best = [ordered[0]], alone[ordered[0]]
    trials = [Trial(parent=ordered[0], alone=best, together=best, is_kept=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.trials-") as folder:
        for number, parent in enumerate(ordered[1:]):
            tried = Path(folder) / str(number)
            merge([*kept, parent], tried, MergeSettings())
            together = _number(score(tried), tried)
            is_kept = together >= best
            if is_kept:
                kept, best = [*kept, parent], together
            trials.append(Trial(parent=parent, alone=alone[parent], together=together, is_kept=is_kept))
        chosen = MergeSettings(method="linear")
        said = {"method": "greedy", "trials": [_told(trial) for trial in trials]}
        return merge(kept, out, chosen, said=said, least=1)


def _told(trial: Trial) -> Mapping[str, Any]:
    return asdict(trial) | {"parent": str(trial.parent)}


def _number(found: float, parent: Path) -> float:
    if not math.isfinite(found):
        raise ModelError(
            f"the score of {parent} is {found}",
            why="parents are added in the order of their scores, which must be finite",
            fix="hold out rows that can be scored: set task.held_out and evaluate.problems",
        )
    return found
