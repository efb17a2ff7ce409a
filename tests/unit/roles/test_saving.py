"""Saving: files from one moment, written while training continues."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rillflow.errors import RunDirectoryError
from rillflow.models import model_files
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.roles import saving
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.saving import Saving
from rillflow.roles.trained_role import TrainedRole, Training
from rillflow.runs.formatting import size
from rillflow.training.config import TrainConfig
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks


def model(layers: int = 3, kind: str = "qwen2") -> LanguageModel:
    new = NewModel(
        hidden=16, layers=layers, heads=2, kv_heads=1, context=16, alphabet="01+=", architecture=kind
    )
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())


def state(shape: int = 4) -> dict[str, torch.Tensor]:
    return {"counter/step": torch.tensor(3), "exp_avg/a": torch.ones(shape)}


def digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the digests of the tensor files below a folder."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        data = path.read_bytes()
        digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        found[path.relative_to(folder).as_posix()] = digest
    return found


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save these small models in the background, like large ones."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 0)


def test_files_are_of_the_moment_they_were_begun_at_while_weights_change(tmp_path: Path) -> None:
    loaded, tensors = model(), state()
    before = {name: weight.clone() for name, weight in loaded.module.state_dict().items()}
    with saving._DISK:  # no file is written before training continues
        begun = Saving(ModelShard.whole(loaded), tmp_path / "policy", tmp_path / "policy.optimizer", tensors)
        with torch.no_grad():
            for weight in loaded.module.parameters():
                weight += 1
        tensors["exp_avg/a"].zero_()
        assert begun.written(wait=False) is None
        assert list(tmp_path.rglob("*.safetensors")) == []
    files = begun.written(wait=True)
    assert files == digests(tmp_path) and len(files) == 2
    assert begun.written(wait=False) == files, "asked again, the same"
    kept = load_file(tmp_path / "policy/model.safetensors")
    assert all(torch.equal(before[name], weight) for name, weight in kept.items())
    slices = load_file(tmp_path / "policy.optimizer/rank-00000.safetensors")
    assert slices["exp_avg/a:0"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_ranks_share_the_files_of_a_large_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(model_files, "SHARD_BYTES", 5_000)
    group, loaded = ThreadGroup(2, 30.0), [model(kind=kind), model(kind=kind)]

    def save(rank: int) -> Any:
        ranks: Ranks = ThreadRanks(group, rank)
        begun = Saving(ModelShard.whole(loaded[rank], ranks), tmp_path / "policy")
        return begun.written(wait=True), set(begun._files)

    with ThreadPoolExecutor(2) as threads:
        (all_files, first), (same, second) = threads.map(save, range(2))
    assert all_files == same == digests(tmp_path)
    assert first | second == set(all_files) and not first & second and len(first) > 1 and second
    index = json.loads((tmp_path / "policy/model.safetensors.index.json").read_text())
    assert {f"policy/{name}" for name in index["weight_map"].values()} == set(all_files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    expected = loaded[0].module.state_dict()
    found = again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def no_room(folder: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    return "No space left on device"


def no_folder(folder: Path, patch: pytest.MonkeyPatch) -> str:
    (folder / "policy").write_text("in the way")
    return "File exists"


def no_file(folder: Path, patch: pytest.MonkeyPatch) -> str:
    (folder / "policy" / "model.safetensors").mkdir(parents=True)
    return "Is a directory"


@pytest.mark.parametrize("fail", [no_room, no_folder, no_file])
def test_what_fails_is_told_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Path, pytest.MonkeyPatch], str]
) -> None:
    loaded, reason = model(), fail(tmp_path, monkeypatch)
    begun = Saving(ModelShard.whole(loaded, SingleRank()), tmp_path / "policy")
    with pytest.raises(RunDirectoryError, match=reason) as caught:
        begun.written(wait=True)
    if fail is no_room:
        needed = sum(int(weight.nbytes) for weight in loaded.module.parameters())
        assert f"it needs {size(needed)}, and " in caught.value.what
    assert "resumes" in caught.value.fix


def trained(loaded: LanguageModel) -> TrainedRole[LanguageModel]:
    training = Training(config=TrainConfig(), seed=0, updates=9)
    return TrainedRole(ModelShard.whole(loaded), training, name="policy")


def test_files_are_told_of_the_save_that_is_asked_for_and_not_of_the_newest(tmp_path: Path) -> None:
    loaded = model()
    role, folders = trained(loaded), [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
        role.begin_saving(folder)
        with torch.no_grad():
            next(iter(loaded.module.parameters())).add_(1)
    one, two = (role.written(folder, wait=True) for folder in folders)
    assert (one, two) == (digests(folders[0]), digests(folders[1])) and one != two


def test_one_save_is_written_before_the_next_is_copied(tmp_path: Path) -> None:
    role, there = trained(model()), tmp_path / "1/policy/model.safetensors"
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    with ThreadPoolExecutor(1) as rank, saving._DISK:
        role.begin_saving(tmp_path / "1")
        next_one = rank.submit(role.begin_saving, tmp_path / "2")
        assert wait([next_one], 0.1).not_done and not there.exists()
        assert not (tmp_path / "2/policy").exists(), "and nothing of it is there"


def test_what_is_small_is_written_before_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    begun = Saving(ModelShard.whole(model()), tmp_path / "policy")
    assert begun.written(wait=False) == digests(tmp_path)
