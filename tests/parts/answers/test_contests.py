"""rillflow evaluate: two models answer held-out prompts; functions, models and judges compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.evaluate import powers_of_two
from rillflow.cli.main import main

HEAD = """
[run]
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 200
held_out = 6
[policy]
lr = 3e-3
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 24, alphabet = "0123456789+-=|>AB" }
[rollout]
max_tokens = 4
"""
SFT = f"""{HEAD}
[algorithm]
name = "sft"
steps = 1
prompts_per_step = 32
"""
PAIRWISE = f"""{HEAD}
[algorithm]
name = "pairwise"
frame.template = "{{prompt}}|{{first}}|{{second}}>"
steps = 1
prompts_per_step = 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("contest")
    for name, text in (("sft.toml", SFT), ("pairwise.toml", PAIRWISE), ("preference.toml", PAIRWISE)):
        text = text.replace("pairwise", "preference") if name == "preference.toml" else text
        lines = [line for line in text.splitlines() if name != "preference.toml" or "frame" not in line]
        (found / name).write_text("\n".join(lines))
    for recipe, run, steps in (("sft", "one", 60), ("sft", "other", 1), ("pairwise", "judge", 1)):
        made = ["--set", f"algorithm.steps={steps}", "--dir", str(found / run), "--quiet"]
        assert main(["run", str(found / f"{recipe}.toml"), *made]) == 0
    assert main(["run", str(found / "preference.toml"), "--dir", str(found / "scorer"), "--quiet"]) == 0
    return found


def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "found.json"
    out.unlink(missing_ok=True)
    assert main(["evaluate", *words, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_task_s_function_compares_and_counts_right_answers_among_several(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = str(folder / "one"), str(folder / "other")
    found = evaluated(folder, one, "--against", other, "--samples", "4", "--temperature", "1")
    assert (found["prompts"], len(found["pairs"])) == (6, 24)
    assert found["wins"] + found["ties"] + found["losses"] == 24 and found["undecided"] == 0
    scores = [pair["scores"] for pair in found["pairs"]]
    assert found["wins"] == sum(a > b for a, b in scores)
    assert found["win_rate"] == pytest.approx((found["wins"] + found["ties"] / 2) / 24)
    assert found["win_rate"] > 0.5 and found["interval"][0] < found["win_rate"] < found["interval"][1]
    model = found["models"][0]
    assert model["mean_reward"] == model["pass@1"] == pytest.approx(sum(a for a, _ in scores) / 24)
    groups = [scores[start : start + 4] for start in range(0, 24, 4)]
    assert model["pass@4"] == pytest.approx(sum(any(a for a, _ in group) for group in groups) / 6)
    assert "win rate" in capsys.readouterr().out
    turned = evaluated(folder, other, "--against", one, "--samples", "4", "--temperature", "1")
    assert turned["win_rate"] == pytest.approx(1 - found["win_rate"]), "the same answers, the other way"
    assert turned["length_controlled"] == pytest.approx(1 - found["length_controlled"], abs=1e-6)


def test_a_judge_reads_both_orders_and_a_reward_model_scores(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = str(folder / "one"), str(folder / "other")
    found = evaluated(folder, one, "--against", other, "--judge", str(folder / "judge"), "--problems", "4")
    assert found["prompts"] == 4 and 0 <= found["contradiction"] <= 1
    assert all(sum(pair["scores"]) == pytest.approx(1) for pair in found["pairs"])
    assert "contradict each other" in capsys.readouterr().out
    turned = evaluated(folder, other, "--against", one, "--judge", str(folder / "judge"), "--problems", "4")
    assert turned["win_rate"] == pytest.approx(1 - found["win_rate"]), "no model has the better place"
    same = evaluated(folder, one, "--against", one, "--judge", str(folder / "judge"))
    assert (same["ties"], same["win_rate"], same["length_controlled"]) == (6, 0.5, 0.5)
    scored = evaluated(folder, one, "--against", other, "--reward-model", str(folder / "scorer"))
    assert all(isinstance(each, float) for pair in scored["pairs"] for each in pair["scores"])


def test_what_cannot_be_compared_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, model = str(folder / "one"), next((folder / "one/checkpoints").glob("*/policy"))
    (folder / "there.json").write_text("{}")
    for words, why in (
        ([one, "--judge", str(folder / "judge")], "--judge also needs --against"),
        ([str(model)], "--recipe FILE"),
        ([one, "--against", str(folder / "judge")], "has no policy"),
        ([one, "--against", one, "--judge", str(model)], "frame is not set"),
        ([one, "--against", one, "--reward-model", one], "has no reward model"),
        ([one, "--out", str(folder / "there.json")], "already exists"),
        ([one, "--temperature", "-1"], "temperature"),
    ):
        assert main(["evaluate", *words]) != 0
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", one, "--samples", "0"])
    assert main(["evaluate", str(model), "--recipe", str(folder / "sft.toml"), "--problems", "2"]) == 0
    assert powers_of_two(6) == [1, 2, 4, 6] and powers_of_two(1) == [1]


def test_evaluating_a_run_that_is_missing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "runs/none", "--against", "runs/other"]) == 2
    told = capsys.readouterr().err
    assert "there is no run runs/none" in told and "fix: correct the path" in told
