"""Updates that run as one fused stage change the models as updates in turn do, bit by bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rillflow
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.errors import TrainingError
from rillflow.runs import layout
from rillflow.runs.passes import ALONE, read_passes, windows
from rillflow.runs.reader import read_spans
from tests.flows.small_recipe import RECIPE, REWARD

FUSED = 'placement.fused=["policy","critic"]'
TWO = ("placement.pools.main=2", "placement.train_parallel.main.pp=2")
PROCESSES = "placement.backend=process"
SMALL = ("policy.tokens_per_micro_batch=16", "warm_start=none", "evaluate=none", "run.checkpoint_every=1")
"""Settings with several micro-batches in each of two optimiser steps of a step."""
HUGE = """
def small(prompts, completions, **columns):
    return [3e38 if prompt[0] == "5" else len(text) / 4 for prompt, text in zip(prompts, completions)]
"""


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.run / layout.METRICS).read_text().splitlines()
        found = [json.loads(line)["metrics"] for line in lines]
        return [{k: v for k, v in each.items() if not k.startswith(("run/", "fused/"))} for each in found]

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the newest checkpoint, whatever files they are in."""
        newest, found = max((self.run / "checkpoints").glob("step-*")), dict[str, torch.Tensor]()
        for name in ("policy", "critic", "policy.optimizer", "critic.optimizer"):
            for file in sorted((newest / name).glob("*.safetensors")):
                found |= {f"{name}/{key}": tensor for key, tensor in load_file(file).items()}
        return found


def start(folder: Path, *settings: str, reward: str = REWARD, name: str = "ppo") -> Ran:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RECIPE.replace("NAME", name))
    (folder / "reward.py").write_text(reward)
    told = [f"run.dir={json.dumps(str(folder / 'run'))}", PROCESSES, *SMALL, *settings]
    loaded = load_recipe(folder / "run.toml", told)
    launch(loaded, quiet=True)
    return Ran(folder)


def require_same(one: Ran, other: Ran) -> None:
    assert one.metrics == other.metrics and len(one.metrics) > 1
    held = one.weights(), other.weights()
    assert held[0].keys() == held[1].keys() and any("exp_avg" in name for name in held[0])
    for name, tensor in held[0].items():
        assert torch.equal(tensor, held[1][name]), name


def require_near(one: Ran, other: Ran) -> None:
    """Compare with a run on one rank, whose sums round otherwise."""
    wanted = ("loss/mean", "squared_error/mean", "grad_norm/mean")
    assert len(one.metrics) == len(other.metrics) > 1
    for first, second in zip(one.metrics, other.metrics, strict=True):
        names = [name for name in first if name.endswith(wanted)]
        assert len(names) > 3
        for name in names:
            assert second[name]["mean"] == pytest.approx(first[name]["mean"], rel=1e-4, abs=1e-5), name


def fused_steps(ran: Ran) -> int:
    """How many optimiser steps ran together."""
    return sum(len(window.stages) > 1 for window in windows(read_passes(ran.run)))


