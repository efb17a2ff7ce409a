"""A rank's program: times of its passes."""

from __future__ import annotations

import pytest

from rillflow.workers.arguments import PipelineRun, TimedPass
from rillflow.workers.backend import Place, Site
from rillflow.workers.collectives import SingleRank
from rillflow.workers.program import _on_clock

PASS = TimedPass(micro_batch=0, is_backward=False, began=100.0, ended=101.5)


@pytest.mark.parametrize("ahead_s", [0.0, 2.0, -3.0])
def test_passes_have_times_of_the_drivers_clock(ahead_s: float) -> None:
    site = Site(place=Place("main", 0), ranks=SingleRank(), fetch=lambda *_: [], ahead_s=ahead_s)
    run = PipelineRun(stage=1, passes=(PASS,))
    (found,) = _on_clock(site, run).passes
    assert (found.began, found.ended) == (PASS.began - ahead_s, PASS.ended - ahead_s)
