"""A stopped and resumed run has the bits of an undisturbed one: weights, training state and metrics.

The matrix has everything that a run can train, and everything that its optimiser can keep. The clip binds
before and after the stop, so the last bit of the gradient norm reaches every weight.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model

sys.path.insert(0, str(Path(__file__).parent))
from held import ended_in_the_middle, write_scores
from warm import Command
from whole_runs import numbers

RECIPE = """
[run]
seed = 3
threads = 1
checkpoint_every = 1
keep_checkpoints = 9
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 40
held_out = 4
[policy]
lr = 0.05
max_grad_norm = 0.1
model.path = "base"
[rollout]
max_tokens = 4
[evaluate]
problems = 0
[algorithm]
prompts_per_step = 8
"""
SFT = 'name = "sft"\nsteps = 5\n'
SAMPLED = 'steps = 4\nsamples_per_prompt = 2\nminibatches = 2\n[reward]\nfunction = "scores.py:reward"\n'
KINDS = {
    "all": "",
    "lora": "rank = 4",
    "rslora": 'rank = 4, kind = "rslora"',
    "dora": 'rank = 4, kind = "dora"',
    "int8": 'rank = 4, base = "int8"',
    "4bit": 'rank = 4, base = "4bit"',
}
"""What a run trains."""
STATES = {
    "plain": (),
    "narrow": ("policy.optimizer_dtype=bfloat16",),
    "masters": ("policy.model.dtype=bfloat16",),
    "offload": ("policy.offload=optimizer",),
    "narrow-masters-offload": (
        "policy.optimizer_dtype=bfloat16",
        "policy.model.dtype=bfloat16",
        "policy.offload=all",
    ),
    "decay": ("policy.weight_decay=0.1", "policy.beta1=0.8", "policy.schedule=cosine"),
    "recomputed": ("policy.gradient_checkpointing=true", "policy.tokens_per_micro_batch=40"),
}
"""What the optimiser keeps of a step, and how the step is made."""
DAILY = {
    ("all", "plain"),
    ("lora", "plain"),
    ("dora", "masters"),
    ("int8", "offload"),
}
NEEDS_LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
STOPS_AFTER = 2


class StoppedHereError(Exception):
    """Raised after a step, in place of a kill."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model and recipes."""
    made = tmp_path_factory.mktemp("resumed")
    new = NewModel(hidden=128, layers=2, heads=4, kv_heads=2, context=16, alphabet="0123456789+=")
    save_model(
        load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path()), made / "base"
    )
    (made / "sft.toml").write_text(RECIPE + SFT)
    for name in ("grpo", "ppo"):
        (made / f"{name}.toml").write_text(f'{RECIPE}name = "{name}"\n{SAMPLED}')
    write_scores(made)
    return made


def words(run: Path, *settings: str) -> list[str]:
    return [f"run.dir={json.dumps(str(run))}", *settings]


