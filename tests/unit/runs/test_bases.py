"""Digests of models: equal for equal files wherever they are, different after any change of a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rillflow.controller.checkpoint import save_checkpoint
from rillflow.errors import ModelError
from rillflow.runs import layout
from rillflow.runs.bases import WHOLE_BYTES, Base, base_at, model_digest, place_of, with_digest
from tests.unit.runs.test_pins import child_at, model


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    run = child_at(tmp_path / "base", "the base")
    save_checkpoint(run / layout.CHECKPOINTS, 3, model, {}, 2)
    return run / layout.CHECKPOINTS / "step-000003/policy"


def test_a_copy_outside_a_checkpoint_has_the_digest_of_the_manifest(policy: Path, tmp_path: Path) -> None:
    known = model_digest(policy)
    assert known == model_digest(policy, is_deep=True)
    assert known == model_digest(shutil.copytree(policy, tmp_path / "copy"))
    (tmp_path / "copy/README.md").write_text("more")
    assert known == model_digest(tmp_path / "copy")
    (tmp_path / "copy/tokenizer.json").write_text("{}")
    assert known != model_digest(tmp_path / "copy")


def test_the_manifest_tells_missing_and_short_files_and_reading_tells_changed_bytes(policy: Path) -> None:
    known, file = model_digest(policy), policy / "model.safetensors"
    file.write_text("b")
    assert model_digest(policy) == known and model_digest(policy, is_deep=True) != known
    file.write_text("bb")
    assert model_digest(policy) != known
    file.unlink()
    assert model_digest(policy) != known


def test_the_order_of_files_in_a_manifest_leaves_the_digest_alone(policy: Path) -> None:
    known, file = model_digest(policy), policy.parent / "manifest.json"
    manifest = json.loads(file.read_text())
    files = dict(reversed(manifest["files"].items()))
    assert [*files] != [*manifest["files"]]
    file.write_text(json.dumps({**manifest, "files": files}))
    assert model_digest(policy) == known


def test_a_large_model_outside_checkpoints_is_sampled_to_its_last_byte(tmp_path: Path) -> None:
    file, size = tmp_path / "model.safetensors", WHOLE_BYTES + 5
    with file.open("wb") as opened:
        opened.truncate(size)  # a file with a hole, which takes no room
    known = model_digest(tmp_path)
    assert known.startswith("sampled:")
    assert model_digest(tmp_path, "sha256:").startswith("sha256:")
    for place in (0, size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\1")
        assert model_digest(tmp_path) != known
        known = model_digest(tmp_path)
    for text in ("{}", "[]"):  # a small file of the model counts with all its bytes
        (tmp_path / "config.json").write_text(text)
        assert model_digest(tmp_path) != known
        known = model_digest(tmp_path)
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    assert model_digest(tmp_path) != known


def test_a_base_is_found_in_the_same_run_under_another_name(policy: Path, tmp_path: Path) -> None:
    base, child = base_at(policy), tmp_path / "child"
    assert base == Base(path=str(policy), digest=base.digest, run="the base")
    assert place_of(base, child, "policy") == policy
    (tmp_path / "base").rename(tmp_path / "other")
    there = tmp_path / "other/checkpoints/step-000003/policy"
    assert place_of(base, child, "policy") == there
    assert with_digest(tmp_path / "other", base.digest) == there
    child_at(tmp_path / "base", "another run")
    assert place_of(base, child, "policy") == there
    (there / "config.json").write_text("{ }")
    with pytest.raises(ModelError, match="which is not there") as caught:
        place_of(base, child, "critic")
    assert "--set critic.path=PLACE" in caught.value.fix and base.digest in caught.value.why


def test_a_manifest_that_is_no_manifest_counts_for_nothing(policy: Path) -> None:
    known = model_digest(policy)
    for text in ("", "[]", '{"files": 3}', '{"files": {"policy/config.json": 3}}', '{"files": {}}'):
        (policy.parent / "manifest.json").write_text(text)
        assert model_digest(policy) == known
