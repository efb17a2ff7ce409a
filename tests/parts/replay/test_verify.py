"""`rillflow verify` names damaged files of a run; a resume reports them, and restores what it needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.runs import layout
from tests.flows.conftest import Tiny

REST = """
steps = 2
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 20
held_out = 4
"""


@pytest.fixture
def run(tiny: Tiny) -> Path:
    tiny.write(REST)
    assert tiny.run("run") == 0
    return tiny.folder / "run"


def test_a_whole_run_is_said_to_be_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    for name in ("metrics.jsonl", "spans.jsonl", "checkpoints/step-000002", "config.json", "rollouts/"):
        assert f"{name}\n" in said
    assert "damaged" not in said


def test_what_is_damaged_is_named_and_the_code_is_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run / "checkpoints/step-000002/policy/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    rollout = layout.written_rollouts(run)[1][0]
    rollout.write_bytes(rollout.read_bytes() + b" ")
    metrics = (run / "metrics.jsonl").read_text().replace('"step": 1', '"step": 7', 1)
    (run / "metrics.jsonl").write_text(metrics)
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr().out
    assert "damaged  metrics.jsonl line 1 (step 1): changed" in said
    assert f"damaged  rollouts/{rollout.name}: changed" in said
    assert "damaged  checkpoints/step-000002: policy/model.safetensors is not what was written" in said
    shutil.rmtree(run / "checkpoints")
    assert main(["verify", str(run)]) == 1
    assert "checkpoints/step-000002: missing, and it was the newest checkpoint" in capsys.readouterr().out


def test_a_resume_says_what_is_missing(tiny: Tiny, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    assert tiny.run("run", "algorithm.steps=3") == 0
    assert "damaged: metrics.jsonl: missing: it had 2 lines" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints")
    assert tiny.run("run", "algorithm.steps=4") == 0
    assert "checkpoints/step-000003 is missing: it was the newest checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["config.json", "environment.json", "finished.json"])
def test_one_damaged_byte_leaves_a_run_resumable(
    tiny: Tiny, run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content.replace(b"{", b"\x7b\x00", 1))
    assert tiny.run("run", "algorithm.steps=3") == 0
    said = capsys.readouterr().out
    assert f"{name} was changed and is restored from digests.jsonl" in said
    assert "resuming after step 2" in said
    assert main(["verify", str(run)]) == 0


def test_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
