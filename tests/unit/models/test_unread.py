"""Weights that are read or drawn slice by slice equal those of a normally loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rillflow.errors import ModelError
from rillflow.models.architecture import short_copy
from rillflow.models.attention import ATTENTION, register
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, outline

CPU = torch.device("cpu")
Make = Callable[..., Path]


def outlined(config: ModelConfig, seed: int = 0) -> LanguageModel:
    return outline(LanguageModel, config, seed=seed, device=CPU, base=Path(), section="policy.model")


def in_files(folder: Path) -> list[Path]:
    """Split the same weights into several files with an index; return those files."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_slices_of_files_are_those_of_the_whole_model(make_directory: Make, kind: str, dtype: str) -> None:
    folder = make_directory(kind)
    in_files(folder)
    model = outlined(ModelConfig(path=str(folder), dtype=dtype))  # type: ignore[arg-type]
    assert all(parameter.is_meta for parameter in model.module.parameters())
    whole = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).named_parameters())
    seen = dict(model.source())
    assert seen.keys() == whole.keys()
    for name, read in seen.items():
        box = tuple(slice(length // 3, length // 3 + length // 2) for length in whole[name].shape)
        assert torch.equal(read(box), whole[name][box]) and read(box).dtype == whole[name].dtype, name


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mixtral", "gemma3_text", "opt"])
def test_a_new_model_has_the_numbers_that_the_seed_gives_transformers(kind: str) -> None:
    heads = 4 if kind in ("gpt2", "opt") else 2
    new = NewModel(architecture=kind, hidden=32, layers=3, kv_heads=heads, context=32, alphabet="01")
    before = torch.get_rng_state()
    module = load_model(ModelConfig(new=new), seed=3, device=CPU, base=Path()).module
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        usual = AutoModelForCausalLM.from_config(module.config, attn_implementation=ATTENTION)
    assert all(torch.equal(module.get_parameter(name), weight) for name, weight in usual.named_parameters())
    assert all(torch.equal(module.get_buffer(name), held) for name, held in usual.named_buffers())


def test_a_weight_that_is_in_the_files_twice_stays_one(make_directory: Make) -> None:
    file = make_directory("llama", tie_word_embeddings=True) / "model.safetensors"
    weights = load_file(file)
    twice = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(twice, file, metadata={"format": "pt"})
    for model in (
        outlined(ModelConfig(path=str(file.parent))),
        outlined(ModelConfig(path=str(file.parent))).read(),
    ):
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


def test_a_file_that_is_missing_is_named(make_directory: Make) -> None:
    folder = make_directory()
    file = in_files(folder)[1]
    file.unlink()
    with pytest.raises(ModelError, match=f"lacks {file.name}") as caught:
        outlined(ModelConfig(path=str(folder)))
    assert "index.json lists" in caught.value.why


def test_a_file_that_is_not_whole_is_named(make_directory: Make) -> None:
    folder = make_directory()
    file = in_files(folder)[1]
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ModelError, match=f"the file {file.name} of the model"):
        outlined(ModelConfig(path=str(folder)))


def test_a_file_of_another_model_is_refused(make_directory: Make) -> None:
    folder = make_directory()
    file = next(each for each in in_files(folder) if "model.norm.weight" in load_file(each))
    weights = load_file(file)
    other = {name.replace("norm", "last_norm"): weight for name, weight in weights.items()}
    save_file(other, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weight 'model\.norm\.weight'"):
        outlined(ModelConfig(path=str(folder)))
    save_file(weights | {"model.norm.weight": torch.ones(48)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the weights of the model") as caught:
        outlined(ModelConfig(path=str(folder)))
    assert "model.norm.weight" in str(caught.value) or "size" in str(caught.value)


def test_a_file_that_changes_after_the_headers_were_read_is_an_error(make_directory: Make) -> None:
    file = make_directory() / "model.safetensors"
    model = outlined(ModelConfig(path=str(file.parent)))
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ModelError, match=r"the weight .* cannot be read"):
        model.read()


def test_a_short_copy_shows_every_kind_of_layer() -> None:
    sizes = {"vocab_size": 3000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    shown = {}
    register()
    for kind in ("qwen2", "gemma3_text"):
        config = AutoConfig.for_model(kind, **sizes, **heads)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        copy = short_copy(module)
        shown[kind] = copy.config.num_hidden_layers
        assert copy.config.vocab_size == 256 and module.config.num_hidden_layers == 12
        assert all(float(weight.detach().abs().max()) > 0 for weight in copy.parameters()), (
            "a bias of 0 hides what it does"
        )
    assert shown == {"qwen2": 2, "gemma3_text": 6}, (
        "of Gemma's layers the sixth is the first with full attention"
    )
