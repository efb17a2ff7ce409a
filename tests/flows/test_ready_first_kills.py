"""Ready first with kills: steps after a resume have the bits that the killed process had shown."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rillflow
from rillflow.records.rollout import Rollout
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout

sys.path.insert(0, str(Path(__file__).parent))
from test_ahead import APART, RAY, ran

from tests.flows.warm import CONTEXT

READY = (
    'schedule.mode="ready_first"',
    "rollout.max_tokens=12",
    "rollout.max_rows=6",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=2",
    "placement.pools={ main = 1, answers = 2 }",
    APART,
    f'rollout.engine="{__name__}:Slow"',
)
WARM = 3
"""Steps before the first one that samples."""


class Slow(NativeEngine):
    """The native engine, so slow that steps wait for rows and some rows run at every checkpoint."""

    def step(self) -> list[Rollout]:
        time.sleep(0.04)
        return super().step()


def start(folder: Path, backend: str, steps: int, last: int) -> None:
    """Run until the step ``last`` was shown, then die."""

    def die(phase: str, step: int, metrics: object) -> None:
        if phase == "grpo" and step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = (f'placement.backend="{backend}"', f"algorithm.steps={steps}")
    ran(folder, 2, *settings, *READY, told=die)


def started(folder: Path, backend: str, steps: int, last: int) -> int:
    """Run ``start`` in a process of its own; return its exit code."""
    process = CONTEXT.Process(target=start, args=(folder, backend, steps, last))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def shown(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of every step that do not depend on a clock."""
    whole = (run / layout.METRICS).read_bytes().rpartition(b"\n")[0].splitlines()
    lines = [json.loads(line) for line in whole]
    return {
        line["step"]: {name: each for name, each in line["metrics"].items() if "seconds" not in name}
        for line in lines
    }


def partial_rows(run: Path) -> int:
    """Return the number of rows in flight with sampled tokens, over all checkpoints."""
    files = [load_file(path) for path in run.glob("checkpoints/step-*/ahead/*-running.safetensors")]
    return sum(
        int(row.sum() > 0)
        for each in files
        for row in torch.split(each["loss_mask:values"], each["loss_mask:lengths"].tolist())
    )


@pytest.mark.parametrize(
    ("backend", "steps", "kills"),
    [
        pytest.param("inline", 6, [5, 7], id="two-kills"),
        pytest.param("ray", 24, range(5, 25, 2), id="ten-kills-on-ray", marks=[pytest.mark.slow, RAY]),
    ],
)
@pytest.mark.timeout(1800)
def test_a_killed_run_goes_on_with_the_bits_that_it_had_shown(
    tmp_path: Path, backend: str, steps: int, kills: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run, before, partial = tmp_path / "run", dict[int, dict[str, Any]](), 0
    for last in kills:
        assert started(tmp_path, backend, steps, last) == -signal.SIGKILL
        now = shown(run)
        assert {step: before[step] for step in before.keys() & now.keys()} == {
            step: now[step] for step in before.keys() & now.keys()
        }
        before |= now
        partial += partial_rows(run)
    assert partial > 0
    settings = (f'placement.backend="{backend}"', f"algorithm.steps={steps}")
    ran(tmp_path, 2, *settings, *READY, is_quiet=False)
    assert "does not repeat" not in capsys.readouterr().out
    resumed = [each["after_step"] for each in json.loads((run / layout.ENVIRONMENT).read_text())["starts"]]
    assert max(resumed) > WARM
    now = shown(run)
    assert {*now} == {*range(1, WARM + steps + 1)} and now | before == now
    assert rillflow.open_run(run).replay(settings=['placement.backend="inline"']).difference is None
