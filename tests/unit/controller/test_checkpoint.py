"""Checkpoints: whole or not there, verified before they are read, the newest good one used."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.controller.checkpoint import latest_checkpoint, save_checkpoint
from rillflow.errors import RunDirectoryError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model
from rillflow.models.model_files import write_tensors
from rillflow.runs.layout import kept_steps
from tests.simulation.disk import FakeDisk
from tests.simulation.timeline import Timeline

TENSORS = {"exp_avg/a": torch.arange(6.0).view(2, 3)}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    new = NewModel(hidden=16, layers=1, heads=2, kv_heads=1, context=16, alphabet="01+=")
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())


def files(model: LanguageModel, folder: Path) -> dict[str, Any]:
    """What a role's ranks write, one of them hashed by whom wrote it."""
    save_model(model, folder / "policy")
    state = folder / "policy.optimizer"
    state.mkdir()
    return {
        "policy.optimizer/rank-00000.safetensors": write_tensors(state / "rank-00000.safetensors", TENSORS)
    }


def save(folder: Path, step: int, model: LanguageModel, keep: int = 3) -> Path:
    return save_checkpoint(folder, step, partial(files, model), {"done": step}, keep)


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


def test_the_format_is_the_one_that_earlier_versions_wrote(tmp_path: Path, model: LanguageModel) -> None:
    manifest = json.loads((save(tmp_path, 1, model) / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (2, 1), "older checkpoints would not resume"


def rewrite(path: Path, **changes: object) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99}, "format 99"),
        ({"step": 7}, "step 7"),
        ({"files": {"../../etc/passwd": {}}}, "not a regular file"),
        ({"files": {"/etc/passwd": {}}}, "not a regular file"),
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
    with pytest.raises(RunDirectoryError, match=f"'{name}' is not a regular file"):
        latest_checkpoint(tmp_path)


def test_what_its_writer_has_hashed_is_not_read_again(tmp_path: Path) -> None:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "large").write_bytes(b"x")
        return {"large": {"bytes": 1, "sha256": "as its writer says"}}

    path = save_checkpoint(tmp_path, 1, write, {}, 1)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert listed.keys() == {"large", "state.json"} and listed["large"]["sha256"] == "as its writer says"
    with pytest.raises(RunDirectoryError, match="large is not what was written"):
        latest_checkpoint(tmp_path)


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_large_files_are_flushed_once(
    tmp_path: Path, model: LanguageModel
) -> None:
    events = Timeline(Random(0), {}, "")
    with FakeDisk(tmp_path).watched(events):
        path = save(tmp_path, 4, model)
    seen = [line.split(" driver ")[1] for line in events.trace if " driver " in line]
    before = seen[: seen.index(f"rename .{path.name}.draft")]
    for each in (path, *path.rglob("*")):
        count = before.count(f"flush {Path('.step-000004.draft', each.relative_to(path))}")
        assert count == 1 or (count and each.is_dir()), each


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_the_previous_checkpoint(
    tmp_path: Path, model: LanguageModel, number: int
) -> None:
    save(tmp_path, 1, model)

    def failing(folder: Path) -> dict[str, Any]:
        files(model, folder)
        raise OSError(number, "")

    with pytest.raises(RunDirectoryError, match=os.strerror(number)):
        save_checkpoint(tmp_path, 2, failing, {}, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]


def test_a_step_saved_again_is_there_at_every_moment(
    tmp_path: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4, model, keep=1)
    moments = []

    def look(act: Callable[..., object]) -> Callable[..., object]:
        def acted(*arguments: Any, **options: Any) -> object:
            result = act(*arguments, **options)
            found = latest_checkpoint(tmp_path)
            moments.append(None if found is None else found.state["done"])
            return result

        return acted

    monkeypatch.setattr(Path, "rename", look(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", look(shutil.rmtree))
    save_checkpoint(tmp_path, 4, partial(files, model), {"done": "again"}, 1)
    assert {4, "again"} == set(moments)
    assert moments == sorted(moments, key=lambda state: state == "again")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_a_checkpoint_of_another_run_is_left_out(
    tmp_path: Path, model: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    write = partial(files, model)
    save_checkpoint(tmp_path, 1, write, {}, 3, run="mine")
    save_checkpoint(tmp_path, 2, write, {}, 3, run="other")
    found = latest_checkpoint(tmp_path, "mine")
    assert found is not None and found.step == 1
    assert "another run wrote it: 'other', while this run is 'mine'" in caplog.text
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 2


def test_the_spared_checkpoint_stays_however_old(tmp_path: Path, model: LanguageModel) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, partial(files, model), {}, 2, spare=1)
    assert kept_steps(tmp_path) == [1, 3, 4]
