"""Whole runs by the documented commands: a reward must rise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from rillflow.observe.layout import rollout_files
from rillflow.observe.reader import read_rollouts

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
    """The recipe of one's own: another architecture from a directory, a JSONL file, a reward function."""
    folder = tmp_path / "own"
    shutil.copytree(ROOT / "recipes" / "your_own", folder, ignore=shutil.ignore_patterns("model"))
    subprocess.run([sys.executable, str(folder / "make_model.py")], check=True, timeout=120)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_prompts_and_reward_of_ones_own(own: Path, tmp_path: Path, seed: int) -> None:
    """The README's claim: it writes the letter it is asked for, in phrases it was not trained on."""
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


def test_the_checkpoint_is_plain_hugging_face(own: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    rillflow("run", str(own / "run.toml"), "--dir", str(run), "--set", "algorithm.steps=1", "--quiet")
    policy = max((run / "checkpoints").glob("step-*")) / "policy"
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokens = AutoTokenizer.from_pretrained(policy)("say a: ", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()


def test_every_step_leaves_its_rollouts(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rillflow("run", str(recipe), "--dir", str(run), "--quiet")
    assert [*rollout_files(run)] == [*range(7, 13)]
    rows = read_rollouts(run, 7)
    assert len(rows) == 24
    for row in rows:
        assert len(row.tokens) == len(row.logprobs) == len(row.versions) == len(row.token_texts)
        assert row.outcome == "score"
        assert row.reward in (0.0, 1.0)
        assert row.prompt.endswith("=")
        assert set(row.versions) <= {-1, 6}
