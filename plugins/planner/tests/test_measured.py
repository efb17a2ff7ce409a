"""Measured steps: a row of another stack is one command, and factors explain Rillflow's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rillflow.cli.main import main

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "planner"))
from published import measured  # noqa: E402
from published.models import CONFIGS  # noqa: E402

OTHERS = [row for row in measured.rows() if row.stack != measured.OWN]
OWN = [row for row in measured.rows() if row.stack == measured.OWN]


def command(row: measured.MeasuredRow, folder: Path) -> list[str]:
    """The command of a row."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[row.model]))
    axes = {"tp": row.tp, "pp": row.pp, "cp": row.cp, "ep": row.ep, "fsdp": int(row.fsdp)}
    axes |= {"generate": row.generate_tp} | ({"separate": row.separate} if row.separate else {})
    settings = {
        "policy.gradient_checkpointing": str(row.recomputes).lower(),
        "policy.model.dtype": row.dtype,
        "policy.tokens_per_micro_batch": row.micro,
    }
    words = {
        "model": folder / "config.json",
        "gpus": f"{row.devices}x{row.device}",
        "algorithm": "grpo, reference" if row.stack == "verl" and row.scored == 2 else "grpo",
        "like": row.stack,
        "prompt": row.prompt,
        "prompts": row.prompts,
        "samples": row.samples,
        "response": f"mean={row.answer:g},max={row.limit},sigma={row.sigma:g}",
        "minibatches": row.minibatches,
        "freshness": row.ahead,
        "layout": ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1 or axis == "generate"),
        "format": "json",
    }
    if row.fsdp:
        words["layout"] += ",fsdp=1"
    said = [f"--{word}={value}" for word, value in words.items()]
    return ["plan", *said, *(f"--set={key}={value}" for key, value in settings.items())]


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.name)
def test_a_row_of_another_stack_is_one_command(
    row: measured.MeasuredRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(row, tmp_path)) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step_s"] == pytest.approx(measured.predict(row)["step"], rel=1e-6)
    is_measured = (row.stack, row.device, row.dtype) == ("nemo-rl", "H100", "bfloat16")
    assert ("; unsure: " in data["question"]) is not is_measured


def test_own_steps_are_explained_by_the_shipped_factors() -> None:
    """Every stage; the fit weighs what published steps of others expect, so it does not hit each of them."""
    errors = [abs(ratio - 1) for row in OWN for ratio in measured.ratios(row)]
    assert len(errors) == 14 and max(errors) < 0.12
    assert {row.device for row in OWN} == {"H200"}
