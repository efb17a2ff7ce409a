"""A new model: its sizes, its seed, its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import ModelError
from rillflow.models.bare import END, character_tokenizer
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.models.tokenizer import Tokenizer

CPU = torch.device("cpu")


def make(seed: int = 0, dtype: str = "float32", **sizes: object) -> LanguageModel:
    small: dict = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64} | sizes
    config = ModelConfig(new=NewModel(**small), dtype=dtype)
    return load_model(config, seed=seed, device=CPU, base=Path())


def weights(model: LanguageModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])


def test_the_sizes_are_those_asked_for() -> None:
    model = make(layers=3, heads=8, kv_heads=4, alphabet="01")
    config = model.module.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 3, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, model.context) == (8, 4, 64)
    assert model.module.get_input_embeddings().weight.shape == (3, 32)
    assert model.module.get_input_embeddings().weight is model.module.get_output_embeddings().weight
    assert not model.module.training


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_bfloat16_is_the_float32_model_rounded() -> None:
    assert torch.equal(weights(make(dtype="bfloat16")), weights(make()).bfloat16())


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "opt"])
def test_the_first_weights_are_as_wide_as_asked(kind: str) -> None:
    kv_heads = 2 if kind == "qwen2" else 4
    default, wide = (make(architecture=kind, kv_heads=kv_heads, **std) for std in ({}, {"init_std": 0.1}))
    of_default, of_wide = (
        model.module.get_input_embeddings().weight.std().item() for model in (default, wide)
    )
    assert of_default == pytest.approx(0.02, rel=0.1) and of_wide == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "kv_heads"),
    [("llama", 2), ("qwen3", 2), ("mistral", 1), ("gpt2", 4), ("gpt_neox", 4), ("opt", 4)],
)
def test_any_plain_decoder_can_be_made(kind: str, kv_heads: int) -> None:
    model = make(architecture=kind, kv_heads=kv_heads, context=16)
    assert model.module.config.model_type == kind
    assert (model.context, model.module.config.num_hidden_layers) == (16, 2)
    logits = model.module(input_ids=torch.tensor([model.tokenizer.encode("1+2=")])).logits
    assert logits.shape == (1, 4, model.tokenizer.vocabulary_size)


def test_a_new_mixture_has_few_experts() -> None:
    config = make(architecture="qwen3_moe", layers=1).module.config
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"architecture": "qwne2"}, "did you mean 'qwen2'"),
        ({"heads": 3}, "heads is 3 and hidden is 32"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads is 3 and heads is 4"),
        ({"architecture": "gpt2"}, "kv_heads is 2 and heads is 4"),
        ({"hidden": 36, "heads": 4}, "hidden is 36 and heads is 4"),
        ({"architecture": "dbrx", "kv_heads": 4}, "a dbrx cannot have hidden 32, layers 2, heads 4"),
        ({"architecture": "t5"}, "'t5'"),
        ({"architecture": "mamba"}, "'mamba'"),
        ({"architecture": "bert", "kv_heads": 4}, "changes the logits of BertLMHeadModel"),
        ({"architecture": "vit", "kv_heads": 4}, "'vit'"),
    ],
)
def test_what_cannot_be_made_is_named(sizes: dict, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        make(**sizes)
    assert says in str(caught.value)


@pytest.mark.parametrize("alphabet", ["0123456789+-=", "ab\n\t ", "zéß", "日本語", "🙂x", "aab"])
def test_every_character_is_one_token(alphabet: str) -> None:
    tokenizer = Tokenizer(character_tokenizer(alphabet, 32))
    tokens = [tokenizer.encode(character) for character in alphabet]
    assert all(len(row) == 1 for row in tokens)
    assert len({row[0] for row in tokens}) == len(set(alphabet))
    assert 0 not in tokenizer.encode(alphabet)
    assert tokenizer.decode(tokenizer.encode(alphabet)) == alphabet


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="0123456789+-*/=() .,?:\nABCxyzé日", max_size=40))
def test_text_comes_back_as_it_was(text: str) -> None:
    tokenizer = Tokenizer(character_tokenizer("0123456789+-*/=() .,?:\nABCxyzé日", 64))
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode_completions([text])[0]) == text


def test_a_character_outside_the_alphabet_is_named() -> None:
    tokenizer = Tokenizer(character_tokenizer("0123456789+=", 32))
    for text, character in [("1x2", "'x'"), ("é", "'é'"), ("1 2", "' '"), (f"1{END}", "'<'")]:
        with pytest.raises(ModelError) as caught:
            tokenizer.encode(text)
        assert character in caught.value.what and "alphabet" in str(caught.value.fix)


def test_the_end_token_ends_and_pads() -> None:
    model = make(alphabet="0123456789+=")
    assert model.tokenizer.stop_tokens == {0}
    assert model.tokenizer.encode_completions(["42"])[0] == [*model.tokenizer.encode("42"), 0]
    assert model.tokenizer.decode([0, *model.tokenizer.encode("42"), 0, 0]) == "42"
    assert model.module.config.pad_token_id is None, "a padding row of the embedding would get no gradient"
