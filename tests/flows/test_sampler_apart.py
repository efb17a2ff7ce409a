"""A policy that samples on separate ranks gives the same rows and weights as one on the training ranks."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.controller import weight_sync
from rillflow.roles.policy import Policy
from rillflow.runs import layout
from rillflow.runs.reader import read_spans, rollout_columns
from rillflow.sharding.reshard_plan import ReshardPlan

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE, REWARD

APART = 'placement.roles={ sampler = "answers" }'
TOGETHER = 'placement.roles={ reward = "answers" }'
"""The pool of the other ranks belongs to the reward, so that one line changes."""


def ran(folder: Path, *settings: str, name: str = "grpo") -> tuple[list[dict[str, list[Any]]], list[bytes]]:
    """Run a recipe; return the rollouts of each step as columns, and the weights of the last checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RECIPE.replace("NAME", name))
    (folder / "reward.py").write_text(REWARD)
    run = folder / "run"
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(run))}", *settings])
    launch(loaded, quiet=True)
    rows = [rollout_columns(run, step) for step in layout.rollout_files(run)]
    newest = max((run / layout.CHECKPOINTS).iterdir())
    return rows, [file.read_bytes() for file in sorted((newest / "policy").glob("*.safetensors"))]


def pools(train: int, answers: int, backend: str = "ray") -> list[str]:
    sizes = f"placement.pools={{ main = {train}, answers = {answers} }}"
    return [sizes, f"placement.backend={backend}"]


def test_one_line_gives_the_sampler_a_pool_of_its_own_and_no_bit_changes(tmp_path: Path) -> None:
    """PPO with warm start and evaluations, in one process."""
    together = ran(tmp_path / "a", *pools(1, 1, "inline"), TOGETHER, name="ppo")
    apart = ran(tmp_path / "b", *pools(1, 1, "inline"), APART, name="ppo")
    assert apart == together and together[1]
    spans = read_spans(tmp_path / "b/run")
    where = {span.stage: span.pool for span in spans}
    assert (where["policy.generate"], where["policy.update"]) == ("answers", "main")
    assert (where["policy.send"], where["sampler.receive"]) == ("main", "answers")
    assert "policy.send" not in {span.stage for span in read_spans(tmp_path / "a/run")}


def test_a_run_apart_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    settings = [*pools(1, 1, "inline"), APART, "run.checkpoint_every=1"]
    whole = ran(tmp_path / "a", *settings)
    ran(tmp_path / "b", *settings)
    run = tmp_path / "b/run"
    (run / layout.FINISHED).unlink()
    shutil.rmtree(max((run / layout.CHECKPOINTS).iterdir()))
    assert ran(tmp_path / "b", *settings) == whole


def test_few_buckets_are_on_their_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of the weights exists during a transfer, whatever the number of buckets."""
    buckets, send, sent, most = ReshardPlan.buckets.func, weight_sync.send, list[weakref.ref[Tensor]](), [0]

    def watched(policy: Policy, bucket: int) -> tuple[Tensor, ...]:
        most[0] = max(most[0], sum(each() is not None for each in sent))
        found: tuple[Tensor, ...] = send(policy, bucket)
        sent.extend(map(weakref.ref, found))
        return found

    cut = property(lambda plan: buckets(replace(plan, most_bytes=2000)))
    monkeypatch.setattr(ReshardPlan, "buckets", cut)
    monkeypatch.setattr(weight_sync, "send", watched)
    ran(tmp_path, *pools(1, 1, "inline"), APART)
    assert len(sent) > 100 and 1 <= most[0] <= weight_sync.BUCKETS + 1


RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@RAY
@pytest.mark.slow
def test_processes_of_their_own_say_the_same(tmp_path: Path) -> None:
    together = ran(tmp_path / "a", *pools(1, 1, "inline"), TOGETHER)
    assert ran(tmp_path / "b", *pools(1, 1), APART) == together


@RAY
@pytest.mark.slow
def test_processes_of_another_mesh_are_sent_what_they_lack(tmp_path: Path) -> None:
    """FSDP2 shards parameters over two ranks; samplers share a copy by tp, together and apart."""
    cut = ["placement.train_parallel={ main = { fsdp = 2 } }", "placement.rollout_parallel={ tp = 2 }"]
    together = ran(tmp_path / "a", *pools(2, 2), *cut, TOGETHER)
    apart = ran(tmp_path / "b", *pools(2, 2), *cut, APART)
    assert apart == together and together[1]


MESHES = {
    "dp 1": (pools(1, 1), ()),
    "dp 2": (pools(2, 2), ()),
    "tp 2": (
        pools(2, 2),
        ("placement.train_parallel={ main = { tp = 2 } }", "placement.rollout_parallel={ tp = 2 }"),
    ),
    "tp 2, answers whole": (pools(2, 2), ("placement.train_parallel={ main = { tp = 2 } }",)),
    "pp 2, answers whole": (pools(2, 2), ("placement.train_parallel={ main = { pp = 2 } }",)),
}


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_sends_what_it_would_have_sampled_with(mesh: str, tmp_path: Path) -> None:
    sizes, more = MESHES[mesh]
    together = ran(tmp_path / "a", *sizes, *more, TOGETHER)
    apart = ran(tmp_path / "b", *sizes, *more, APART)
    assert apart == together and together[1]


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [2, 4])
def test_any_tp_answers_for_one_rank_that_trains(tmp_path: Path, sampling: int) -> None:
    """One rank trains, two share a copy: the same tokens, and log probabilities that agree up to rounding.

    Four sampling ranks are two replicas, each a world of its own.
    """
    alone = ran(tmp_path / "a", *pools(1, 1), TOGETHER)
    apart = ran(tmp_path / "b", *pools(1, sampling), "placement.rollout_parallel={ tp = 2 }", APART)
    tokens = [[rows["tokens"] for rows in found[0]] for found in (alone, apart)]
    assert tokens[0] == tokens[1] and all(tokens[0])
