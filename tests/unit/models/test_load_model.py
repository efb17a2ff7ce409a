"""Models from a directory: successful loads, and refusals before any damage."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    Gemma2Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging

from rillflow.errors import ConfigError, ModelError
from rillflow.models.architecture import has_plain_head
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, choose_device, load_model

CPU = torch.device("cpu")
Make = Callable[..., Path]


def load(path: Path | str, base: Path = Path(), dtype: str = "float32") -> LanguageModel:
    return load_model(ModelConfig(path=str(path), dtype=dtype), seed=0, device=CPU, base=base)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_neox", "gemma3_text", "mixtral"])
def test_a_directory_loads_and_gives_its_own_logits(make_directory: Make, kind: str) -> None:
    folder = make_directory(kind)
    model = load(folder.name, base=folder.parent)
    tokens = torch.tensor([model.tokenizer.encode("the cat sat on the mat")])
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.no_grad():
        torch.testing.assert_close(model.module(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert model.context == 64
    assert model.tokenizer.stop_tokens == {1, 3}, "the tokeniser's end and the generation config's list"
    assert not model.module.training


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        (Qwen2Config(), True),
        (Gemma2Config(head_dim=16), False),  # a softcap changes its logits
        (Gemma2Config(head_dim=16, final_logit_softcapping=None), True),
        (CohereConfig(logit_scale=0.06), False),
        (PhiConfig(), False),  # its head has a bias
    ],
    ids=lambda given: getattr(given, "model_type", given),
)
def test_a_head_that_does_more_than_one_product_is_known(config: PreTrainedConfig, is_plain: bool) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 1}
    vars(config).update(small | heads | {"layer_types": ["full_attention"] * 2})
    assert has_plain_head(AutoModelForCausalLM.from_config(config).eval()) is is_plain


def test_the_type_of_the_weights_is_the_recipe_s(make_directory: Make) -> None:
    assert load(make_directory(), dtype="bfloat16").module.dtype is torch.bfloat16


def test_loading_says_nothing_and_leaves_the_library_s_settings(
    make_directory: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_directory()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    "config", [ModelConfig(), ModelConfig(path="somewhere", new=NewModel())], ids=["neither", "both"]
)
def test_exactly_one_of_path_and_new(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="path"):
        load_model(config, seed=0, device=CPU, base=Path())


@pytest.mark.parametrize(
    "path", ["./nowhere", "../nowhere", "/no/such/place", "a/b/c", "~/no-such-model", "models/tiny", "x y"]
)
def test_a_missing_directory_is_named_without_a_look_at_the_network(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(host: str, *_: object, **__: object) -> None:
        raise AssertionError(f"{host} was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelError) as caught:
        load(path, base=tmp_path)
    assert repr(path) in caught.value.what and "no directory" in caught.value.why


def test_a_hub_name_without_a_hub_fails_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://nowhere.invalid")
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError) as caught:
        load("owner/model-that-is-not-cached", base=tmp_path)
    assert "nowhere.invalid" in caught.value.why and str(tmp_path) in caught.value.why


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"'model\.safetensors' is a file"):
        load("model.safetensors", base=tmp_path)


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the config of the model"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}', '{"model_type": "no-such-type"}'])
def test_a_broken_config_is_named(make_directory: Make, text: str) -> None:
    folder = make_directory()
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(folder) in caught.value.what


def test_pickled_weights_are_refused_and_not_opened(make_directory: Make, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "exploded",)

    folder = make_directory()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle"):
        load(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_directory_without_weights_is_named(make_directory: Make) -> None:
    folder = make_directory()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load(folder)


def test_truncated_weights_are_named(make_directory: Make) -> None:
    file = make_directory() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(file.parent)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{parent}/outside.safetensors", "part.bin", 5])
def test_an_index_that_names_other_files_is_refused(make_directory: Make, name: object) -> None:
    folder = make_directory()
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    path = folder / "model.safetensors.index.json"
    weights = load_file(folder / "part.safetensors")
    index: dict[str, Any] = {"metadata": {}, "weight_map": dict.fromkeys(weights, "part.safetensors")}
    path.write_text(json.dumps(index))
    load(folder)
    index["weight_map"]["model.norm.weight"] = (
        name.format(parent=folder.parent) if isinstance(name, str) else name
    )
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="as a weight file") as caught:
        load(folder)
    assert "files in the same directory" in caught.value.why


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"metadata": {}, "weight_map": 3}'])
def test_an_index_that_is_none_is_refused(make_directory: Make, text: str) -> None:
    folder = make_directory()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="weight index"):
        load(folder)


Header = dict[str, Any]


def too_long(header: Header) -> int:
    return 2**60


def overlapping(header: Header) -> None:
    header["model.norm.weight"]["data_offsets"][0] -= 4


def beyond_the_end(header: Header) -> None:
    header["model.norm.weight"]["data_offsets"][1] += 4096


def too_large(header: Header) -> None:
    header["model.norm.weight"]["shape"] = [2**40, 2**40]


def of_another_type(header: Header) -> None:
    header["model.norm.weight"]["dtype"] = "I8"


@pytest.mark.parametrize("lie", [too_long, overlapping, beyond_the_end, too_large, of_another_type])
def test_a_header_that_lies_is_refused(make_directory: Make, lie: Callable[[Header], int | None]) -> None:
    file = make_directory() / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    told = lie(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", told or len(text)) + text + content[8 + length :])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(file.parent)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_is_refused_and_not_waited_for(make_directory: Make, name: str) -> None:
    folder = make_directory()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError):
        load(folder)


def test_a_missing_weight_is_not_made_up(make_directory: Make) -> None:
    file = make_directory() / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weight 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(file.parent)


def test_a_weight_of_another_shape_is_an_error(make_directory: Make) -> None:
    file = make_directory() / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": torch.ones(5)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the weights of the model"):
        load(file.parent)


def test_weights_that_are_not_finite_are_an_error(make_directory: Make) -> None:
    file = make_directory() / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": torch.full((32,), torch.nan)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        load(file.parent)


def test_a_directory_s_own_code_is_not_run(make_directory: Make, tmp_path: Path) -> None:
    folder = make_directory()
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit(folder / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "code.Mine"})
    with pytest.raises(ModelError, match="brings its own code for type 'mine'"):
        load(folder)
    edit(folder / "config.json", model_type="llama")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "code.Mine"]})
    load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_quantised_model_cannot_be_trained(make_directory: Make) -> None:
    folder = make_directory()
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match="quantised"):
        load(folder)


def test_heads_that_do_not_divide_are_named(make_directory: Make) -> None:
    folder = make_directory()
    edit(folder / "config.json", num_attention_heads=5, head_dim=None)
    with pytest.raises(ModelError, match="config") as caught:
        load(folder)
    assert "5" in caught.value.why


def test_an_encoder_is_no_causal_model(
    tmp_path: Path, byte_pair: Callable[[], PreTrainedTokenizerFast]
) -> None:
    config = BertConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    byte_pair().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a BertForMaskedLM"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "t5"}, "t5"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "an encoder-decoder"),
        ({"model_type": "mamba"}, "has no weight"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification"),
    ],
)
def test_another_architecture_is_named(make_directory: Make, changes: dict, says: str) -> None:
    folder = make_directory()
    edit(folder / "config.json", **({"architectures": None} | changes))
    with pytest.raises(ModelError, match=says):
        load(folder)


def test_a_missing_tokeniser_is_named(make_directory: Make) -> None:
    folder = make_directory("qwen2")
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokeniser"):
        load(folder)


def test_a_vocabulary_larger_than_the_embedding_is_an_error(
    make_directory: Make, byte_pair: Callable[[], PreTrainedTokenizerFast]
) -> None:
    inner = byte_pair()
    folder = make_directory(inner=inner)
    inner.add_tokens(["<|more|>"])
    inner.save_pretrained(folder)
    with pytest.raises(
        ModelError, match=f"{len(inner)} tokens and the model's embedding {len(inner) - 1} rows"
    ):
        load(folder)


def test_an_embedding_larger_than_the_vocabulary_is_fine(make_directory: Make) -> None:
    model = load(make_directory(vocab_size=320))
    assert model.tokenizer.vocabulary_size < 320


def test_a_copied_directory_loads_without_the_original(make_directory: Make, tmp_path: Path) -> None:
    folder = make_directory()
    shutil.move(folder, tmp_path / "moved")
    assert load(tmp_path / "moved").context == 64


def test_devices() -> None:
    there = torch.cuda.is_available()
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type == ("cuda" if there else "cpu")
    for name in ("tpu", "cuda:97", *(() if there else ("cuda",))):
        with pytest.raises(ConfigError) as caught:
            choose_device(name)
        assert repr(name) in caught.value.what and "cpu" in caught.value.why
