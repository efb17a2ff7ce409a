"""Greedy soups: which parents are kept, by any score and by a recipe's held-out rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rillflow.cli.main import main
from rillflow.errors import ModelError
from rillflow_merging.soup import greedy_soup

sys.path.insert(0, str(Path(__file__).parent))
from conftest import NEW, Made

RECIPE = f"""
[run]
threads = 1
[task]
digits = 1
operators = "+"
size = 40
held_out = 8
[policy]
model.new = {{ hidden = 8, alphabet = "{NEW.alphabet}" }}
[rollout]
max_tokens = 2
[reward]
function = "reward.py:small"
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = 2
samples_per_prompt = 2
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


def mean_weight(folder: Path) -> float:
    weights = load_file(folder / "model.safetensors").values()
    return float(torch.cat([each.flatten() for each in weights]).mean())


def test_parents_are_added_while_the_score_does_not_fall(make: Made, tmp_path: Path) -> None:
    parents = [make(name, noise=seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))]
    target = sum(map(mean_weight, parents[1:])) / 2
    said = greedy_soup(parents, tmp_path / "out", lambda folder: -abs(mean_weight(folder) - target))
    kept = [Path(each["parent"]).name for each in said["trials"] if each["is_kept"]]
    assert sorted(kept) == ["b", "c"] or len(kept) == 1
    assert {Path(each["path"]).name for each in said["parents"]} == set(kept)
    alone = [each["alone"] for each in said["trials"]]
    assert alone == sorted(alone, reverse=True)
    best = max(each["together"] for each in said["trials"] if each["is_kept"])
    assert -abs(mean_weight(tmp_path / "out") - target) == pytest.approx(best, abs=1e-6)
    assert not list(tmp_path.glob(".out*"))
    one = greedy_soup(parents, tmp_path / "one", lambda folder: -float(folder.parent != tmp_path))
    assert [each["is_kept"] for each in one["trials"]] == [True, False, False]


def test_a_score_that_is_no_number_ends_it(make: Made, tmp_path: Path) -> None:
    parents = [make("a", noise=1), make("b", noise=2)]
    with pytest.raises(ModelError, match=r"the score of .* is nan"):
        greedy_soup(parents, tmp_path / "out", lambda _: float("nan"))
    assert not (tmp_path / "out").exists()


def test_a_recipe_says_which_parents_are_kept(
    make: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parents = [str(make("a", noise=1)), str(make("b", noise=2))]
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    out = tmp_path / "out"
    words = ["merge", *parents, "--method", "greedy", "--out", str(out)]
    assert main(words) == 2
    assert "--method greedy needs --recipe" in capsys.readouterr().err
    assert main([*words, "--recipe", str(tmp_path / "run.toml")]) == 0
    said = json.loads((out / "merge.json").read_text())
    assert said["method"] == "greedy" and said["trials"][0]["is_kept"]
    assert 0 <= said["trials"][1]["alone"] <= said["trials"][0]["alone"] <= 1
    nothing = RECIPE.replace("held_out = 8", "held_out = 0")
    (tmp_path / "run.toml").write_text(nothing)
    assert main([*words[:-1], str(tmp_path / "again"), "--recipe", str(tmp_path / "run.toml")]) == 2
    assert "has no held-out rows" in capsys.readouterr().err
