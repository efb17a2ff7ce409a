"""Contract data-is-not-code, by fuzzing: any bytes of a file or a pipe give a value or a Rillflow error.

Nothing in the bytes is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rillflow.app.model_files import sizes_of_directory
from rillflow.app.recipe import load_recipe
from rillflow.controller.checkpoint import latest_checkpoint, save_checkpoint
from rillflow.errors import RillflowError
from rillflow.isolation.frames import FrameError, FrameReader
from rillflow.models.directory_checks import check_weight_files
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement
from rillflow.sharding.layout import Weight
from rillflow.sharding.sharded_file import listed_weights, load_sharded
from rillflow.tasks.example import example_of
from rillflow.tasks.files import read_rows
from rillflow.workers.collectives import SingleRank
from tests.distributed.sharded import save_sharded

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "recipes/arithmetic/run.toml").read_bytes()
WEIGHTS = {"up": Weight(name="up", shape=(2, 3), dtype=torch.float32)}
LAYOUT = {"up": Placement(Mesh.of(tp=1))}
INDEX = b'{"metadata": {}, "weight_map": {"up": "model.safetensors"}}'
ROW = b'{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "id": 7}'
CONFIG = b'{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "n_ctx": 4}'
_BRANDS = ("executed-by-pickle", "executed-by-python", "executed-by-a-shell")


class Brand:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {_BRANDS[0]}",)


CODE = (
    pickle.dumps(Brand()),
    f"__import__('os').system('touch {_BRANDS[1]}')".encode(),
    f'!!python/object/apply:os.system ["touch {_BRANDS[1]}"]'.encode(),
    f"$(touch {_BRANDS[2]})".encode(),
)
DEEP = (b"[" * 100_000, b'{"a":' * 100_000, b"a = " + b"[" * 100_000)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Draw any bytes, content that a naive reader executes, wrong JSON, or a good file with a wrong part."""
    part = st.binary(max_size=6) | st.sampled_from(
        [b"null", b"-1", b"1e999", b"{}", b"[]", b'"\\ud800"', b"\0"]
    )

    def spoilt(start: int, length: int, new: bytes) -> bytes:
        return whole[:start] + new + whole[start + length :]

    return st.one_of(
        st.binary(max_size=40),
        st.sampled_from([*CODE, *DEEP]),
        JSON.map(lambda value: json.dumps(value).encode()),
        st.builds(spoilt, st.integers(0, len(whole)), st.integers(0, 12), part),
    )


fuzzed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which executed content leaves its mark."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def understood(read: Callable[[], object]) -> None:
    """Check that a read returns a value or raises a Rillflow error, and that nothing was executed."""
    try:
        read()
    except (RillflowError, FrameError) as error:
        assert str(error)
    assert not [brand for brand in _BRANDS if Path(brand).exists()]


@fuzzed
@given(content=damaged(RECIPE))
def test_a_recipe(here: Path, content: bytes) -> None:
    (here / "run.toml").write_bytes(content)
    understood(lambda: load_recipe(here / "run.toml"))


@fuzzed
@given(content=damaged(ROW))
def test_rows_of_data(here: Path, content: bytes) -> None:
    (here / "rows.jsonl").write_bytes(ROW + b"\n" + content)
    understood(lambda: read_rows(here / "rows.jsonl", example_of))


@fuzzed
@given(data=st.data())
def test_a_manifest_of_a_checkpoint(here: Path, data: st.DataObject) -> None:
    made = save_checkpoint(here / "kept", 1, lambda _: {}, {"done": 1}, 1)
    manifest = made / "manifest.json"
    manifest.write_bytes(data.draw(damaged(manifest.read_bytes())))
    understood(lambda: latest_checkpoint(here / "kept"))


def test_a_manifest_without_the_state_is_refused(here: Path) -> None:
    made = save_checkpoint(here / "kept", 1, lambda folder: (folder / "a").write_text("a") and {}, {}, 1)
    text = json.loads((made / "manifest.json").read_text())
    text["files"].pop("state.json")
    (made / "manifest.json").write_text(json.dumps(text))
    (made / "state.json").unlink()
    understood(lambda: latest_checkpoint(here / "kept"))


@fuzzed
@given(data=st.data(), whole=st.booleans())
def test_the_list_of_a_sharded_file(here: Path, data: st.DataObject, whole: bool) -> None:
    """A correct hash makes the reader parse the content too."""
    folder = here / "model"
    save_sharded(folder, WEIGHTS, LAYOUT, {"up": torch.ones(2, 3)}, SingleRank())
    content = data.draw(damaged((folder / "weights.json").read_bytes()))
    if whole:
        body = data.draw(JSON)
        body = {"weights": {"up": body}, "files": data.draw(JSON)} if data.draw(st.booleans()) else body
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        content = json.dumps({"format": 1, "sha256": digest, "body": body}).encode()
    (folder / "weights.json").write_bytes(content)
    found = {"up": torch.zeros(2, 3)}
    understood(lambda: listed_weights(folder))
    understood(lambda: load_sharded(folder, WEIGHTS, LAYOUT, found, SingleRank()))


@fuzzed
@given(data=st.data())
def test_a_header_of_safetensors(here: Path, data: st.DataObject) -> None:
    folder = here / "model"
    save_sharded(folder, WEIGHTS, LAYOUT, {"up": torch.ones(2, 3)}, SingleRank())
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = data.draw(damaged(content[8 : 8 + length]))
    size = data.draw(st.sampled_from([len(header), length, 0, 2**63, 2**64 - 1]))
    file.write_bytes(struct.pack("<Q", size) + header + content[8 + length :])
    (folder / "config.json").write_bytes(CONFIG)
    understood(lambda: sizes_of_directory(folder))
    understood(lambda: load_sharded(folder, WEIGHTS, LAYOUT, {"up": torch.zeros(2, 3)}, SingleRank()))


@fuzzed
@given(config=damaged(CONFIG), index=damaged(INDEX))
@example(config=DEEP[0], index=DEEP[1])
def test_a_config_and_an_index_of_weights(here: Path, config: bytes, index: bytes) -> None:
    (here / "config.json").write_bytes(config)
    (here / "model.safetensors.index.json").write_bytes(index)
    understood(lambda: sizes_of_directory(here))
    understood(lambda: check_weight_files(str(here)))


@fuzzed
@given(body=damaged(b'{"type": "scores", "scores": [1.0, null]}'), framed=st.booleans())
def test_a_frame_of_a_reward(here: Path, body: bytes, framed: bool) -> None:
    understood(lambda: FrameReader().feed(struct.pack(">I", len(body)) * framed + body))
