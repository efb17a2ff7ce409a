"""Checkpoints: whole or not there, verified before they are read, the newest good one used."""

from __future__ import annotations

import json
import logging
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rillflow.dataflow import checkpoint as module
from rillflow.dataflow.checkpoint import latest_checkpoint, save_checkpoint, write_role
from rillflow.errors import RunDirectoryError
from rillflow.models.checkpoint import save_model
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model

TENSORS = {"exp_avg/a": torch.arange(6.0).view(2, 3)}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    new = NewModel(hidden=16, layers=1, heads=2, kv_heads=1, context=16, alphabet="01+=")
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())


class Role:
    """A role that saves a model and some tensors."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.saved_bytes = sum(int(weight.nbytes) for weight in model.module.parameters())

    def save(self, folder: Path) -> None:
        save_model(self._model, folder / "policy")
        (folder / "policy.optimizer").mkdir()
        save_file(TENSORS, folder / "policy.optimizer" / "rank-00000.safetensors")


def save(folder: Path, step: int, model: LanguageModel, keep: int = 3) -> Path:
    return save_checkpoint(folder, step, partial(write_role, Role(model)), {"done": step}, keep)


def test_what_was_saved_is_what_is_read(tmp_path: Path, model: LanguageModel) -> None:
    save(tmp_path, 4, model)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.state["done"]) == (4, 4)
    state = load_file(found.optimizer("policy") / "rank-00000.safetensors")
    assert torch.equal(state["exp_avg/a"], TENSORS["exp_avg/a"])
    path = str(found.model("policy").absolute())
    again = load_model(ModelConfig(path=path), seed=1, device=torch.device("cpu"), base=Path())
    for name, weight in model.module.state_dict().items():
        assert torch.equal(weight, again.module.state_dict()[name])


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_old_ones_go_and_drafts_do_not_count(tmp_path: Path, model: LanguageModel) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, model, keep=2)
    (tmp_path / ".step-000009.draft").mkdir()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 3


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_bit, truncate, Path.unlink], ids=["bit", "truncated", "missing"])
def test_damage_to_any_file_is_found_and_the_previous_one_is_used(
    damage: object, tmp_path: Path, model: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    save(run, 1, model)
    save(run, 2, model)
    good = tmp_path / "good"
    shutil.copytree(run, good)
    names = [path.relative_to(good) for path in (good / "step-000002").rglob("*") if path.is_file()]
    assert len(names) >= 6
    for name in names:
        shutil.rmtree(run)
        shutil.copytree(good, run)
        damage(run / name)  # type: ignore[operator]
        with caplog.at_level(logging.WARNING):
            found = latest_checkpoint(run)
        assert found is not None, name
        # A flipped bit in the manifest's own white space or a key order changes nothing that was written.
        assert found.step == 1 or name.name == "manifest.json", name
    assert "step-000002" in caplog.text


def rewrite(path: Path, **changes: object) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99}, "format 99"),
        ({"step": 7}, "step 7"),
        ({"files": {"../../etc/passwd": {}}}, "not a plain file"),
        ({"files": {"/etc/passwd": {}}}, "not a plain file"),
        ({"files": 3}, "lists no files"),
    ],
)
def test_manifests_that_lie_are_refused(
    changes: dict[str, object], said: str, tmp_path: Path, model: LanguageModel
) -> None:
    rewrite(save(tmp_path, 1, model) / "manifest.json", **changes)
    with pytest.raises(RunDirectoryError, match=said):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_place_of_a_file_is_refused(
    kind: str, name: str, tmp_path: Path, model: LanguageModel
) -> None:
    path = save(tmp_path, 1, model) / name
    moved = tmp_path / "elsewhere.json"
    path.rename(moved)
    if kind == "link":
        path.symlink_to(moved)
    else:
        os.mkfifo(path)
    with pytest.raises(RunDirectoryError, match=f"'{name}' is not a plain file"):
        latest_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, model)
    monkeypatch.setattr(module, "_free_bytes", lambda _: 1000)
    with pytest.raises(RunDirectoryError, match="1,000 bytes are free"):
        save(tmp_path, 2, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]
