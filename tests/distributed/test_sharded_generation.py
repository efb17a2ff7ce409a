"""Generation over tensor-parallel ranks, on gloo processes: shards sample the text of the whole module.

Every model follows from its config and a seed, so each process makes the same whole module and cuts its own
shard from it. Samples must be bit-identical on all ranks of a group.
"""

from __future__ import annotations

import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.errors import RolloutError
from rillflow.models.attention import ATTENTION, register
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.workers.collectives import Ranks, SingleRank
from tests.unit.models.shards import local_weights
from tests.unit.records.singles import rollouts_of

sys.path.insert(0, str(Path(__file__).parent))
from processes import together

Rows = dict[RowId, tuple[tuple[int, ...], tuple[float, ...]]]

CONTEXT = 128
LENGTHS = (1, 3, 3, 7, 12, 20, 31, 33)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 70,  # over 4 ranks: 18, 18, 18, 16
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 61},  # biases; over 4 ranks: 16, 16, 16, 13
    "qwen3": {"tie_word_embeddings": False, "head_dim": 10},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "gpt_neox": {"tie_word_embeddings": False, "num_key_value_heads": 8},
    "gemma3_text": {"head_dim": 12, "sliding_window": 8},
}


def whole_module(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    register()
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)  # fresh weights give every token nearly the same probability
            if name.endswith("bias"):
                weight.normal_()  # and fresh biases are zero
            weight.data = weight.data.to(dtype)
    return module.eval()


def own_part(whole: PreTrainedModel, tp: Ranks) -> PreTrainedModel:
    plan = tensor_plan(whole)
    module = sampling_module(whole, plan, tp)
    assign(module, local_weights(whole, plan, tp.rank, tp.size))
    return module


def prompts(vocabulary: int = 61) -> Batch:
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (length,), generator=random).tolist() for length in LENGTHS]
    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(len(rows))]),
        fields={"tokens": Ragged.from_rows(rows), "columns": Ragged.from_text(["{}"] * len(rows))},
    )


def engine(module: PreTrainedModel, tp: Ranks, seed: int = 3, **settings: Any) -> NativeEngine:
    return NativeEngine(
        module,
        RolloutConfig(**{"max_tokens": 30, "max_rows": 6, **settings}),
        stop_tokens=frozenset({3, 9}),
        seed=seed,
        context=CONTEXT,
        tp=tp,
    )


def bits(rollouts: Batch) -> Rows:
    return {rollout.row: (rollout.tokens, rollout.logprobs) for rollout in rollouts_of(rollouts)}


def tokens_of(rows: Rows) -> dict[RowId, tuple[int, ...]]:
    return {row: tokens for row, (tokens, _) in rows.items()}


TEXT = torch.arange(2 * 24).view(2, 24) * 7 % 61


def logits(ranks: Ranks, kinds: list[str]) -> list[Any]:
    """Return the logits of TEXT for every kind; lists, because a tensor needs this process to live on."""
    found = []
    for kind in kinds:
        module = own_part(whole_module(kind), ranks)
        with torch.inference_mode():
            found.append(module(input_ids=TEXT, use_cache=False).logits.tolist())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_the_whole_module(size: int) -> None:
    everyone = together(size, logits, list(MODELS))
    for index, kind in enumerate(MODELS):
        with torch.inference_mode():
            wanted = whole_module(kind)(input_ids=TEXT, use_cache=False).logits
        found = [torch.tensor(theirs[index]) for theirs in everyone]
        assert all(torch.equal(theirs, found[0]) for theirs in found), kind
        scale = wanted.abs().max()
        torch.testing.assert_close(found[0] / scale, wanted / scale, rtol=0, atol=1e-5, msg=kind)


DOUBLE = ("qwen2", "qwen3", "phi3")
"""Sampled in float64, where another order of additions changes no token."""
SETTINGS = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}


