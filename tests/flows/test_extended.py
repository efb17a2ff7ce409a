"""A run goes on in its directory under settings that may change, and says which did, from which step on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rillflow.assembly.resume import MAY_CHANGE
from rillflow.cli.main import main

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "prompts.jsonl"
held_out = 2
[reward]
function = "scores.py:reward"
[policy]
lr = 1e-3
model.new = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[warm_start]
steps = 2
prompts_per_step = 4
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 4
samples_per_prompt = 2
minibatches = 2
"""
REWARD = "def reward(prompts, completions, **_):\n    return [len(text) / 3 for text in completions]\n"
TIMES = {"run/step_seconds/mean"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "scores.py").write_text(REWARD)
    write_rows(tmp_path, 12)
    return tmp_path / "run.toml"


def write_rows(folder: Path, count: int, first: str = "0+1=") -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)]
    rows[0]["prompt"] = first
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run(recipe: Path, folder: str, *settings: str) -> int:
    words = [word for setting in settings for word in ("--set", setting)]
    return main(["run", str(recipe), "--dir", str(recipe.parent / folder), *words])


def numbers(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line["metrics"].items() if k not in TIMES} for line in lines]


def rates(folder: Path) -> list[float]:
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/lr/mean"]["mean"] for line in lines]


def test_a_finished_run_goes_on_to_more_steps_with_the_bits_of_one_that_was_that_long(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, "long", "algorithm.steps=6") == 0
    assert run(recipe, "short") == 0
    assert "--set algorithm.steps=6 --dir" in capsys.readouterr().out
    assert run(recipe, "short", "algorithm.steps=6") == 0
    said = capsys.readouterr().out
    assert "resuming after step 5" in said
    assert "Changed            from step 6 on, algorithm.steps: 3 -> 6" in said
    long, short = recipe.parent / "long", recipe.parent / "short"
    assert numbers(long) == numbers(short)
    for file in ("policy/model.safetensors", "policy.optimizer/rank-00000.safetensors"):
        first, second = (load_file(folder / "checkpoints/step-000008" / file) for folder in (long, short))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), file
    assert json.loads((short / "finished.json").read_text()) == {"steps": 8}
    assert "from step 6 on, algorithm.steps: 3 -&gt; 6" in (short / "report.html").read_text()
    assert run(recipe, "short", "algorithm.steps=6") == 0
    assert "is finished" in capsys.readouterr().out
    assert run(recipe, "short", "algorithm.steps=2") == 2
    assert "algorithm.steps is 2, 4 with all phases, and" in capsys.readouterr().err


def test_a_schedule_goes_on_as_that_of_the_longer_run_and_a_rate_changes_from_there_on(recipe: Path) -> None:
    linear = "policy.schedule=linear"
    assert run(recipe, "run", linear) == 0
    assert run(recipe, "run", linear, "algorithm.steps=6") == 0
    # 2 optimiser steps a step: step s begins at share 1 - 2 (s - 1) / total, its mean is half a share later
    expected = [1e-3 * (1 - (2 * step + 0.5) / 6) for step in range(3)]
    expected += [1e-3 * (1 - (2 * step + 0.5) / 12) for step in range(3, 6)]
    assert rates(recipe.parent / "run")[2:] == pytest.approx(expected, rel=1e-6)
    settings = (linear, "algorithm.steps=8", "policy.lr=1e-4", "policy.schedule=constant")
    assert run(recipe, "run", *settings[1:]) == 0
    assert rates(recipe.parent / "run")[8:] == pytest.approx([1e-4, 1e-4])
    starts = json.loads((recipe.parent / "run/environment.json").read_text())["starts"]
    assert [[change["key"] for change in start.get("changes", [])] for start in starts] == [
        [],
        ["algorithm.steps"],
        ["policy.lr", "policy.schedule", "algorithm.steps"],
    ]


def test_the_rewards_source_is_kept_and_a_change_of_it_is_named(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, "run") == 0
    (recipe.parent / "scores.py").write_text(REWARD.replace("/ 3", "/ 30"))
    capsys.readouterr()
    assert run(recipe, "run", "algorithm.steps=4") == 0
    assert re.search(
        r"changed: from step 6 on, sources.reward: '\w{16}' -> '\w{16}'", capsys.readouterr().out
    )
    kept = sorted(path.read_text() for path in (recipe.parent / "run/sources").iterdir())
    assert kept == sorted([REWARD, REWARD.replace("/ 3", "/ 30")])


def test_edited_data_and_other_settings_are_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "run") == 0
    before = numbers(recipe.parent / "run")
    for settings in (["algorithm.samples_per_prompt=4"], ["run.seed=4"], ["policy.model.new.layers=2"]):
        assert run(recipe, "run", "algorithm.steps=4", *settings) == 2
        assert settings[0].partition("=")[0] in capsys.readouterr().err
    write_rows(recipe.parent, 12, first="9+9=")
    assert run(recipe, "run", "algorithm.steps=4") == 2
    assert "data" in capsys.readouterr().err
    assert numbers(recipe.parent / "run") == before


def test_the_page_lists_the_settings_that_may_change_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/design/run_directory.md").read_text()
    table = page.partition("## What may change")[2].partition("\n## ")[0]
    listed = [name for line in table.splitlines() if line.startswith("| `") for name in _names(line)]
    assert sorted(listed) == sorted(MAY_CHANGE)


def _names(line: str) -> list[str]:
    return re.findall(r"`([a-z_.]+)`", line.split("|")[1])
