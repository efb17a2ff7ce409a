"""A rank's shard of a decoder: shapes, weights, and refusals; ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.architecture import vocabulary_of
from rillflow.models.attention import ATTENTION, register
from rillflow.models.sampling_shard import assign, local_bounds, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks
from tests.unit.models.shards import local_weights

SIZES = {
    "vocab_size": 30,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TEXT = torch.arange(12)[None]


def whole_module(kind: str = "qwen2", **changes: Any) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if kind != "gpt2" or "key_value" not in name}
    config = AutoConfig.for_model(kind, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


def on_threads(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    group = ThreadGroup(size, 20.0)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(ThreadRanks(group, rank)), range(size)))


def logits(module: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=TEXT, use_cache=False).logits
    return found


def test_one_rank_has_the_decoder_as_it_is() -> None:
    whole = whole_module("gpt2")  # has no plan and needs none
    module = sampling_module(whole, {}, SingleRank())
    assert all(parameter.is_meta for parameter in module.parameters())
    given = local_weights(whole, {}, 0, 1)
    assign(module, given)
    assert torch.equal(logits(module), logits(whole))
    shared = {name: parameter.data_ptr() for name, parameter in whole.named_parameters()}
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == shared


def test_threads_share_a_decoder_too() -> None:
    whole = whole_module(tie_word_embeddings=True)
    plan = tensor_plan(whole)

    def part(ranks: Ranks) -> torch.Tensor:
        module = sampling_module(whole, plan, ranks)
        assign(module, local_weights(whole, plan, ranks.rank, ranks.size))
        return logits(module)

    found = on_threads(3, part)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], logits(whole), rtol=0, atol=1e-5)


def test_pieces_are_those_of_torch_chunk_and_the_module_has_their_shapes() -> None:
    whole = whole_module(vocab_size=31, tie_word_embeddings=True)  # 11, 11, 9 rows; hidden units 7, 7, 6
    plan = tensor_plan(whole)
    weights = dict(whole.named_parameters())
    for rank in range(3):
        module = sampling_module(whole, plan, ThreadRanks(ThreadGroup(3, 1.0), rank))
        given = local_weights(whole, plan, rank, 3)
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        assert shapes == {name: tuple(tensor.shape) for name, tensor in given.items()}
        bounds = local_bounds(whole, plan, rank, 3)
        assert shapes == {name: tuple(stop - start for start, stop in bounds[name]) for name in bounds}
        for name, dim in (
            ("model.embed_tokens.weight", 0),
            ("model.layers.1.mlp.up_proj.weight", 0),
            ("model.layers.1.mlp.down_proj.weight", 1),
            ("model.layers.0.self_attn.k_proj.bias", 0),
        ):
            assert torch.equal(given[name], weights[name].chunk(3, dim)[rank])
        assert vocabulary_of(module) == 31


def test_parameters_stay_the_same_objects_and_ties_hold() -> None:
    whole = whole_module(tie_word_embeddings=True)
    plan = tensor_plan(whole)
    module = sampling_module(whole, plan, ThreadRanks(ThreadGroup(3, 1.0), 1))
    first = local_weights(whole, plan, 1, 3)
    assign(module, first)
    held = list(module.parameters())
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
    assert not any(parameter.requires_grad for parameter in held)
    second = {name: tensor + 1 for name, tensor in first.items()}
    assign(module, second)
    assert all(one is other for one, other in zip(held, module.parameters(), strict=True))
    assert all(
        parameter.data_ptr() == second[name].data_ptr() for name, parameter in module.named_parameters()
    )


def test_making_one_draws_no_random_number_and_leaves_the_whole_alone() -> None:
    whole = whole_module()
    before, random = logits(whole), torch.random.get_rng_state()
    module = sampling_module(whole, tensor_plan(whole), ThreadRanks(ThreadGroup(3, 1.0), 0))
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.equal(logits(whole), before)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name))
        assert buffer.data_ptr() != whole.get_buffer(name).data_ptr()


def test_heads_that_do_not_divide_are_refused() -> None:
    whole = whole_module()
    with pytest.raises(ModelError, match="tp is 2 and the model has 3 key/value heads"):
        sampling_module(whole, tensor_plan(whole), ThreadRanks(ThreadGroup(2, 1.0), 0))


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        sampling_module(whole_module("gpt2"), {}, ThreadRanks(ThreadGroup(3, 1.0), 0))


def test_a_rank_without_a_piece_is_refused() -> None:
    whole = whole_module(intermediate_size=4)  # in slices of 2, 2 and 0
    with pytest.raises(
        ModelError, match=r"tp is 3 and model\.layers\.0\.mlp\.gate_proj\.weight has the shape"
    ):
        sampling_module(whole, tensor_plan(whole), ThreadRanks(ThreadGroup(3, 1.0), 0))


def test_weights_that_do_not_fit_are_refused() -> None:
    whole = whole_module()
    module = sampling_module(whole, {}, SingleRank())
    given = local_weights(whole, {}, 0, 1)
    name = "model.norm.weight"
    with pytest.raises(ModelError, match=r"the weight model\.norm\.weight is not given"):
        assign(module, {other: tensor for other, tensor in given.items() if other != name})
    with pytest.raises(ModelError, match="the weight odd is not a parameter"):
        assign(module, {**given, "odd": given[name]})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \[2\]"):
        assign(module, {**given, name: torch.zeros(2)})


def test_a_plan_that_names_the_input_embedding_is_the_same_plan() -> None:
    whole = whole_module()
    usual = tensor_plan(whole)
    whole.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"} | whole.config.base_model_tp_plan
    assert tensor_plan(whole) == usual


def test_a_plan_that_cuts_another_embedding_is_refused() -> None:
    whole = whole_module()
    whole.model.types = torch.nn.Embedding(4, 24)
    whole.config.base_model_tp_plan = {"types": "embedding_rowwise"} | whole.config.base_model_tp_plan
    with pytest.raises(ModelError, match=r"'model\.types': 'embedding_rowwise'"):
        tensor_plan(whole)
