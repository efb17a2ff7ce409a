"""Pipeline passes: record the passes of a step's pipelines, and how much time fusing them saves.

Facts.runs of a stage's ranks ─ passes_record ─> PassesRecord ─ passes.jsonl
records of a step ─ fused_metrics ─> fused/gain/mean: predicted;  fused/measured_gain/mean
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rillflow.records.metrics import Mean, Metric
from rillflow.runs.passes import ALONE, PassesRecord, RankPasses, alone_bubble, windows
from rillflow.workers.values import RECORDED_RANKS, Facts


def passes_record(stage: str, step: int, facts: Sequence[Facts], ahead_s: float) -> PassesRecord | None:
    """Return the passes of a stage; None if its ranks ran no pipeline.

    Args:
        stage: name of the stage.
        step: number of its step.
        facts: facts of its ranks.
        ahead_s: clock of the run minus seconds since the epoch.
    """
    found = [each for each in facts if each.runs and each.place.rank < RECORDED_RANKS]
    found.sort(key=lambda each: each.place.rank)
    if not any(run.passes for each in found for run in each.runs):
        return None
    runs = found[0].runs
    record = PassesRecord(
        step=step,
        stage=stage,
        pool=found[0].place.pool,
        bubbles=tuple(run.bubble or 0.0 for run in runs),
        gains=tuple(ALONE if run.gain is None else round(run.gain, 6) for run in runs),
        is_fused=tuple(int(run.bubble is not None) for run in runs),
        ranks=tuple(_rank_passes(each, ahead_s) for each in found if any(run.passes for run in each.runs)),
    )
    bubbles = [
        run.bubble if run.bubble is not None else alone_bubble(record.pipeline(number))
        for number, run in enumerate(runs)
    ]
    return replace(record, bubbles=tuple(round(bubble, 6) for bubble in bubbles))


def _rank_passes(facts: Facts, ahead_s: float) -> RankPasses:
    began = min(each.began for run in facts.runs for each in run.passes)
    return RankPasses(
        rank=facts.place.rank,
        pipeline_stage=facts.runs[0].stage,
        start_s=round(max(0.0, began + ahead_s), 6),
        passes=tuple(
            (
                number,
                int(each.is_backward),
                each.micro_batch,
                round(1e6 * (each.began - began)),
                round(1e6 * (each.ended - each.began)),
            )
            for number, run in enumerate(facts.runs)
            for each in run.passes
        ),
    )


def fused_metrics(records: Sequence[PassesRecord]) -> dict[str, Metric]:
    """Return the predicted and the measured gain of a step's fused updates; empty if none are to be fused."""
    known = [window for window in windows(records) if window.gain != ALONE]
    if not known:
        return {}
    fused = [window.measured_gain for window in known if len(window.stages) > 1]
    found: dict[str, Metric] = {
        "fused/gain/mean": Mean(total=sum(window.gain for window in known), count=len(known))
    }
    if fused:
        found["fused/measured_gain/mean"] = Mean(total=sum(fused), count=len(fused))
    return found


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