def begin(recipe: Path, run: Path, *settings: str, stops: bool = False) -> Path:
    """Run until the end, or until an error after some whole steps."""
    found = load_recipe(recipe, words(run, *settings))

    def told(_phase: str, step: int, _metrics: Any) -> None:
        if stops and step == STOPS_AFTER:
            raise StoppedHereError

    if stops:
        with pytest.raises(StoppedHereError):
            launch(found, quiet=True, told=told)
    else:
        launch(found, quiet=True)
    return run


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights and training states of the last checkpoint."""
    newest = max((run / "checkpoints").iterdir())
    files = sorted(newest.glob("*/*.safetensors"))
    return {f"{file.parent.name}/{name}": each for file in files for name, each in load_file(file).items()}


def assert_equal(whole: Path, resumed: Path, *, clips: bool = True) -> None:
    """Compare two runs bit for bit; the clip must have bound before the stop and after it."""
    one, other = tensors(whole), tensors(resumed)
    assert one.keys() == other.keys()
    odd = [name for name, each in one.items() if not torch.equal(each, other[name])]
    assert not odd, f"{len(odd)} of {len(one)} tensors differ, the first is {odd[0]}"
    assert numbers(whole) == numbers(resumed)
    norms = [step["train/grad_norm/mean"]["mean"] for step in numbers(whole)]
    if clips:
        assert max(norms[:STOPS_AFTER]) > 0.1 and max(norms[STOPS_AFTER:-1]) > 0.1, norms


def adapter(kind: str) -> tuple[str, ...]:
    return (f"policy.model.adapter={{ {KINDS[kind]} }}",) if KINDS[kind] else ()


def kinds() -> list[Any]:
    return [pytest.param(each, marks=[NEEDS_LIBRARY] if each == "4bit" else []) for each in KINDS]


def case(kind: str, state: str) -> Any:
    marks = [NEEDS_LIBRARY] if kind == "4bit" else []
    marks += [] if (kind, state) in DAILY else [pytest.mark.slow]
    return pytest.param(kind, state, marks=marks, id=f"{kind}-{state}")


@pytest.mark.parametrize(("kind", "state"), [case(*each) for each in itertools.product(KINDS, STATES)])
def test_every_kind_of_parameters_and_state_resumes_bit_for_bit(
    folder: Path, tmp_path: Path, kind: str, state: str
) -> None:
    settings, recipe = (*adapter(kind), *STATES[state]), folder / "sft.toml"
    whole = begin(recipe, tmp_path / "whole", *settings)
    begin(recipe, tmp_path / "resumed", *settings, stops=True)
    assert len(numbers(tmp_path / "resumed")) == STOPS_AFTER
    assert_equal(whole, begin(recipe, tmp_path / "resumed", *settings))


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_a_critic_and_its_head_resume_bit_for_bit(folder: Path, tmp_path: Path, kind: str) -> None:
    """The critic begins as a decoder with a new head, and resumes from one that has its head."""
    settings, recipe = (*adapter(kind), "policy.max_grad_norm=0.01"), folder / "ppo.toml"
    whole = begin(recipe, tmp_path / "whole", *settings)
    begin(recipe, tmp_path / "resumed", *settings, stops=True)
    assert_equal(whole, begin(recipe, tmp_path / "resumed", *settings), clips=False)


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp = 2", "fsdp = 2", "tp = 2", "pp = 2"])
def test_every_mesh_resumes_bit_for_bit(folder: Path, tmp_path: Path, mesh: str) -> None:
    settings = (
        *adapter("int8" if mesh == "fsdp = 2" else "lora"),
        "placement.pools={ main = 2 }",
        f"placement.train_parallel={{ main = {{ {mesh} }} }}",
        "placement.backend=process",
    )
    recipe = folder / "sft.toml"
    whole = begin(recipe, tmp_path / "whole", *settings)
    begin(recipe, tmp_path / "resumed", *settings, stops=True)
    assert_equal(whole, begin(recipe, tmp_path / "resumed", *settings))


def test_replays_of_a_whole_and_of_a_resumed_adapter_run_are_equal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 4 began with a new adapter's weights in memory; its replay begins with a checkpoint's."""
    settings, recipe = (*adapter("lora"), "policy.max_grad_norm=0.01"), folder / "grpo.toml"
    begin(recipe, tmp_path / "whole", *settings)
    begin(recipe, tmp_path / "resumed", *settings, stops=True)
    assert_equal(tmp_path / "whole", begin(recipe, tmp_path / "resumed", *settings), clips=False)
    for name in ("whole", "resumed"):
        capsys.readouterr()
        code = main(["replay", str(tmp_path / name), "--step", "4"])
        assert (code, "DIFFERENT" in (said := capsys.readouterr().out)) == (0, False), said


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_a_run_that_was_killed_equals_the_undisturbed_one(folder: Path, tmp_path: Path, kind: str) -> None:
    settings = (*adapter(kind), "policy.max_grad_norm=0.01", "reward.sandbox=false")  # it is held by files
    more = tuple(word for each in settings for word in ("--set", each))
    whole = begin(folder / "grpo.toml", tmp_path / "whole", *settings)
    killed = tmp_path / "killed"
    (folder / "held").unlink(missing_ok=True)  # of the case before
    ended_in_the_middle(folder / "grpo.toml", killed, 3, signal.SIGKILL, more=("--quiet", *more))
    assert 1 <= len(numbers(killed)) < 4
    again = Command(
        ["run", str(folder / "grpo.toml"), "--dir", str(killed), "--quiet", *more], tmp_path / "said"
    )
    assert again.wait(200) == 0, again.said
    assert_equal(whole, killed, clips=False)


@pytest.mark.slow
def test_a_run_from_another_runs_adapter_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """The second run continues the first one's adapter, whose settings list its layers by name."""
    first = begin(folder / "sft.toml", tmp_path / "first", *adapter("dora"))
    start = max((first / "checkpoints").iterdir()) / "policy"
    settings = (f"policy.model.path={json.dumps(str(start))}", "run.seed=4")
    recipe = folder / "sft.toml"
    whole = begin(recipe, tmp_path / "whole", *settings)
    begin(recipe, tmp_path / "resumed", *settings, stops=True)
    assert_equal(whole, begin(recipe, tmp_path / "resumed", *settings))
