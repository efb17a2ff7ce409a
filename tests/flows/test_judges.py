"""A judge trains on pairs in its own run, and another run trains a policy on its preferences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.check import check
from rillflow.errors import ConfigError
from rillflow.runs.reader import read_rollouts
from tests.flows.whole_runs import lines, loaded, numbers, ran

MODEL = """
[policy]
lr = 3e-3
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 24, alphabet = "0123456789+-=|>AB" }
"""
TASK = """
[run]
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 200
held_out = 10
"""
PAIRWISE = f"""{TASK}{MODEL}
[algorithm]
name = "pairwise"
frame.template = "{{prompt}}|{{first}}|{{second}}>"
steps = 4
prompts_per_step = 16
[evaluate]
every = 2
"""
POLICY = f"""{TASK}{MODEL}
[rollout]
max_tokens = 4
[reward.judge]
model = "judge"
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = 4
samples_per_prompt = 3
"""


SFT = 'algorithm={name="sft",steps=1,prompts_per_step=4}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(PAIRWISE)
    (tmp_path / "use.toml").write_text(POLICY)
    return tmp_path


def test_a_judge_is_trained_and_scores_a_policy(folder: Path) -> None:
    assert check(loaded(folder / "run.toml", "judge")).problems == []
    run = ran(folder / "run.toml", "judge")
    assert [line["judge/nll/mean"]["count"] for line in numbers(run)] == [32] * 4
    judged = lines(run, "evaluations.jsonl")
    assert [line["step"] for line in judged] == [0, 2, 4]
    assert {"calibration_error", "contradiction", "position_bias"} <= judged[-1].keys()
    kept = json.loads((run / "checkpoints/step-000004/judge/config.json").read_text())
    assert kept["judge_frame"]["template"] == "{prompt}|{first}|{second}>"

    assert check(loaded(folder / "use.toml", "use")).problems == []
    (step,) = numbers(ran(folder / "use.toml", "use"))
    assert step["reward/score/mean"]["mean"] == pytest.approx(0.5, abs=1e-6), "what one wins another loses"
    assert step["judge/contradiction/share"]["count"] == 12 and 0 < step["reward/score/max"]["max"] < 1
    (two,) = numbers(ran(folder / "use.toml", "two", 'placement.backend="inline"', "placement.pools.main=2"))
    ranks = ['placement.backend="inline"', "placement.pools.main=2", "algorithm.prompts_per_step=1"]
    few = numbers(ran(folder / "run.toml", "ranks", "algorithm.steps=1", *ranks))
    assert few[0]["judge/nll/mean"]["count"] == 2, "one pair in both orders, and a rank that has none"
    assert two["reward/score/max"]["max"] == pytest.approx(step["reward/score/max"]["max"], abs=1e-5)
    frame = 'reward.judge.frame={template="{prompt}|{answer}>",labels=["1","2"]}'
    (rated,) = numbers(ran(folder / "use.toml", "rated", frame))
    assert 1 < rated["reward/score/mean"]["mean"] < 2 and "judge/contradiction/share" not in rated


def test_a_judge_that_cannot_be_asked_is_refused_before_the_run(folder: Path) -> None:
    plain = ran(folder / "run.toml", "plain", "rollout.max_tokens=4", SFT)
    model = json.dumps(str(plain / "checkpoints/step-000001/policy"))
    problems = check(loaded(folder / "use.toml", "use", f"reward.judge.model={model}")).problems
    assert any("reward.judge.frame is not set" in each.what for each in problems)
    problems = check(
        loaded(folder / "use.toml", "use", f"reward.judge.model={json.dumps(str(plain))}")
    ).problems
    assert any("has no judge" in each.what for each in problems)
    for settings, why in (
        (['reward.model="plain"'], "remove one of them"),
        (["algorithm={name='reinforce_pp',steps=1,samples_per_prompt=1}"], "compares answers"),
        (
            ["reward.judge.frame={template='{prompt}{answer}',labels=['1','2']}", "reward.judge.abstain=0.1"],
            "rate",
        ),
        (["reward.judge.frame={template='{prompt}'}"], "placeholders"),
        (["reward.judge.abstain=0.5"], "abstain"),
    ):
        with pytest.raises(ConfigError) as caught:
            loaded(folder / "use.toml", "use", *settings)
        assert why in str(caught.value)


def test_a_function_and_a_judge_score_together_each_with_its_curve(folder: Path) -> None:
    """The reward is the weighted sum of both scores, row by row, as computed by hand."""
    ran(folder / "run.toml", "judge", "algorithm.steps=1")
    weights = "reward.weights={function=2.0,judge=0.5}"
    assert check(loaded(folder / "use.toml", "use", weights)).problems == []
    run = ran(folder / "use.toml", "use", weights)
    rows = read_rollouts(run, 1)
    assert all(
        row.reward == pytest.approx(2 * row.parts["function"] + row.parts["judge"] / 2, abs=1e-6)
        for row in rows
    )
    (step,) = numbers(run)
    assert step["rewards/judge/mean"]["mean"] == pytest.approx(0.5) and "rewards/function/mean" in step
    for wrong in ("{function=1.0}", "{judge=1.0,model=1.0}", "{judge=nan}", "{judge=1.0,rule=1.0}"):
        with pytest.raises(ConfigError, match=r"reward\.weights"):
            loaded(folder / "use.toml", "use", f"reward.weights={wrong}")
