"""Pipeline passes: record the passes of a step's pipelines.

Facts.runs of a stage's ranks ─ passes_record ─> PassesRecord ─ passes.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rillflow.runs.passes import ALONE, PassesRecord, RankPasses, alone_bubble
from rillflow.workers.arguments import RECORDED_RANKS, Facts


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