def sampled(ranks: Ranks) -> dict[str, Rows]:
    """Return the rows of several engines, with one start of processes for all."""
    found = {}
    for kind in DOUBLE:
        module = own_part(whole_module(kind, torch.float64), ranks)
        found[f"{kind}, float64"] = bits(engine(module, ranks, **SETTINGS).generate(prompts(), samples=2))
    module = own_part(whole_module("qwen2"), ranks)
    found["float32"] = bits(engine(module, ranks).generate(prompts(), samples=2))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Rows]:
    return sampled(SingleRank())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_samples_what_one_rank_does(size: int, alone: dict[str, Rows]) -> None:
    first, *others = together(size, sampled)
    assert all(other == first for other in others)
    for kind in DOUBLE:
        name = f"{kind}, float64"
        assert tokens_of(first[name]) == tokens_of(alone[name]), name
        assert any(len(tokens) < 30 for tokens in tokens_of(first[name]).values())  # some stop early
        for row, (_, logprobs) in first[name].items():
            assert logprobs == pytest.approx(alone[name][row][1], abs=1e-5)
    whole = whole_module("qwen2")
    for row, (tokens, logprobs) in first["float32"].items():
        start = LENGTHS[row.prompt]
        with torch.inference_mode():
            plain = whole(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        drawn = plain[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert logprobs[start:] == pytest.approx(drawn[start - 1 :].tolist(), abs=1e-5)


def deterministic(ranks: Ranks) -> list[Rows]:
    """Sample the same rows together, then each alone, then aborted half way and added again."""
    module = own_part(whole_module("qwen2"), ranks)
    whole, batch = {"deterministic": True}, prompts()
    found = [bits(engine(module, ranks, **whole).generate(batch))]
    one_by_one: Rows = {}
    for index in range(len(batch)):
        one_by_one |= bits(engine(module, ranks, **whole).generate(batch.select([index])))
    used, rows = engine(module, ranks, **whole), {}
    for row, tokens in zip(batch.row_ids(), batch.ragged("tokens").rows(), strict=True):
        used.add(Rollout.start(row, tokens.tolist()))
    for index in count():
        if index == 8:
            used.add(used.abort(next(row for row in batch.row_ids() if row not in rows)))
        rows |= {done.row: (done.tokens, done.logprobs) for done in used.step()}
        if not used.has_work:
            return [*found, one_by_one, rows]
    raise AssertionError


def test_deterministic_mode_gives_a_row_its_own_bits_over_ranks_too() -> None:
    first, second = together(2, deterministic)
    assert first == second
    together_, one_by_one, resumed = first
    assert together_ == one_by_one == resumed


def cache_sizes(ranks: Ranks) -> dict[str, int]:
    found = {}
    for kind in DOUBLE:
        used = engine(own_part(whole_module(kind), ranks), ranks)
        for row in range(4):
            used.add(Rollout.start(RowId(0, row, 0), [1, 2, 4]))
        used.step()
        found[kind] = used.held_bytes
    return found


def test_every_rank_keeps_the_keys_and_values_of_its_heads() -> None:
    whole = cache_sizes(SingleRank())
    for size in (2, 4):
        for found in together(size, cache_sizes):
            assert found == {kind: nbytes // size for kind, nbytes in whole.items()}


def replicas(ranks: Ranks) -> Rows:
    """Sample on two replicas of two ranks, with every second row each."""
    tp, replica = ranks.part([[0, 2], [1, 3]]), ranks.rank % 2
    module = own_part(whole_module("qwen2"), tp)
    batch = prompts().select(range(replica, len(LENGTHS), 2))
    return bits(engine(module, tp, deterministic=True).generate(batch, samples=2))


def one_replica(ranks: Ranks) -> Rows:
    module = own_part(whole_module("qwen2"), ranks)
    return bits(engine(module, ranks, deterministic=True).generate(prompts(), samples=2))


def test_two_replicas_say_what_one_says() -> None:
    found = together(4, replicas)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] | found[1] == together(2, one_replica)[0]


def exchanged(ranks: Ranks) -> list[Any]:
    """Replace weights between calls, as a switch between training and generation does."""
    one, other = whole_module("qwen2"), whole_module("qwen2")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.9)
    plan, module = tensor_plan(one), own_part(one, ranks)
    used, held = engine(module, ranks, deterministic=True), list(module.parameters())
    found = []
    for version, weights in enumerate((one, other, one)):
        assign(module, local_weights(weights, plan, ranks.rank, ranks.size))
        used.load(version, {})
        found.append(bits(used.generate(prompts())))
    assert list(map(id, held)) == list(map(id, module.parameters()))
    fresh = engine(own_part(other, ranks), ranks, deterministic=True)
    return [*found, bits(fresh.generate(prompts()))]


def test_weights_may_be_exchanged_between_calls() -> None:
    for first, second, third, fresh in together(2, exchanged):
        assert first == third != second == fresh


def parted(ranks: Ranks, what: str) -> str:
    """Give the ranks different inputs; return the error of each."""
    module = own_part(whole_module("qwen2"), ranks)
    odd = ranks.rank == 1
    used = engine(module, ranks, seed=4 if odd and what == "seed" else 3)
    used.load(int(odd and what == "version"), {})
    batch = prompts()
    batch = batch.select([0, 2, 1]) if odd and what == "order" else batch.select([0, 1, 2])
    try:
        used.generate(batch, samples=3)
    except RolloutError as error:
        assert not used.has_work
        return error.what
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", "^nothing$"),
        ("seed", r"^row \(epoch 0 prompt 0 sample \d\) has other tokens on rank 1"),
        ("order", r"rank 1 .* runs row \(epoch 0 prompt 2 sample 0\) where rank 0 runs row \(.* prompt 1 "),
        ("version", "another weight version"),
    ],
)
def test_ranks_that_stopped_agreeing_say_which_row(what: str, said: str) -> None:
    first, second = together(2, parted, what)
    assert first == second
    assert re.search(said, first)