def test_fused_updates_learn_what_one_rank_does_and_their_timeline_shows_each_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow tests compare the bits of runs; others here compare those of fused pipelines every day."""
    fused = start(tmp_path / "fused", *TWO, FUSED)
    require_near(start(tmp_path / "one", "placement.backend=inline"), fused)
    require_overlapping(fused)
    require_timeline(fused, "critic.update + policy.update", capsys)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fused_updates_have_the_bits_of_updates_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, fused = (start(tmp_path / name, *TWO, *more) for name, more in (("a", ()), ("b", (FUSED,))))
    require_same(alone, fused)
    assert fused_steps(alone) == 0
    assert all(gain == ALONE for record in read_passes(alone.run) for gain in record.gains)
    require_timeline(alone, "critic.update  ", capsys)
    require_timeline(alone, "policy.update  ", capsys)


def require_overlapping(fused: Ran) -> None:
    """Check that the two updates of each step overlap on two ranks."""
    assert fused_steps(fused) == 4
    for step in (1, 2):
        spans = {span.stage: span for span in read_spans(fused.run) if span.step == step}
        critic, policy = spans["critic.update"], spans["policy.update"]
        assert policy.start_s < critic.end_s and critic.start_s < policy.end_s
        assert len(critic.ranks) == len(policy.ranks) == 2
    metrics = [json.loads(line)["metrics"] for line in (fused.run / layout.METRICS).read_text().splitlines()]
    assert all(0.03 <= each["fused/gain/mean"]["mean"] < 0.5 for each in metrics)
    assert all(each["fused/measured_gain/mean"]["count"] == 2 for each in metrics)


def require_timeline(ran: Ran, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the passes in the timeline and in the report."""
    assert main(["timeline", str(ran.run)]) == 0
    told = capsys.readouterr().out
    assert "C c critic forward, backward; P p policy forward, backward" in told and line in told
    page = rillflow.open_run(ran.run).report().read_text()
    assert "Pipeline passes of step 2" in page and "policy backward, step 2" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "grids",
    [
        ("placement.train_parallel.main.pp=4",),
        ("placement.train_parallel.main.pp=2",),
        ("placement.train_parallel.policy.pp=4", "placement.train_parallel.critic.pp=2"),
        ("placement.train_parallel.policy.pp=2", "placement.train_parallel.critic.pp=4"),
        ("placement.train_parallel.main={pp=2,tp=2}", "policy.gradient_checkpointing=true"),
    ],
    ids=["pp 4", "dp 2 x pp 2", "pp 4 and dp 2 x pp 2", "dp 2 x pp 2 and pp 4", "pp 2 x tp 2, recomputed"],
)
def test_every_pair_of_grids_has_the_bits_of_updates_in_turn(grids: tuple[str, ...], tmp_path: Path) -> None:
    settings = ("placement.pools.main=4", *grids, "algorithm.prompts_per_step=6", "algorithm.steps=3")
    alone, fused = (start(tmp_path / name, *settings, *more) for name, more in (("a", ()), ("b", (FUSED,))))
    require_same(alone, fused)
    assert fused_steps(alone) == 0 < fused_steps(fused)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fused_run_resumes_to_the_same_bits_and_may_go_on_without(tmp_path: Path) -> None:
    settings = (*TWO, "algorithm.steps=3")
    whole = start(tmp_path / "whole", *settings, FUSED)
    for name, more in (("again", (FUSED,)), ("plain", ())):
        shutil.copytree(whole.folder, tmp_path / name)
        run = Ran(tmp_path / name).run
        (run / layout.FINISHED).unlink()
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))
        require_same(whole, start(tmp_path / name, *settings, *more))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_update_that_is_not_finite_is_left_out_alone(tmp_path: Path) -> None:
    """The critic's squared error overflows in a minibatch; the policy's update beside it goes on."""
    alone, fused = (
        start(tmp_path / name, *TWO, "algorithm.steps=4", *more, reward=HUGE)
        for name, more in (("a", ()), ("b", (FUSED,)))
    )
    require_same(alone, fused)
    skips = [
        [{**json.loads(line), "time_s": 0} for line in (ran.run / layout.SKIPS).read_text().splitlines()]
        for ran in (alone, fused)
    ]
    assert skips[0] == skips[1] and skips[0]
    assert main(["replay", str(fused.run / "bundles" / f"step-{skips[1][0]['step']:06d}")]) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_error_of_one_update_ends_the_run_at_once_and_is_told(tmp_path: Path) -> None:
    """No rank waits for the other update, and neither model has made a step of it."""
    with pytest.raises(TrainingError) as found:
        start(tmp_path / "run", *TWO, FUSED, "algorithm.ratio_tolerance=1e-12")
    assert any("in policy.update" in note for note in found.value.__notes__)
    assert "ratio" in str(found.value)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demonstrations_keep_the_bits(tmp_path: Path) -> None:
    """PPO-ptx passes twice in each step of the policy, so half of its passes have no partner."""
    settings = (*TWO, "algorithm.pretrain_weight=0.5")
    alone, fused = (start(tmp_path / name, *settings, *more) for name, more in (("a", ()), ("b", (FUSED,))))
    require_same(alone, fused)
    assert fused_steps(fused) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_safe_rlhf_trains_its_second_critic_beside(tmp_path: Path) -> None:
    settings = (*TWO, 'cost.function="reward.py:small"')
    alone, fused = (
        start(tmp_path / name, *settings, *more, name="safe_rlhf")
        for name, more in (("a", ()), ("b", (FUSED,)))
    )
    require_same(alone, fused)
    assert fused_steps(fused) == 4
