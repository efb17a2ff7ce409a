"""Defaults by device and model: what each rule chooses, where a value stays, and what a user sees."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rillflow.app import machine, model_files
from rillflow.app.check import setting_lines
from rillflow.app.defaults import RULES, SETTINGS, Setup, choices, on_cuda
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.resume import with_choices_of_run
from rillflow.app.sections import Recipe
from rillflow.config.load import validate
from rillflow.config.schema import value_of, walk
from rillflow.runs import layout

LARGE = {"model": {"path": "large"}}
SMALL = {"model": {"new": {"hidden": 64, "context": 512}}}
LORA = {"model": {"path": "large", "adapter": {"rank": 8}}}
AMPERE, TURING = (8, 0), (7, 5)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write the header of a model with 200 million parameters; nothing reads its numbers."""
    (folder := tmp_path / "large").mkdir()
    config = {"model_type": "qwen2", "hidden_size": 1000, "num_hidden_layers": 1, "num_attention_heads": 10}
    config |= {"vocab_size": 200_000, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    shape = [200_000, 1000]
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 4 * 10**8]}}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * 10**8)  # sparse
    return tmp_path


def recipe(policy: dict[str, Any], name: str = "grpo", **sections: Any) -> Recipe:
    algorithm = {"name": name, "steps": 1}
    return validate(Recipe, {"policy": policy, "algorithm": algorithm, **sections}, "test")


def setup_of(base: Path, capability: tuple[int, int] | None, policy: Any, name: str = "grpo") -> Setup:
    return Setup(recipe=recipe(policy, name), given={}, base=base, capability=capability)


def chosen(base: Path, capability: tuple[int, int] | None, policy: Any, name: str = "grpo") -> dict[str, Any]:
    setup = setup_of(base, capability, policy, name)
    return {each.setting.rpartition(".")[2]: each.value for each in choices(setup)}


@pytest.mark.parametrize(
    ("capability", "policy", "name", "expected"),
    [
        (None, SMALL, "grpo", ("float32", 1e-5, False)),
        (AMPERE, SMALL, "grpo", ("float32", 1e-5, False)),
        (AMPERE, LARGE, "grpo", ("bfloat16", 1e-6, True)),
        (AMPERE, LARGE, "dpo", ("bfloat16", 1e-6, True)),
        (TURING, LARGE, "grpo", ("float32", 1e-6, True)),
        (None, LARGE, "grpo", ("float32", 1e-6, False)),
        (AMPERE, LORA, "grpo", ("bfloat16", 1e-5, True)),
        (AMPERE, LARGE, "sft", ("bfloat16", 1e-5, True)),
        (AMPERE, LORA, "sft", ("bfloat16", 1e-4, True)),
        (AMPERE, LARGE, "preference", ("bfloat16", 1e-5, True)),
    ],
)
def test_values_follow_from_device_size_adapter_and_algorithm(
    large: Path, capability: Any, policy: Any, name: str, expected: tuple[Any, ...]
) -> None:
    found = chosen(large, capability, policy, name)
    assert (found["dtype"], found["lr"], found["gradient_checkpointing"]) == expected
    assert found["engine"] == "native"


@pytest.mark.parametrize(
    ("steps", "minibatches", "warmup"),
    [(49, 1, 0), (50, 1, 5), (25, 2, 5), (99, 1, 5), (100, 1, 10), (10, 10, 10)],
)
def test_a_run_of_enough_optimiser_steps_warms_up(
    tmp_path: Path, steps: int, minibatches: int, warmup: int
) -> None:
    file = written(tmp_path, "new = { hidden = 64, context = 512 }")
    settings = (f"algorithm.steps={steps}", f"algorithm.minibatches={minibatches}")
    found = loaded(file, *settings)
    assert found.recipe.policy.warmup_steps == warmup
    (line,) = [line for line in setting_lines(found) if line.startswith("policy.warmup_steps")]
    assert f"policy.warmup_steps = {warmup}  (auto: " in line, "the first screen of a check has it"
    own = loaded(file, *settings, "policy.warmup_steps=2")
    assert own.recipe.policy.warmup_steps == 2


def test_a_model_of_unknown_size_counts_as_large(tmp_path: Path) -> None:
    assert chosen(tmp_path, AMPERE, {"model": {"path": "nowhere/else"}})["dtype"] == "bfloat16"


