"""Models with a scalar head: origin of the head, refusals, and agreement with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rillflow.errors import ConfigError, ModelError
from rillflow.models.architecture import head_of, token_scores
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import (
    ScalarModel,
    load_model,
    load_scalar_model,
    require_same_tokens,
    save_model,
)
from rillflow.models.tokenizer import Tokenizer

CPU = torch.device("cpu")
Make = Callable[..., Path]


def load(path: Path | str, base: Path = Path(), dtype: str = "float32") -> ScalarModel:
    config = ModelConfig(path=str(path), dtype=dtype)
    return load_scalar_model(config, seed=0, device=CPU, base=base)


def new(dtype: str = "float32", **sizes: object) -> ScalarModel:
    """Return a model whose head is not zero."""
    small: dict = {"hidden": 32, "layers": 2, "context": 64} | sizes
    config = ModelConfig(new=NewModel(**small), dtype=dtype)
    model = load_scalar_model(config, seed=0, device=CPU, base=Path())
    noise = torch.randn(head_of(model.module).weight.shape, generator=torch.Generator().manual_seed(0))
    head_of(model.module).weight.data = (0.02 * noise).to(model.module.dtype)
    return model


@torch.no_grad()
def scores(model: ScalarModel, tokens: Tensor) -> Tensor:
    """Return [T] the head's value at every token of one row."""
    inputs = {"input_ids": tokens[None], "use_cache": False}
    return token_scores(model.module.base_model, head_of(model.module), inputs)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def with_head(
    tmp_path: Path, byte_pair: Callable[[], PreTrainedTokenizerFast]
) -> Callable[..., tuple[Path, nn.Module]]:
    """Return a function that writes a directory with a random head by transformers and returns its module."""

    def make(kind: str, auto: type, labels: int = 1) -> tuple[Path, nn.Module]:
        torch.manual_seed(3)
        inner = byte_pair()
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
        config = AutoConfig.for_model(
            kind, vocab_size=len(inner), max_position_embeddings=64, num_labels=labels, **sizes
        )
        module = auto.from_config(config, attn_implementation="sdpa").eval()  # type: ignore[attr-defined]
        module.save_pretrained(tmp_path / "headed")
        inner.save_pretrained(tmp_path / "headed")
        return tmp_path / "headed", module

    return make


@pytest.mark.parametrize(
    ("kind", "kv_heads"),
    [("qwen2", 2), ("llama", 2), ("gpt2", 4), ("gpt_neox", 4), ("opt", 4), ("gemma3_text", 2)],
)
def test_plain_transformers_gives_a_saved_model_s_scores(tmp_path: Path, kind: str, kv_heads: int) -> None:
    model = new(architecture=kind, kv_heads=kv_heads)
    save_model(model, tmp_path / "saved")
    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", attn_implementation="sdpa"
    ).eval()
    for text in ("17+25=", "A", "17+25=42"):
        row = torch.tensor(model.tokenizer.encode_completions([text])[0])  # ends with the padding token
        with torch.no_grad():
            own = plain(input_ids=row[None]).logits
        assert own.shape == (1, 1)
        torch.testing.assert_close(scores(model, row)[-1], own[0, 0], rtol=1e-5, atol=1e-6)
    assert abs(float(scores(model, row)[-1])) > 1e-3
    again = load("saved", base=tmp_path)
    assert torch.equal(scores(again, row), scores(model, row))


def test_a_saved_model_is_a_hugging_face_directory_and_nothing_of_ours(tmp_path: Path) -> None:
    save_model(new(), tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert "rillflow" not in json.dumps(config).lower()


def test_a_language_model_gets_a_new_head_and_keeps_its_body(make_directory: Make) -> None:
    folder = make_directory("llama")
    row = torch.arange(9)
    language = load_model(ModelConfig(path=str(folder)), seed=0, device=CPU, base=Path())
    body = language.module.base_model(input_ids=row[None], use_cache=False).last_hidden_state
    found = load(folder)
    assert torch.equal(found.module.base_model(input_ids=row[None], use_cache=False).last_hidden_state, body)
    assert scores(found, row).tolist() == [0.0] * 9
    assert found.tokenizer.stop_tokens == {1} and found.context == 64
    assert not found.module.training


def test_a_new_head_leaves_the_global_generator_alone(make_directory: Make) -> None:
    folder = make_directory("llama")
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    load(folder)
    new()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("qwen2", AutoModelForSequenceClassification),
        ("gpt2", AutoModelForSequenceClassification),
        ("llama", AutoModelForTokenClassification),
        ("gpt2", AutoModelForTokenClassification),
    ],
)
def test_a_head_that_is_there_is_kept(
    with_head: Callable[..., tuple[Path, nn.Module]], kind: str, auto: type, tmp_path: Path
) -> None:
    folder, module = with_head(kind, auto)
    with torch.no_grad():
        for parameter in head_of(module).parameters():
            parameter.normal_()
        module.save_pretrained(folder)  # type: ignore[operator]
        row = torch.arange(2, 12)
        own = module(input_ids=row[None]).logits.flatten()
    model = load(folder)
    found = scores(model, row)
    torch.testing.assert_close(found[-len(own) :], own, rtol=1e-5, atol=1e-5)
    save_model(model, tmp_path / "again")
    assert torch.equal(scores(load(tmp_path / "again"), row), found)


