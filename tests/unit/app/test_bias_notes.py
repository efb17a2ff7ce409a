"""Settings that bias training are told by ``check`` and at the start of a run, and others are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.bias_notes import bias_notes, correction_notes
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.cli.main import main
from rillflow.formulas.config import Correction
from rillflow.rollout.config import SamplingConfig

NEW = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "alphabet": "0123456789+-="}
RESTRICTS = {
    "top_p": 0.8,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
}
SAMPLED = [name for name, each in ALGORITHMS.items() if "samples_per_prompt" in each.config.model_fields]


def loaded(*settings: str, name: str = "grpo", **sections: Any) -> Resolved:
    made: dict[str, Any] = {
        "task": {"source": "arithmetic", "digits": 1, "operators": "+", "size": 20, "held_out": 2},
        "rollout": {"max_tokens": 4},
        "policy": {"model": {"new": NEW}},
        "algorithm": {"name": name, "steps": 1, "prompts_per_step": 4},
        **({"cost": {"function": "cost.py:cost"}} if name == "safe_rlhf" else {}),
        **sections,
    }
    return load_recipe(made, settings)


def notes(*settings: str, name: str = "grpo") -> list[str]:
    return bias_notes(loaded(*settings, name=name))


@pytest.mark.parametrize("name", SAMPLED)
def test_every_algorithm_that_samples_is_warned_of_cuts_and_penalties(name: str) -> None:
    assert notes(name=name) == []
    for setting, value in RESTRICTS.items():
        (note,) = notes(f"rollout.{setting}={value}", name=name)
        assert note.startswith(f"warning: rollout.{setting} is {value}: the training rows are not samples")
        is_gradient = name not in ("best_of_n", "online_dpo")
        assert ("the gradient is biased" in note) == is_gradient
        assert "Remove it in training" in note


def test_several_settings_are_one_warning() -> None:
    (note,) = notes("rollout.top_p=0.9", "rollout.top_k=3")
    assert "rollout.top_p is 0.9 and rollout.top_k is 3" in note and "Remove them" in note


@pytest.mark.parametrize("name", ["sft", "dpo", "preference"])
def test_algorithms_that_only_evaluate_with_samples_are_not_warned(name: str) -> None:
    data = {} if name == "sft" else {"task": {"source": "pairs.jsonl"}}
    assert bias_notes(loaded("rollout.top_p=0.8", name=name, **data)) == []


def test_temperature_and_limits_bias_nothing() -> None:
    assert notes("rollout.temperature=0.7", "rollout.max_tokens=3", "evaluate.temperature=0") == []


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (SamplingConfig(top_p=0.5), "sampling of policy.generate: top_p is 0.5"),
        (SamplingConfig(temperature=0.5), "temperature is 0.5, and the trainer reads the rows at"),
        (SamplingConfig(), None),
    ],
)
def test_sampling_that_the_algorithm_gives_itself_counts(sampling: SamplingConfig, said: str | None) -> None:
    def step(flow: Any, prompts: Any, config: Any) -> Any:
        rollouts = flow.policy.generate(prompts, samples=2, sampling=sampling)
        return flow.policy.update(rollouts, flow.reward.score(rollouts), loss=config.loss, passes=config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "grpo", replace(ALGORITHMS["grpo"], step=step))
        found = bias_notes(loaded("rollout.top_p=0.9"))
    assert len(found) == (said is not None) and all(str(said) in note for note in found)


APART = (
    'placement.backend="inline"',
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers" }',
)
TAIL = 'schedule={mode="tail_batching",'
READY = (*APART, 'schedule={mode="ahead",freshness=2}', 'schedule.mode="ready_first"')


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ['schedule={mode="tail_batching",oversample_samples=1.5}'],
            "the 8 of 12 rows of a prompt that end first",
        ),
        (['schedule={mode="tail_batching",oversample_prompts=1.5}'], None),
        ([*READY, 'schedule.on_stale="drop"'], 'on_stale is "drop"'),
        ([*READY, "schedule.keep_cache=true"], "schedule.keep_cache is true"),
        ([*READY], None),
        (["algorithm.loss.aggregation=sequence_mean"], 'aggregation is "sequence_mean"'),
        (["algorithm.loss.aggregation=constant"], None),
    ],
)
def test_the_choice_of_rows_and_their_mean_are_told(settings: list[str], said: str | None) -> None:
    found = notes(*settings)
    assert len(found) == (said is not None) and all(str(said) in note for note in found)


@pytest.mark.parametrize("name", ["tis", "sequence_tis", "icepop", "m2po", "topr"])
def test_each_correction_tells_its_bias(name: Correction) -> None:
    given = (*APART, 'schedule={mode="ahead",freshness=1}', f"algorithm.loss.correction={name}")
    (note,) = correction_notes(loaded(*given))
    assert "which biases the gradient (mismatch/bounded/share)" in note


def test_check_and_the_start_of_a_run_print_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "run.toml"
    new = ", ".join(f"{name} = {json.dumps(value)}" for name, value in NEW.items())
    recipe.write_text(
        f"""[run]
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 20
held_out = 2
[policy]
model.new = {{ {new} }}
[rollout]
max_tokens = 4
top_p = 0.8
[evaluate]
problems = 0
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = 2
"""
    )
    for command in ("check", "run"):
        assert main([command, str(recipe), "--dir", str(tmp_path / "run")]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        assert "warning: rollout.top_p is 0.8" in said
