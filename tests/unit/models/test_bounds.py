"""Untrusted directories and templates are refused within resource bounds, with the value."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from rillflow.errors import ModelError
from rillflow.models.bare import character_tokenizer
from rillflow.models.directory_checks import (
    HEADER_BYTES,
    check_files,
    check_sizes,
    check_weight_files,
    weight_headers,
)
from rillflow.models.probe_child import LEAST_CHARACTERS
from rillflow.models.probes import probe_template, probe_tokenizer
from rillflow.models.tokenizer import Chat, Tokenizer

CHAT = [{"role": "user", "content": "17+25="}]


@pytest.mark.parametrize(
    "value",
    [10**8, 10**30, 2**4000, 10**5000, 0, -1, 1.5, 1e300, True, "12", [], {}, [12, -1], "x" * 10**6],
    ids=lambda value: str(type(value).__name__),
)
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
def test_a_size_that_cannot_be_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    if value == []:
        check_sizes(tmp_path, {name: value})
        return
    with pytest.raises(ModelError, match=f"config.json: {name} is ") as refused:
        check_sizes(tmp_path, {"text_config": {name: value}})
    assert len(refused.value.what) < 300


def test_sizes_of_published_models_pass(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 126, "hidden_size": 16384, "vocab_size": 262144}
    sizes |= {"num_attention_heads": [8, 16, 4], "num_key_value_heads": None, "n_inner": None}
    sizes |= {"max_position_embeddings": 10 * 2**20, "num_experts": 512, "sliding_window": None}
    check_sizes(tmp_path, sizes)


@pytest.mark.parametrize(
    ("name", "size"), [("config.json", 5), ("chat_template.jinja", 2), ("tokenizer.json", 129)]
)
def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path, name: str, size: int) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(size * 2**20)
    with pytest.raises(ModelError, match=f"{name} has {size * 2**20:,} bytes"):
        check_files(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"])
def test_a_tokeniser_with_files_of_64_mebibytes_passes(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(64 * 2**20)
    check_files(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is not a regular file"):
        check_files(tmp_path)


@pytest.mark.parametrize("length", [HEADER_BYTES + 1, 2**63, 2**64 - 1, 100])
def test_a_header_that_cannot_be_is_refused_unread(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + json.dumps({}).encode())
    with pytest.raises(ModelError, match=f"claims {length:,} bytes"):
        check_files(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
        "{% for m in messages %}{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_in_its_bounds_is_refused(template: str) -> None:
    with pytest.raises(ModelError, match="the chat template exceeds"):
        probe_template(template, {"bos_token": "<s>"}, CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% generation %}{{ bos_token }}{% endgeneration %}",
        "{{ raise_exception('no') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
        "{{ range(10**9) | list }}",
        "{% if",
    ],
)
def test_a_template_that_ends_or_refuses_may_be_rendered(template: str) -> None:
    probe_template(template, {"bos_token": "<s>"}, CHAT)


def test_a_short_chat_may_render_to_a_million_characters_and_no_more() -> None:
    probe_template(f"{{{{ 'a' * {LEAST_CHARACTERS} }}}}", {}, CHAT)
    with pytest.raises(ModelError, match="the chat template exceeds"):
        probe_template(f"{{{{ 'a' * {LEAST_CHARACTERS + 1} }}}}", {}, CHAT)


def test_a_template_that_was_refused_is_refused_again_without_another_child() -> None:
    inner = PreTrainedTokenizerFast(tokenizer_object=character_tokenizer("17+25=", 32).backend_tokenizer)
    inner.chat_template = "{{ 'a' * 10**10 }}"
    tokenizer, spent = Tokenizer(inner), []
    for _ in range(2):
        before = sum(os.times()[2:4])
        with pytest.raises(ModelError, match="the chat template exceeds"):
            tokenizer.rendered(Chat(turns=CHAT), opens=True)
        spent.append(sum(os.times()[2:4]) - before)
    assert spent[0] > 0 == spent[1]


def test_a_tokeniser_is_tried_on_texts_in_a_child(tmp_path: Path) -> None:
    backend = character_tokenizer(string.printable, 32).backend_tokenizer
    backend.save(str(tmp_path / "tokenizer.json"))
    probe_tokenizer(tmp_path, ["17+25=", "x" * 10**6])
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    many = [{"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 100}] * 3
    said["normalizer"] = {"type": "Sequence", "normalizers": many}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"tokenizer\.json exceeds the limit of memory or text length"):
        probe_tokenizer(tmp_path, ["17+25="])
    (tmp_path / "tokenizer.json").write_text("{")
    probe_tokenizer(tmp_path, ["17+25="])  # loading reports that it is no tokenizer


def write_weights(file: Path, *names: str) -> None:
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, file)


def test_only_weights_that_are_loaded_count(tmp_path: Path) -> None:
    """Mistral's directories hold the weights twice; an adapter may lie in its base's directory."""
    write_weights(tmp_path / "model.safetensors", "a.weight", "b.weight")
    write_weights(tmp_path / "consolidated.safetensors", "layers.a.weight", "layers.b.weight")
    write_weights(tmp_path / "model.fp16.safetensors", "a.weight", "c.weight")
    assert weight_headers(tmp_path).keys() == {"a.weight", "b.weight"}
    write_weights(tmp_path / "adapter_model.safetensors", "a.lora_A.weight")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert weight_headers(tmp_path).keys() == {"a.lora_A.weight"}


def test_weights_in_parts_are_those_of_the_index(tmp_path: Path) -> None:
    for part in ("model-1", "model-2", "consolidated"):
        write_weights(tmp_path / f"{part}.safetensors", f"{part}.weight")
    places = {f"model-{part}.weight": f"model-{part}.safetensors" for part in (1, 2)}
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_headers(tmp_path).keys() == places.keys()


def test_weights_under_another_name_are_refused(tmp_path: Path) -> None:
    write_weights(tmp_path / "consolidated.safetensors", "a.weight")
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        check_weight_files(str(tmp_path))
