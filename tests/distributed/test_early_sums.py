"""Gradient sums over ranks start during the last backward pass; their bits equal those of sums after it."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import Work

import rillflow.sharding.mesh as gradients
import rillflow.workers.collectives as collectives
from rillflow.errors import RillflowError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.records.batch import Batch
from rillflow.sharding.mesh import EarlySums, Gradients, RankGroups
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import LossPart, PolicyLoss, SupervisedLoss
from rillflow.training.skipping import Skipped
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import ProcessRanks

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, rows
from processes import together

POLICY = PolicyLoss(PolicyLossConfig(), max_tokens=16)
EVEN = ((0, 2, 4, 6), (1, 3, 5, 7))
SMALL_GROUP = 2**14


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Two steps on two ranks."""

    rollouts: Sequence[Sequence[int]] = EVEN
    """Rows of each rank; rows 2 and 3 have no loss tokens."""
    shown: Sequence[Sequence[int]] = ((), ())
    """Rows of each rank that a second loss uses."""
    case: Case = field(default_factory=lambda: Case(kind="qwen3", dtype="float32", layers=3))
    config: Mapping[str, Any] = field(default_factory=dict)
    frozen: str = "none"
    """Part of the names of frozen parameters."""
    odd: tuple[str, int] = ("", -1)
    """Non-finite value of the second step and its row: an advantage, or the loss on rows without tokens."""
    skips: bool = False

    @property
    def steps(self) -> int:
        """Number of steps; one more if the second fails."""
        return 2 + bool(self.odd[0])


SETTINGS = {
    "even": Setting(),
    "uneven": Setting(rollouts=((0, 1, 2, 4, 5, 6), (7,))),
    "without rows, recomputed": Setting(
        rollouts=((), range(8)), config={"gradient_checkpointing": True}, case=Case(kind="qwen2", layers=3)
    ),
    "narrow, untied": Setting(case=Case(kind="qwen2", dtype="bfloat16", tied=False, layers=3)),
    "offloaded": Setting(
        case=Case(kind="qwen2", dtype="bfloat16", layers=3), config={"offload": "optimizer"}
    ),
    "frozen": Setting(frozen="layers.1"),
    "two losses": Setting(shown=((1, 2), (4, 5, 6))),
    "one has the second": Setting(shown=((), (4, 5, 6))),
    "one rests in the second": Setting(rollouts=((2, 3), (0, 1)), shown=((5,), ())),
    "nobody learns": Setting(rollouts=((2,), (3,))),
    "one learns": Setting(rollouts=((2, 3), (4, 5))),
    "unsound before passes": Setting(odd=("nan", 1)),
    "unsound in a pass": Setting(odd=("huge", 5)),
    "unsound after passes": Setting(odd=("resting", 3)),
    "skipped": Setting(odd=("huge", 5), skips=True),
    "skipped after passes": Setting(odd=("resting", 3), skips=True),
}


class NotFinite(PolicyLoss):
    """A loss that is not finite on rows without loss tokens."""

    def __call__(self, read: Any, part: Batch, /) -> LossPart:
        found = super().__call__(read, part)
        return found if part.dense("loss_active").all() else replace(found, terms=found.terms * math.nan)


class Watched(EarlySums):
    """Counts collectives that start before all gradients are complete."""

    early = 0

    def _sums(self) -> Iterator[Work | None]:
        for work in super()._sums():
            Watched.early += work is not None and bool(self._incomplete)
            yield work


class Watching(Gradients):
    """The default sums, counted."""

    def early(self, weights: Mapping[str, nn.Parameter]) -> EarlySums | None:
        assert isinstance(self.groups.dp, ProcessRanks)
        return Watched(self.groups.dp, weights)


class Afterwards(Gradients):
    """Sums all gradients after the passes."""

    def early(self, weights: Mapping[str, nn.Parameter]) -> EarlySums | None:
        del weights


def trainer_of(setting: Setting, ranks: ProcessRanks, kind: type[Gradients]) -> Trainer:
    module = decoder(setting.case)
    module.unused = nn.Parameter(torch.ones(3, dtype=module.dtype))
    for name, weight in module.named_parameters():
        weight.requires_grad_(setting.frozen not in name)
    parallel = Parallel(module, RankGroups.whole(ranks))
    parallel.gradients = kind(groups=parallel.groups)
    config = TrainConfig(lr=1e-2, tokens_per_micro_batch=setting.case.budget, **setting.config)
    return Trainer(module, config, total_steps=9, parallel=parallel)


def batches(setting: Setting, step: int) -> Batch:
    found = rows()
    name, row = setting.odd
    if step != 1 or row < 0 or name == "resting":
        return found
    values = found.dense("advantages").double()
    values[row] = math.nan if name == "nan" else 1e300
    return found.with_fields(advantages=values)


