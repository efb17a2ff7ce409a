"""Splitting a decoder into stages: the arithmetic, the layers of a stage, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.architecture import short_copy, trial
from rillflow.models.attention import ATTENTION, register
from rillflow.sharding.pipeline import (
    anatomy,
    check_cut,
    cut_stage,
    layers_of,
    require_same,
    weight_stages,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
}


def make(kind: str, scalar: bool = False, **changes: object) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes}, num_labels=1)
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=ATTENTION).eval()


@given(count=st.integers(1, 40), stages=st.integers(1, 40))
def test_layers_are_dealt_out_evenly_and_in_order(count: int, stages: int) -> None:
    if stages > count:
        with pytest.raises(ModelError, match=f"pp is {stages} and the model has {count} layers"):
            layers_of(0, stages, count)
        return
    dealt = [layers_of(stage, stages, count) for stage in range(stages)]
    assert [layer for own in dealt for layer in own] == list(range(count))
    sizes = [len(own) for own in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_more_stages_than_layers_are_refused_with_the_sum() -> None:
    with pytest.raises(ModelError, match=r"7 - 5 = 2 stages would have none"):
        layers_of(0, 7, 5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "starcoder2", "gemma3_text", "olmo2", "phi3"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_chained_stages_say_what_the_whole_says(kind: str, stages: int) -> None:
    module = make(kind)
    check_cut(module, anatomy(module, short_copy(module)), stages, trial(module))
    assert all(layer is not None for layer in module.base_model.layers)
    torch.testing.assert_close(trial(module), trial(make(kind)), rtol=0, atol=0)
    assert trial(module).shape[-1] == 64, "a number a token of the vocabulary"


def test_a_scalar_head_is_cut_too() -> None:
    module = make("qwen2", scalar=True)
    parts = anatomy(module, short_copy(module))
    assert parts.heads == ("score",) and not parts.tied
    check_cut(module, parts, 3, trial(module))
    assert trial(module).shape[-1] == 32, "hidden states, whose head is the scorer's"


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_keeps_its_parameters_and_their_names(tied: bool) -> None:
    whole = make("qwen2", tie_word_embeddings=tied)
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    lies = weight_stages(whole, anatomy(whole, short_copy(whole)), 3)
    for stage in range(3):
        module = make("qwen2", tie_word_embeddings=tied)
        cut_stage(module, anatomy(module, short_copy(module)), stage, 3)
        own = {name: weight.shape for name, weight in module.named_parameters()}
        assert own == {name: shapes[name] for name, stages in lies.items() if stage in stages}
    assert lies["model.embed_tokens.weight"] == ((0, 2) if tied else (0,))
    assert ("lm_head.weight" in lies) is not tied
    assert lies["model.norm.weight"] == (2,)
    assert lies["model.layers.1.mlp.up_proj.weight"] == (0,)
    assert lies["model.layers.2.mlp.up_proj.weight"] == (1,)


def test_a_dropped_layer_keeps_what_the_loop_reads() -> None:
    module = make("gemma3_text")
    cut_stage(module, anatomy(module, short_copy(module)), 0, 2)
    assert [layer.hidden_size for layer in module.base_model.layers] == [32] * 5
    assert not list(module.base_model.layers[4].parameters())


def test_a_decoder_that_adds_positions_to_given_embeddings_is_refused() -> None:
    register()
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    with pytest.raises(ModelError, match=r"cannot be cut into pipeline stages\n.*wpe"):
        anatomy(module, short_copy(module))


class Scaled(torch.nn.Module):
    """A body that scales its embeddings, as some decoders do."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.scale = 3.0
        forward = body.forward

        def scaled(input_ids=None, inputs_embeds=None, **rest):  # type: ignore[no-untyped-def]
            given = body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return forward(inputs_embeds=given * self.scale, **rest)

        self.forward = scaled  # type: ignore[method-assign]


def test_a_decoder_that_scales_given_embeddings_is_refused() -> None:
    module = make("qwen2")
    module.model.forward = Scaled(module.model).forward
    with pytest.raises(ModelError, match="gives other outputs with 2 pipeline stages"):
        check_cut(module, anatomy(module, short_copy(module)), 2, trial(module))
    check_cut(module, anatomy(module, short_copy(module)), 1, trial(module))


def test_another_shape_is_something_else() -> None:
    with pytest.raises(ModelError, match="by 1 of the largest"):
        require_same(make("qwen2"), torch.ones(2), torch.ones(3), "tp 2", "", "")