def test_a_head_of_two_labels_is_refused(with_head: Callable[..., tuple[Path, nn.Module]]) -> None:
    folder, module = with_head("llama", AutoModelForSequenceClassification, labels=2)
    with pytest.raises(ModelError, match="returns 2 numbers"):
        load(folder)
    with pytest.raises(ModelError, match="no scalar head"):
        head_of(module)


def test_a_head_that_is_declared_and_missing_is_not_made_up(
    with_head: Callable[..., tuple[Path, nn.Module]],
) -> None:
    file = with_head("llama", AutoModelForSequenceClassification)[0] / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weight 'score\.weight'"):
        load(file.parent)


@pytest.mark.parametrize("name", ["score.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_an_error(
    with_head: Callable[..., tuple[Path, nn.Module]], name: str
) -> None:
    file = with_head("llama", AutoModelForSequenceClassification)[0] / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {name: torch.full_like(weights[name], torch.nan)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        load(file.parent)


def test_a_missing_weight_of_the_body_is_not_made_up(make_directory: Make) -> None:
    file = make_directory() / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weight 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(file.parent)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "t5"}, "t5"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "an encoder-decoder"),
        ({"model_type": "mamba"}, "cannot have a scalar head"),
        ({"model_type": "cohere"}, "cannot have a scalar head"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "is a LlamaForQuestionAnswering"),
    ],
)
def test_another_architecture_is_named(make_directory: Make, changes: dict, says: str) -> None:
    folder = make_directory()
    edit(folder / "config.json", **({"architectures": None} | changes))
    with pytest.raises(ModelError, match=says):
        load(folder)


def test_a_new_one_whose_attention_cannot_be_replaced_is_refused() -> None:
    with pytest.raises(ModelError, match="GPTJForSequenceClassification"):
        new(architecture="gptj", heads=4, kv_heads=4)


def test_an_encoder_with_one_label_is_refused(
    tmp_path: Path, byte_pair: Callable[[], PreTrainedTokenizerFast]
) -> None:
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    byte_pair().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="changes the last_hidden_state of BertForSequenceClassification"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/place", "a/b/c"])
def test_a_missing_directory_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelError, match="is not there") as caught:
        load(path, base=tmp_path)
    assert repr(path) in caught.value.what


def test_exactly_one_of_path_and_new_under_its_own_name() -> None:
    for config in (ModelConfig(), ModelConfig(path="x", new=NewModel())):
        with pytest.raises(ConfigError, match=r"cost\.model has (both|neither) path"):
            load_scalar_model(config, seed=0, device=CPU, base=Path(), section="cost.model")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"architecture": "qwne2"}, "did you mean 'qwen2'"),
        ({"architecture": "mamba"}, "'mamba'"),
        ({"architecture": "cohere"}, "cannot have a scalar head"),
        ({"heads": 3}, "heads is 3 and hidden is 32"),
    ],
)
def test_what_cannot_be_made_is_named(sizes: dict, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        new(**sizes)
    assert says in str(caught.value)


def test_bfloat16_is_the_float32_model_rounded_and_its_numbers_are_wide() -> None:
    wide, narrow = new(), new(dtype="bfloat16")
    for mine, theirs in zip(wide.module.parameters(), narrow.module.parameters(), strict=True):
        assert torch.equal(mine.bfloat16(), theirs)
    found = scores(narrow, torch.arange(9))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scores(wide, torch.arange(9)), rtol=0, atol=0.02)


def test_other_tokens_than_the_policy_s_are_named() -> None:
    model = new(alphabet="0123456789+=")
    require_same_tokens(model, Tokenizer(character_tokenizer("0123456789+=", 32)), "critic")
    for alphabet, token in [("0123456789=+", 11), ("0123456789+=x", 13), ("0123456789+", 12)]:
        with pytest.raises(ModelError, match=f"the critic and the policy decode the token {token} to"):
            require_same_tokens(model, Tokenizer(character_tokenizer(alphabet, 32)), "critic")
