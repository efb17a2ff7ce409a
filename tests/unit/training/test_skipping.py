"""A non-finite update is skipped as if its rows had not come, on all ranks together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.records.batch import Batch, concatenate, load_batch
from rillflow.records.metrics import Metric, Sum, merge_metrics
from rillflow.records.ragged import Ragged
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, SupervisedLoss
from rillflow.training.skipping import Skipped
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks, ThreadGroup, ThreadRanks

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]
POLICY = PolicyLoss(PolicyLossConfig(), max_tokens=16)


def made(module: PreTrainedModel, folder: Path, ranks: Ranks | None = None) -> Trainer:
    trainer = Trainer(module, TrainConfig(lr=1e-2), total_steps=4, parallel=Parallel.whole(module, ranks))
    trainer.skipped = Skipped(folder, lambda _: None)
    return trainer


def known(trainer: Trainer, rows: Batch, odd: int | None = None) -> Batch:
    advantages = torch.tensor([1.0, -1.0] * (len(rows) // 2))
    if odd is not None:
        advantages[odd] = math.nan
    return rows.with_fields(sampler_logprobs=trainer.scorer.logprobs(rows), advantages=advantages)


def kept_rows(folder: Path) -> Batch:
    """Return the rows of a bundle's first aim, from all ranks."""
    return concatenate([load_batch(file) for file in sorted(folder.glob("rows-0-*.safetensors"))])


def test_training_goes_on_as_if_its_rows_had_never_come(
    make_module: MakeModule, make_rows: MakeRows, tmp_path: Path
) -> None:
    with_it, without = (made(make_module(), tmp_path / name) for name in "ab")
    rows = make_rows(samples=2)
    for trainer in (with_it, without):
        trainer.update(known(trainer, rows), POLICY)
        if trainer is with_it:
            metrics = trainer.update(known(trainer, rows, odd=2), POLICY)
            assert metrics == {"train/skipped/sum": Sum(value=1.0)}
            assert trainer.optimizer.steps == 1
        trainer.update(known(trainer, rows), POLICY)
    one, other = with_it.optimizer.state(), without.optimizer.state()
    assert with_it.optimizer.steps == without.optimizer.steps == 2
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert with_it.skipped is not None
    (skip,) = with_it.skipped.take()
    assert skip.reason == "advantages is nan at row (epoch 0 prompt 1 sample 0)"
    assert skip.rows == rows.ids.tolist()
    assert with_it.skipped.take() == []


def test_only_numbers_that_are_not_finite_are_left_out(
    module: PreTrainedModel, make_rows: MakeRows, tmp_path: Path
) -> None:
    trainer = made(module, tmp_path)
    rows = known(trainer, make_rows(samples=2))
    off = rows.ragged("sampler_logprobs")
    off = off.with_values(off.values + 1)
    with pytest.raises(TrainingError, match="not on-policy"):
        trainer.update(rows.with_fields(sampler_logprobs=off), POLICY, ratio_tolerance=1e-3)
    trainer.skipped = None
    with pytest.raises(NotFiniteError):
        trainer.update(known(trainer, make_rows(samples=2), odd=0), POLICY)


@pytest.mark.parametrize("kind", ["loss", "gradient", "on-policy"])
def test_whatever_is_not_finite_is_left_out_and_its_reason_kept(
    make_module: MakeModule, make_rows: MakeRows, tmp_path: Path, kind: str
) -> None:
    module = make_module(tie_word_embeddings=False)
    trainer = made(module, tmp_path)
    rows = known(trainer, make_rows(samples=2))
    if kind == "gradient":
        module.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    else:
        with torch.no_grad():
            module.get_input_embeddings().weight[int(rows.ragged("tokens").rows()[1][0])] = math.nan
    tolerance = 1e-3 if kind == "on-policy" else None
    metrics = trainer.update(rows, POLICY, ratio_tolerance=tolerance)
    assert metrics == {"train/skipped/sum": Sum(value=1.0)}
    assert trainer.skipped is not None
    (skip,) = trainer.skipped.take()
    assert ("gradient" if kind == "gradient" else "the loss is nan: token") in skip.reason
    assert trainer.optimizer.steps == 0


@pytest.mark.parametrize("odd", [0, 5])
def test_all_ranks_leave_it_out_together_wherever_the_number_is(
    make_module: MakeModule, make_rows: MakeRows, tmp_path: Path, odd: int
) -> None:
    torch.set_num_threads(1)
    group = ThreadGroup(2, 60.0)
    rows = make_rows(samples=3)
    modules = [make_module(), make_module()]  # one after the other: both seed torch

    def work(rank: int) -> tuple[dict[str, Metric], Trainer]:
        trainer = made(modules[rank], tmp_path, ThreadRanks(group, rank))
        everything = known(trainer, rows, odd)
        metrics = trainer.update(everything.slice(3 * rank, 3 * rank + 3), POLICY)
        trainer.update(known(trainer, rows).slice(3 * rank, 3 * rank + 3), POLICY)
        return metrics, trainer

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(work, range(2)))
    assert merge_metrics([metrics for metrics, _ in found]) == {"train/skipped/sum": Sum(value=1.0)}
    for _, trainer in found:
        assert trainer.optimizer.steps == 1
        assert trainer.skipped is not None
        (skip,) = trainer.skipped.take()
        assert "advantages is nan at row" in skip.reason
        assert len(skip.rows) == 6
    kept = kept_rows(tmp_path)
    assert torch.equal(kept.ids, rows.ids)
    assert bool(kept.dense("advantages")[odd].isnan())


def test_a_bundle_holds_every_field_and_the_settings_and_there_is_one_a_step(
    module: PreTrainedModel, make_rows: MakeRows, tmp_path: Path
) -> None:
    trainer = made(module, tmp_path)
    texts = Ragged.from_text(["a", "", "bc", "d"])
    first = known(trainer, make_rows(samples=2), odd=0).with_fields(columns=texts)
    trainer.update(first, POLICY, 0.7)
    trainer.update(known(trainer, make_rows(samples=2), odd=1), SupervisedLoss())
    trainer.update(known(trainer, make_rows(samples=2), odd=1), POLICY)
    kept = kept_rows(tmp_path)
    assert set(kept.fields) == set(first.fields)
    assert kept.ragged("columns").to_text() == ["a", "", "bc", "d"]
    assert torch.equal(kept.ragged("tokens").values, first.ragged("tokens").values)
    assert kept.ragged("loss_mask").values.dtype == torch.bool
    about: dict[str, Any] = json.loads((tmp_path / "bundle.json").read_text())
    assert about["aims"] == [
        {
            "loss": "policy",
            "model_outputs": ["logprobs", "entropy"],
            "is_scalar": False,
            "source": "rillflow.formulas.config:PolicyLossConfig",
            "options": PolicyLossConfig().model_dump(mode="json"),
            "weight": 1.0,
        }
    ]
    assert about["reason"] == "advantages is nan at row (epoch 0 prompt 0 sample 0)"
    assert trainer.skipped is not None and len(trainer.skipped.take()) == 2


def test_a_full_disk_leaves_the_bundle_out_and_training_goes_on(
    module: PreTrainedModel, make_rows: MakeRows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    trainer = made(module, tmp_path / "file" / "below")
    assert "train/skipped/sum" in trainer.update(known(trainer, make_rows(samples=2), odd=0), POLICY)
    assert "is incomplete" in caplog.text
