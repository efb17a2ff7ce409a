"""Whole runs with the documented commands: a reward must rise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rillflow.cli.main import main
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import read_rollouts

ROOT = Path(__file__).parents[2]


def rillflow(*arguments: str, cwd: Path = ROOT, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rillflow.cli.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rewards(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        line["metrics"]["reward/score/mean"]["mean"]
        for line in lines
        if "reward/score/mean" in line["metrics"]
    ]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Copy recipes/your_own: another architecture from a directory, a JSONL file, a reward function."""
    folder = tmp_path / "own"
    shutil.copytree(ROOT / "recipes" / "your_own", folder, ignore=shutil.ignore_patterns("model"))
    subprocess.run([sys.executable, str(folder / "make_model.py")], check=True, timeout=120)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_prompts_and_reward_of_ones_own(own: Path, tmp_path: Path, seed: int) -> None:
    """The README's claim: it writes the requested letter, in phrases that it was not trained on."""
    run = tmp_path / "run"
    rillflow("run", str(own / "run.toml"), "--dir", str(run), "--set", f"run.seed={seed}", "--quiet")
    last = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["count"] == 8
    assert last["mean_reward"] >= 7 / 8
    assert rillflow("ask", str(run), "say a: ").strip() == "aaaa"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_same_learns_in_bfloat16(own: Path, tmp_path: Path) -> None:
    chosen = ("--set", "algorithm.steps=60", "--set", "policy.model.dtype=bfloat16")
    rillflow("run", str(own / "run.toml"), "--dir", str(tmp_path / "run"), *chosen, "--quiet")
    seen = rewards(tmp_path / "run")
    assert len(seen) == 60
    assert mean(seen[-5:]) > mean(seen[:5]) + 0.1


@pytest.fixture(scope="module")
def ran(shared_recipe: Path) -> Path:
    """Return the directory of a run of 6 steps after a warm start of 6."""
    run = shared_recipe.parent / "run"
    assert main(["run", str(shared_recipe), "--dir", str(run), "--quiet"]) == 0
    return run


def test_the_checkpoint_is_plain_hugging_face(ran: Path) -> None:
    policy = max((ran / "checkpoints").glob("step-*")) / "policy"
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokens = AutoTokenizer.from_pretrained(policy)("1+2=", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()


def test_every_step_leaves_its_rollouts(ran: Path) -> None:
    assert list(rollout_files(ran)) == [7, 8, 9, 10, 11, 12]
    rows = read_rollouts(ran, 7)
    assert len(rows) == 24
    for row in rows:
        assert len(row.tokens) == len(row.logprobs) == len(row.versions) == len(row.token_texts)
        assert row.outcome == "score"
        assert row.reward in (0.0, 1.0)
        assert row.prompt.endswith("=")
        assert set(row.versions) <= {-1, 6}