def test_an_adapter_in_the_models_directory_has_the_choices_of_an_adapter(large: Path) -> None:
    (folder := large / "tuned").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "../large", "r": 8, "lora_alpha": 16}
    (folder / "adapter_config.json").write_text(json.dumps({**adapter, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").touch()
    assert chosen(large, AMPERE, {"model": {"path": "tuned"}})["lr"] == 1e-5


def test_every_setting_with_rules_exists_has_a_last_rule_and_says_auto(large: Path) -> None:
    keys = {key.dotted: key.field for key in walk(Recipe)}
    assert set(SETTINGS) <= set(keys)
    for setting in SETTINGS:
        assert '"auto"' in (keys[setting].description or "")
        last = [rule for rule in RULES if rule.setting == setting][-1]
        assert last.applies(setup_of(large, None, SMALL))


def written(folder: Path, model: str = 'path = "large"', text: str = "") -> Path:
    file = folder / "run.toml"
    file.write_text(f'[policy]\nmodel = {{ {model} }}\n[algorithm]\nname = "grpo"\nsteps = 1\n{text}')
    return file


def loaded(file: Path, *settings: str) -> Resolved:
    return load_recipe(file, [f"run.dir={file.parent / 'run'}", *settings])


def test_a_given_value_wins_and_auto_is_the_same_as_nothing(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: 1)
    plain, named = loaded(written(large)), [f'{setting}="auto"' for setting in SETTINGS]
    assert plain.recipe.policy.model.dtype == "bfloat16" and plain.recipe.policy.lr == 1e-6
    assert loaded(written(large), *named) == plain
    own = loaded(written(large), "policy.lr=3e-6", "policy.model.dtype=float32").recipe.policy
    assert (own.lr, own.model.dtype, own.gradient_checkpointing) == (3e-6, "float32", True)
    assert loaded(written(large), "run.device=cpu").recipe.policy.model.dtype == "float32"


def test_check_shows_each_choice_with_its_reason(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: 1)
    lines = setting_lines(loaded(written(large), "policy.lr=1e-6"))
    said = [line for line in lines if "(auto: " in line]
    shown = {line.partition(" = ")[0] for line in said}
    assert shown == {*SETTINGS} - {"policy.lr", "task.clock"}, "nothing reads the clock"
    assert any("bfloat16" in line for line in said) and "policy.lr = 1e-06  (--set)" in lines


def test_a_server_selects_vllm_before_the_correction_of_the_loss_is_chosen(tmp_path: Path) -> None:
    file = written(tmp_path, "new = { hidden = 64, context = 512 }", '[rollout]\nserver = "python"\n')
    found = loaded(file).recipe
    assert found.rollout.engine == "vllm"
    assert found == loaded(file, "rollout.engine=vllm").recipe
    assert found.algorithm != loaded(file, "rollout.engine=native").recipe.algorithm


def test_a_resumed_run_keeps_its_values_on_another_device(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: 1)
    run = large / "run"
    (run / layout.CHECKPOINTS / "step-000001").mkdir(parents=True)
    first = loaded(written(large)).recipe
    (run / layout.CONFIG).write_text(first.model_dump_json())
    monkeypatch.setattr("rillflow.app.resume.holds_step", lambda _: True)
    monkeypatch.setattr(machine, "cuda_devices", lambda: 0)
    again = loaded(written(large))
    assert again.recipe.policy.model.dtype == "float32"
    resumed = with_choices_of_run(again, run)
    kept = resumed.recipe
    assert kept.policy.model.dtype == "bfloat16" and kept.policy.gradient_checkpointing
    named = with_choices_of_run(loaded(written(large), "policy.gradient_checkpointing=false"), run).recipe
    assert named.policy.model.dtype == "bfloat16" and not named.policy.gradient_checkpointing
    assert value_of(kept, "policy.lr") == 1e-6
    assert resumed.given["policy.model.dtype"] == f"auto: as {run} began"
    assert resumed.phases[-1].train.lr == 1e-6 and resumed.is_open("policy.lr")


def test_a_plan_for_gpus_has_their_choices_on_a_machine_without(large: Path) -> None:
    here = loaded(written(large), "policy.gradient_checkpointing=false")
    there = on_cuda(here).recipe.policy
    assert here.recipe.policy.model.dtype == "float32" and there.model.dtype == "bfloat16"
    assert not there.gradient_checkpointing, "the recipe names it"


def test_the_size_is_not_read_where_every_setting_is_given(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(model_files, "sizes_of_directory", refuse)
    given = ("policy.lr=1e-6", "policy.model.dtype=float32", "policy.gradient_checkpointing=true")
    assert loaded(written(large), *given).recipe.policy.lr == 1e-6
