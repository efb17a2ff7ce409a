"""Gains: how much time fused updates save, predicted and measured.

records of a step ─ fused_metrics ─> fused/gain/mean: predicted;  fused/measured_gain/mean
                  └ unfused_note ──> why nothing was saved
"""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.records.metrics import Mean, Metric
from rillflow.runs.passes import ALONE, PassesRecord, windows


def fused_metrics(records: Sequence[PassesRecord]) -> dict[str, Metric]:
    """Return the predicted and the measured gain of a step's fused updates; empty if none are to be fused."""
    known = [window for window in windows(records) if window.gain != ALONE]
    shares = {
        "gain": [window.gain for window in known],
        "measured_gain": [window.measured_gain for window in known if len(window.stages) > 1],
    }
    return {
        f"fused/{name}/mean": Mean(total=sum(each), count=len(each)) for name, each in shares.items() if each
    }


def unfused_note(records: Sequence[PassesRecord]) -> str:
    """Return a note if updates that were to be fused ran one after the other; else an empty text."""
    left = [each for each in records if any(gain != ALONE for gain in each.gains) and not any(each.is_fused)]
    if not left:
        return ""
    gain = max(each for each in left[0].gains if each != ALONE)
    return (
        f"{' and '.join(each.stage for each in left)} run one after the other: fusing them would save "
        f"{gain:.1%} of their time"
    )
