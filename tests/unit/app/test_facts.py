"""Facts about a recipe's files, which are read once, on first use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rillflow.app.check_report import Report
from rillflow.app.facts import RecipeFacts
from rillflow.app.preflight_checks import look
from rillflow.app.recipe import load_recipe
from rillflow.errors import DataError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model, save_model
from rillflow.tasks.kinds import PROMPTS

RECIPE = """
[task]
source = "prompts.jsonl"
held_out = 2
[policy]
model.new = { hidden = 32, layers = 2, context = 32 }
[rollout]
max_tokens = 8
[reward]
function = "reward.py:length"
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(
        "def length(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    rows = [json.dumps({"prompt": f"{number}+1="}) for number in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return tmp_path


def facts(folder: Path, *settings: str) -> RecipeFacts:
    return RecipeFacts(resolved=load_recipe(folder / "run.toml", settings))


def test_a_fact_is_read_once(folder: Path) -> None:
    found = facts(folder)
    assert found.longest == 4 + 8
    (folder / "prompts.jsonl").unlink()
    assert found.encoded is not None and len(found.encoded.train[PROMPTS]) == len(found.task.train) == 8


def test_an_error_of_a_fact_that_several_checks_read_is_one_problem(folder: Path) -> None:
    (folder / "prompts.jsonl").unlink()
    report = Report()
    look(facts(folder, "reward.function=none"), report)
    (problem,) = report.problems
    assert isinstance(problem, DataError) and "prompts.jsonl" in problem.what


@pytest.mark.parametrize("architecture", ["qwen3_moe", "stablelm"])
def test_a_new_model_of_an_unusual_type_is_counted_exactly(folder: Path, architecture: str) -> None:
    found = facts(folder, f"policy.model.new.architecture={architecture}")
    sizes = found.sizes
    assert sizes is not None and not found.is_alike
    config = found.recipe.policy.model
    module = load_model(config, seed=0, device=torch.device("cpu"), base=folder).module
    weights = dict(module.named_parameters())
    assert sizes.parameters == sum(each.numel() for each in weights.values())
    assert sizes.experts == sum(each.numel() for name, each in weights.items() if ".experts." in name)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2"])
def test_parameters_of_experts_that_get_no_adapter_are_counted(folder: Path, architecture: str) -> None:
    new = facts(folder, f"policy.model.new.architecture={architecture}").recipe.policy.model
    save_model(load_model(new, seed=0, device=torch.device("cpu"), base=folder), folder / "base")
    report = Report()
    named = ("policy.model.new=none", "policy.model.path=base", "policy.model.adapter.rank=2")
    found = facts(folder, *named)
    look(found, report)
    assert found.sizes is not None and not report.problems
    told = f"{found.sizes.experts:,} of the model's {found.sizes.parameters:,} parameters get no adapter"
    assert any(note.startswith(told) for note in report.notes) == (architecture == "qwen3_moe")


def test_models_are_known_by_the_section_that_names_them(folder: Path) -> None:
    new = facts(folder).recipe.policy.model.new
    model = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=folder)
    for name in ("base", "critic", "scorer"):
        save_model(model, folder / name)
    named = ("policy.model.new=none", "policy.model.path=base", "critic.path=critic", "reward.model=scorer")
    found = facts(folder, *named)
    assert found.source == str(folder / "base") and found.directory == folder / "base"
    assert found.named == {"critic": str(folder / "critic"), "reward": str(folder / "scorer")}
    assert found.scorers == {"reward.model": str(folder / "scorer")}
