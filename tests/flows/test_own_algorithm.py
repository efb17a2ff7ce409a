"""A custom algorithm in one file: examples/own_algorithm.py runs, resumes and learns."""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.recipe import load_recipe
from rillflow.app.sections import Recipe
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from rillflow.controller.loop import Loop, Phase
from rillflow.errors import ConfigError
from rillflow.records.batch import Batch

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = EXAMPLES / "own_algorithm.toml"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded("own_algorithm")


def run(example: ModuleType, folder: Path, *settings: str) -> list[float]:
    """Return the mean reward of every step of the example's recipe."""
    words = [word for setting in settings for word in ("--set", setting)]
    words = ["run", str(RECIPE), "--dir", str(folder), "--quiet", *words]
    assert main(words, algorithms=[example.ALGORITHM]) == 0
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/score/mean"]["mean"] for line in lines if "reward/score/mean" in line]


@pytest.mark.slow
def test_the_reward_rises(example: ModuleType, tmp_path: Path) -> None:
    seen = run(example, tmp_path / "run", "algorithm.steps=16")
    assert len(seen) == 16
    assert mean(seen[-4:]) > mean(seen[:4]) + 0.05


def test_a_command_that_lacks_the_algorithm_names_the_program_that_has_it(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["algorithm.steps=1", "algorithm.prompts_per_step=8", "warm_start.steps=1"]
    run(example, tmp_path / "run", *small, "evaluate.problems=2", "policy.warmup_steps=0")
    starts = tmp_path / "run" / "environment.json"
    words = json.dumps(["python", "own_algorithm.py", "run", str(RECIPE)])
    said = re.sub(r'"command": \[.*?\]', f'"command": {words}', starts.read_text(), flags=re.DOTALL)
    starts.write_text(said)
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"python own_algorithm.py evaluate {tmp_path / 'run'}" in said and "'above_mean'" in said
    assert main(["evaluate", str(tmp_path / "run")], algorithms=[example.ALGORITHM]) == 0


@pytest.mark.slow
def test_the_same_command_goes_on_from_a_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    small = ["algorithm.steps=4", "algorithm.prompts_per_step=8", "warm_start.steps=2"]
    small += ["run.checkpoint_every=2", "evaluate.problems=2"]
    seen = run(example, tmp_path / "run", *small)
    (tmp_path / "run" / "finished.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    assert run(example, tmp_path / "run", *small) == seen


@pytest.mark.slow
def test_the_file_is_a_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "own_algorithm.py"), "graph", str(RECIPE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "controller.beats_group" in done.stdout


def test_what_beats_its_group_has_more_than_its_mean(example: ModuleType) -> None:
    found = example.beats_group(
        torch.tensor([0.0, 2.0, 1.0, 1.0, 9.0, 5.0]),
        torch.tensor([True, True, True, True, False, False]),
        torch.tensor([7, 7, 3, 3, 3, 1]),
    )
    assert found.tolist() == [False, True, False, False, False, False]


def test_only_who_brings_it_may_name_it(example: ModuleType) -> None:
    recipe = load_recipe(RECIPE, algorithms=[example.ALGORITHM]).recipe
    assert isinstance(recipe, Recipe)
    assert recipe.chosen is example.ALGORITHM
    with pytest.raises(ConfigError, match=r'algorithm\.name is "above_mean"'):
        load_recipe(RECIPE)
    assert "above_mean" not in Recipe.algorithms
    assert Recipe.algorithms is ALGORITHMS


def test_its_settings_and_its_graph_are_checked_like_any(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["graph", str(RECIPE), "--set", "warm_start=none"]
    assert main(words, algorithms=[example.ALGORITHM]) == 0
    assert "controller.beats_group" in capsys.readouterr().out
    assert main([*words, "--set", "algorithm.samples=3"], algorithms=[example.ALGORITHM]) == 2
    assert "[algorithm] has no key 'samples'" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_file_run_as_a_script_updates_by_its_own_loss_and_settings(backend: str, tmp_path: Path) -> None:
    """Classes and functions of __main__ are sent to ranks whose __main__ is another file."""
    if backend == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    small = ["algorithm.name=ranked", "algorithm.steps=2", "algorithm.prompts_per_step=4", "warm_start=none"]
    small += ["algorithm.strength=0.5", "algorithm.minibatches=2", "evaluate.problems=2"]
    small += [f"placement.backend={backend}"]
    words = [word for setting in small for word in ("--set", setting)]
    command = [sys.executable, str(EXAMPLES / "own_loss.py"), "run", str(RECIPE), "--dir", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"train longer:    python {EXAMPLES / 'own_loss.py'} run {RECIPE} --set" in done.stdout
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    assert [each["policy/version/max"]["max"] for each in metrics] == [1, 2]
    assert all(0.5 < each["policy/soft_gate/mean"]["mean"] < 1 for each in metrics), "a ratio is off 1"


def test_advantages_by_rank_are_as_by_hand() -> None:
    """The best of three answers beats two, ties beat nobody, and a row without a reward is excluded."""
    ranked = loaded("own_loss")
    found = ranked.rank_advantages(
        torch.tensor([5.0, 90.0, 6.0, 1.0, 1.0, 0.0, 0.0]),
        torch.tensor([True, True, True, True, True, False, True]),
        torch.tensor([7, 7, 7, 3, 3, 3, 1]),
        strength=2.0,
    )
    assert found.tolist() == [-2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def spread(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean()


def misspelt(rewardss: Tensor) -> Tensor:
    return rewardss


def raises(rewards: Tensor) -> Tensor:
    known = {"yours": rewards}
    return known["mine"]


def looks(flow: Flow, scores: Any) -> Any:
    return flow.compute(spread, scores, into="advantages") if scores.dense("rewards").mean() else scores


def own_step(
    *,
    advance: Callable[[Flow, Any], Any],
    publishes: bool = True,
    returns: bool = True,
    loss: Any = None,  # also an invalid loss
    **options: Any,
) -> Callable[..., Any]:
    """Return GRPO's step with an error in one line."""

    def step(flow: Flow, prompts: Batch, config: GroupConfig) -> Any:
        rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
        advantages = advance(flow, flow.reward.score(rollouts))
        report = flow.policy.update(rollouts, advantages, loss=loss or config.loss, passes=config, **options)
        if publishes:
            flow.publish(flow.policy)
        return report if returns else None

    return step


def sound(flow: Flow, scores: Any) -> Any:
    return flow.compute(spread, scores, into="advantages")


def reads_more(logprobs: Tensor, advantage: Tensor) -> Tensor:
    return -logprobs * advantage


class OwnConfig(GroupConfig):
    """Settings without additions."""

    name: Literal["own"]


def command(word: str, step: Callable[..., Any], *settings: str) -> int:
    """Run a command with an algorithm of this step."""
    own = Algorithm(config=OwnConfig, step=step)
    small = ["algorithm.name=own", "warm_start=none", "algorithm.steps=1", "algorithm.prompts_per_step=2"]
    words = [word for setting in (*small, *settings) for word in ("--set", setting)]
    return main([word, str(RECIPE), *words], algorithms=[own])


SLIPS = {
    "missing": (own_step(advance=lambda _, scores: scores), "policy.update reads the field 'advantages'"),
    "misspelt": (
        own_step(advance=lambda flow, scores: flow.compute(misspelt, scores, into="advantages")),
        "did you mean 'rewards'?",
    ),
    "endpoint": (own_step(advance=lambda flow, scores: flow.policy.logprob(scores)), "no endpoint 'logprob'"),
    "looks": (own_step(advance=looks), "the step reads 'dense' of the result of reward.score"),
    "returns": (own_step(advance=sound, returns=False), "the step returned None"),
    "loss reads": (own_step(advance=sound, loss=reads_more), "policy.update reads the field 'advantage'"),
    "loss unnamed": (own_step(advance=sound, loss=lambda logprobs: -logprobs), "<lambda> of "),
    "loss of two minds": (own_step(advance=sound, clip=0.3), "gets 'clip' in addition to a loss"),
    "loss a word": (own_step(advance=sound, loss="ppo"), "the loss of policy.update is 'ppo'"),
}


@pytest.mark.parametrize(
    ("word", "slip"), [*(("check", slip) for slip in SLIPS), ("graph", "looks"), ("run", "looks")]
)
def test_a_slip_in_a_step_is_found_before_anything_runs(
    word: str, slip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, said = SLIPS[slip]
    assert command(word, step, f'run.dir="{tmp_path / "run"}"') == 2
    shown = capsys.readouterr().err
    assert said in shown and "fix: " in shown and "Traceback" not in shown
    assert (f"where: at {__file__}:" in shown) == (slip != "returns")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("word", ["check", "graph"])
def test_a_step_that_never_publishes_is_noted(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(word, own_step(advance=sound, publishes=False)) == 0
    said = capsys.readouterr()
    assert "note: own does not publish what policy.update trains" in said.out + said.err
    assert command(word, own_step(advance=sound)) == 0
    said = capsys.readouterr()
    assert "does not publish" not in said.out + said.err


def test_a_step_that_raises_is_shown_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def advance(_: Flow, scores: Any) -> Any:
        return scores, 1 / 0

    assert command("check", own_step(advance=advance)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ZeroDivisionError: division by zero\n  why: raised at ")
    assert f"{__file__}:{advance.__code__.co_firstlineno + 1}, in advance: return scores, 1 / 0" in shown
    assert "Traceback" not in shown and "fault" not in shown


def test_a_formula_that_raises_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = own_step(advance=lambda flow, scores: flow.compute(raises, scores, into="advantages"))
    assert command("run", step, f'run.dir="{tmp_path / "run"}"', "evaluate.problems=2") == 1
    shown = capsys.readouterr().err
    assert "error: KeyError in raises, given 16 rows: 'mine'" in shown
    line = raises.__code__.co_firstlineno + 2
    assert f'why: raised at {__file__}:{line}, in raises: return known["mine"]' in shown
    assert "Traceback" not in shown and "pool" not in shown


def test_a_step_s_batches_are_released_before_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object store they would stay until the next step, while evaluation makes its own batches."""
    seen: list[weakref.ref[Any]] = []
    alive: list[int] = []
    evaluate = Loop._evaluate

    def advance(flow: Flow, scores: Any) -> Any:
        seen.append(weakref.ref(scores))
        return sound(flow, scores)

    def counted(self: Loop, phase: Phase, step: int) -> bool:
        evaluator = self._evaluator
        assert evaluator is not None

        def looked(executor: Any) -> Any:
            gc.collect()
            alive.append(sum(each() is not None for each in seen))
            return evaluator(executor)

        self._evaluator = looked
        found = evaluate(self, phase, step)
        self._evaluator = evaluator
        return found

    monkeypatch.setattr(Loop, "_evaluate", counted)
    step = own_step(advance=advance)
    assert command("run", step, f'run.dir="{tmp_path / "run"}"', "evaluate.problems=2") == 0
    assert len(seen) == 3 and alive == [0, 0]  # two traces and the run; evaluated before and after
