"""Weights of remote samplers: never wrong ones, whatever happens on the way."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "links"))
from transfers import TrainerSide, transfers

from rillflow_links.codecs.delta import Delta
from rillflow_links.remote.weight_copy import TRIES, DamagedWeights, WeightCopy
from rillflow_service.weight_differences import tensor_digest
from rillflow_service.weight_folder import KEPT_DIFFERENCES


def test_no_transfer_ends_with_wrong_weights() -> None:
    report = transfers(50, seed=1)
    assert report.transfers == 50 and report.wrong == 0
    assert report.kinds["difference"] > 10 and report.kinds["whole"] > 5
    assert len(report.faults) >= 4


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerSide:
    torch.manual_seed(0)
    return TrainerSide(tmp_path, random.Random(0))


def updated(copy: WeightCopy, trainer: TrainerSide, **files: bytes) -> Counter[str]:
    """Update a copy, with other bytes for files of these kinds; count the requests by kind."""
    asked = Counter[str]()

    def fetch(version: int, name: str) -> bytes:
        asked[name.partition("-")[0]] += 1
        return files.get(name.partition("-")[0]) or trainer.folder.path(version, name).read_bytes()

    manifest = trainer.folder.manifest(-1)
    assert manifest is not None
    copy.update(manifest, fetch)
    return asked


def is_equal(copy: WeightCopy, trainer: TrainerSide) -> bool:
    return {name: tensor_digest(each) for name, each in copy.held.items()} == trainer.digests


def test_a_late_sampler_applies_several_differences(trainer: TrainerSide) -> None:
    copy = WeightCopy(Delta(1), pytest.fail)
    assert updated(copy, trainer) == {"model": 2}
    for _ in range(3):
        trainer.publish()
    assert updated(copy, trainer) == {"delta": 6} and is_equal(copy, trainer)


def test_differences_that_are_larger_together_stay_away(trainer: TrainerSide) -> None:
    copy = WeightCopy(Delta(1), pytest.fail)
    updated(copy, trainer)
    for _ in range(KEPT_DIFFERENCES + 40):
        trainer.publish()
    manifest = trainer.folder.manifest(-1)
    assert manifest is not None and len(manifest["differences"]) <= KEPT_DIFFERENCES
    assert updated(copy, trainer) == {"model": 2} and is_equal(copy, trainer)


def test_a_flipped_byte_of_a_difference_is_found_and_whole_weights_come(trainer: TrainerSide) -> None:
    said: list[str] = []
    copy = WeightCopy(Delta(1), said.append)
    updated(copy, trainer)
    trainer.publish()
    data = bytearray(trainer.folder.path(1, "delta-model-1.safetensors").read_bytes())
    data[-1] ^= 1
    assert updated(copy, trainer, delta=bytes(data))["model"] == 2
    assert is_equal(copy, trainer) and "arrived damaged" in said[0]


def test_a_difference_with_another_base_is_refused_by_its_digest(trainer: TrainerSide) -> None:
    said: list[str] = []
    copy = WeightCopy(Delta(1), said.append)
    updated(copy, trainer)
    copy.held["c"][0, 0] += 1
    trainer.publish()
    assert updated(copy, trainer)["model"] == 2
    assert is_equal(copy, trainer) and "whole" in said[0]


def test_whole_weights_that_are_always_damaged_end_with_the_reason(trainer: TrainerSide) -> None:
    copy = WeightCopy(None, pytest.fail)
    with pytest.raises(DamagedWeights, match="arrived damaged"):
        updated(copy, trainer, model=b"garbage")
    assert copy.version == -1
    assert updated(copy, trainer)["model"] == 2 < TRIES