def some_steps(ranks: ProcessRanks, setting: Setting, kind: type[Gradients], folder: Path) -> dict[str, Any]:
    """Run the steps on a rank; return its final state and its messages."""
    trainer = trainer_of(setting, ranks, kind)
    if setting.skips:
        trainer.skipped = Skipped(folder, lambda _: None)
    said = []
    for step in range(setting.steps):
        batch = batches(setting, step)
        own = batch.select(list(setting.rollouts[ranks.rank]))
        fails = setting.odd == ("resting", 3) and step == 1 and ranks.rank
        aims = [trainer.aim(own, NotFinite(PolicyLossConfig(), max_tokens=16) if fails else POLICY)]
        if any(setting.shown):
            demonstrations = rows().select(list(setting.shown[ranks.rank]))
            aims.append(trainer.aim(demonstrations, SupervisedLoss(), weight=0.3))
        try:
            said.append({name: each.value for name, each in trainer.step(*aims).items()})
        except RillflowError as error:
            said.append(str(error).partition("\n")[0])
    weights = {f"weight/{name}": weight.detach() for name, weight in trainer._parallel.parameters.items()}
    state = {name: each.clone() for name, each in {**trainer.optimizer.state(), **weights}.items()}
    return {"said": said, "state": state, "steps": trainer.optimizer.steps}


def all_settings(ranks: ProcessRanks) -> dict[str, dict[str, Any]]:
    """Run every setting both ways; return whether they are equal, and the counts."""
    found = {}
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            after = some_steps(ranks, setting, Afterwards, Path(folder))
            plain = collectives.SMALL, collectives.BUCKET_BYTES
            collectives.SMALL, collectives.BUCKET_BYTES, gradients.GROUP_BYTES = 100, 2**13, SMALL_GROUP
            Watched.early = 0
            early = some_steps(ranks, setting, Watching, Path(folder))
            collectives.SMALL, collectives.BUCKET_BYTES = plain
        assert early["state"].keys() == after["state"].keys()
        differ = [key for key, value in early["state"].items() if not torch.equal(value, after["state"][key])]
        said = [early["said"] == after["said"], early["steps"] == after["steps"]]
        exact = torch.stack([each.double().sum() for each in early["state"].values()])
        copies = ranks.stack(exact)
        found[name] = {
            "differ": differ,
            "said": said,
            "copies": bool((copies == copies[0]).all()),
            "early": Watched.early,
            "steps": early["steps"],
            "words": early["said"],
            "moments": sum(key.startswith("exp_avg/") for key in early["state"]),
        }
    return found


@cache
def by_rank() -> list[dict[str, dict[str, Any]]]:
    return together(2, all_settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_sums_that_begin_early_have_the_bits_of_sums_afterwards(name: str) -> None:
    for found in (ranks[name] for ranks in by_rank()):
        assert found["differ"] == []
        assert found["said"] == [True, True]
        assert found["copies"]
        assert found["steps"] == 2
        assert bool(found["moments"]) == (name != "nobody learns")


def test_sums_begin_before_the_backward_pass_ends() -> None:
    early = [{name: found["early"] for name, found in ranks.items()} for ranks in by_rank()]
    assert early[0]["even"] >= 2 <= early[1]["even"]  # steps
    assert early[0]["without rows, recomputed"] == 0 < early[1]["without rows, recomputed"]
    assert early[0]["nobody learns"] == early[1]["nobody learns"] == 0


def test_what_is_not_finite_is_said_on_all_ranks() -> None:
    for name in SETTINGS:
        words = [ranks[name]["words"][1] for ranks in by_rank()]
        if name.startswith("unsound"):
            assert words[0] == "a number is not finite on another rank"
            assert words[1].startswith("the loss is" if "passes" not in name or "after" in name else "advant")
        if name.startswith("skipped"):
            assert words == [{"train/skipped/sum": 0.5}] * 2


def test_groups_hold_everything_once_from_the_end_and_their_bytes_at_most() -> None:
    weights = {str(place): torch.empty(size) for place, size in enumerate((5, 9, 1, 2, 20, 3, 3, 8))}
    gradients.GROUP_BYTES, plain = 40, gradients.GROUP_BYTES
    try:
        groups = gradients._groups(weights)
    finally:
        gradients.GROUP_BYTES = plain
    assert [name for names in groups for name in names] == list(reversed(weights))
    sizes = [[weights[name].nbytes for name in names] for names in groups]
    assert all(sum(each) <= 40 or len(each) == 1 for each in sizes)
    assert all(sum(one) + other[0] > 40 for one, other in pairwise(sizes))


def refused(ranks: ProcessRanks) -> str:
    """Let one rank raise an error that ranks do not agree on, while the other waits for its gradients."""
    trainer = trainer_of(SETTINGS["even"], ranks, Gradients)
    batch = rows().select(list(EVEN[ranks.rank]))
    sampled = trainer.scorer.logprobs(batch)
    if ranks.rank:
        sampled.values[-1] += 1
    try:
        trainer.update(batch.with_fields(sampler_logprobs=sampled), POLICY, ratio_tolerance=1e-3)
    except (RillflowError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_no_rank_waits_for_one_that_has_failed() -> None:
    first, second = together(2, refused, deadline_s=60.0)
    assert first.startswith("RuntimeError")
    assert second.startswith("TrainingError: the first minibatch is not on-policy")
